"""Handle of the process that runs transformers: started early, started on its cases later, ended after its time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Self

from bench.gpu_comparison.budget import Budget

PREPARED = "prepared"
"""Line by which the process reports that it is prepared."""
GRACE_S = 15.0
"""Seconds past the budget after which the process is killed."""


class TransformersProcess:
    """Process of the transformers side; a context manager that ends the process on exit."""

    def __init__(self, model: str) -> None:
        """`model` is a folder or name; the other arguments are copied from this process's command line."""
        self._command = [sys.executable, "-m", "bench.gpu_comparison.transformers_side", model, *sys.argv[1:]]
        self._prepared = threading.Event()

    def __enter__(self) -> Self:
        # Offline: the model is local, and looking for kernels on an unreachable hub takes time.
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
        """Blocks until the process is prepared or has ended."""
        self._prepared.wait()

    def measure(self, budget: Budget) -> None:
        """Starts its cases; returns when it has ended, soon after the budget at the latest."""
        seconds = max(0.0, budget.left_s)
        try:
            self._stdin.write(f"{seconds}\n")
            self._stdin.flush()
            self._process.wait(seconds + GRACE_S)
        except BrokenPipeError:
            self._process.wait()
        except subprocess.TimeoutExpired:
            print("transformers: still running after its time, killed", flush=True)
            return
        if self._process.returncode:
            print(f"transformers: ended with status {self._process.returncode}; see its output above", flush=True)

    def _forward(self) -> None:
        """Forwards the process's output."""
        for text in self._stdout:
            if text.strip() == PREPARED:
                self._prepared.set()
            else:
                print(text, end="", flush=True)
        self._prepared.set()
