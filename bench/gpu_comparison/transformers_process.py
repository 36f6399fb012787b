"""The other side's process, seen from this one: started early, told to go, ended when its time is over."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Self

from bench.gpu_comparison.budget import Budget

PREPARED = "prepared"
"""The line by which it says so."""
GRACE_S = 15.0
"""Past the budget, to leave; then it is killed."""


class TransformersProcess:
    """Use as `with`: on the way out it is ended, whatever it does."""

    def __init__(self, model: str) -> None:
        """`model`: a folder or name; the rest of its command line is this process's own."""
        self._command = [sys.executable, "-m", "bench.gpu_comparison.transformers_side", model, *sys.argv[1:]]
        self._prepared = threading.Event()

    def __enter__(self) -> Self:
        # Nothing is asked of a hub: the model is here, and looking there for kernels takes time where there is none.
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=environment,
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the process was started without pipes")
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._reader = threading.Thread(target=self._forward, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join(timeout=1)

    def wait_prepared(self) -> None:
        """Returns when it only waits, or has ended."""
        self._prepared.wait()

    def measure(self, budget: Budget) -> None:
        """Lets it go; returns when it has ended, which is soon after the budget at the latest."""
        seconds = max(0.0, budget.left_s)
        try:
            self._stdin.write(f"{seconds}\n")
            self._stdin.flush()
            self._process.wait(seconds + GRACE_S)
        except BrokenPipeError:
            self._process.wait()
        except subprocess.TimeoutExpired:
            print("transformers: still there after its time, killed", flush=True)
            return
        if self._process.returncode:
            print(f"transformers: ended with status {self._process.returncode}, what it printed says why", flush=True)

    def _forward(self) -> None:
        """Prints what it prints."""
        for text in self._stdout:
            if text.strip() == PREPARED:
                self._prepared.set()
            else:
                print(text, end="", flush=True)
        self._prepared.set()
