"""Ranks of a group in processes that share one GPU, driven over pipes; the test is their launcher.

Each process does what a line of JSON asks for, and answers with one. What they exchange goes over shared GPU memory:
two contexts of one GPU take turns of about 2 ms, so an exchange takes as long.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

SHARING = "ROSTER_TEST_RANKS_SHARE_A_GPU"
_MARK = "@answer "


class GpuRanks:
    """Processes of the ranks of one group."""

    def __init__(self, size: int, folder: Path) -> None:
        """`folder`: an empty one, in which the ranks find one another."""
        self.size, self._folder = size, folder
        self._lines: list[queue.Queue[str]] = [queue.Queue() for _ in range(size)]
        self._processes = [self._started(rank) for rank in range(size)]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def all(self, do: str, timeout_s: float = 60.0, **arguments: Any) -> list[Any]:
        """Has all ranks do something at once; returns their answers. Raises AssertionError if one fails."""
        for rank in range(self.size):
            self.ask(rank, do, **arguments)
        return [self.answer(rank, timeout_s) for rank in range(self.size)]

    def ask(self, rank: int, do: str, **arguments: Any) -> None:
        """Has a rank do something, and does not wait for it."""
        pipe = self._processes[rank].stdin
        assert pipe is not None
        pipe.write(json.dumps({"do": do, **arguments}) + "\n")
        pipe.flush()

    def answer(self, rank: int, timeout_s: float = 60.0) -> Any:
        """Waits for a rank's answer. Raises AssertionError if there is none in time, or it is an error."""
        lines, deadline = self._lines[rank], time.monotonic() + timeout_s
        while True:
            try:
                line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"rank {rank} does not answer") from None
            if line.startswith(_MARK):
                answer = json.loads(line.removeprefix(_MARK))
                assert "error" not in answer, f"rank {rank}: {answer['error']}"
                return answer["is"]
            assert line, f"rank {rank} has ended"
            print(f"rank {rank}: {line}", end="")

    def kill(self, rank: int) -> None:
        """Kills a rank's process."""
        self._processes[rank].send_signal(signal.SIGKILL)
        self._processes[rank].wait()

    def give_up(self, epoch: int, why: str) -> None:
        """Lets all ranks know that the forming of that number is over."""
        scratch = self._folder / "why"
        scratch.write_text(why)
        scratch.rename(self._folder / f"over-{epoch}")

    def start(self, rank: int) -> None:
        """Starts a process in place of one that was killed."""
        self._processes[rank] = self._started(rank)

    def close(self) -> None:
        """Ends all processes."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _started(self, rank: int) -> subprocess.Popen[str]:
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": paths, SHARING: "1"}
        command = [sys.executable, "-m", "tests.support.gpu_ranks", str(rank), str(self.size), str(self._folder)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, bufsize=1)
        self._lines[rank] = queue.Queue()
        threading.Thread(target=_read, args=(process.stdout, self._lines[rank]), daemon=True).start()
        return process


def _read(pipe: IO[str], lines: queue.Queue[str]) -> None:
    """Passes lines on, and an empty one at the end."""
    for line in pipe:
        lines.put(line)
    lines.put("")


# ---------------------------------------------------------------------- in a rank's process


class Rank:
    """What a rank's process does, by the names that `GpuRanks.all` takes."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        from runner_svc.gpu.ranks import placing
        from runner_svc.group.forming import Group, store_in
        from runner_svc.interface.ranks import Shard

        placing.LIMIT_S = 8.0  # a test ends sooner
        self._folder, self._epoch = folder, 0
        self.group = Group(Shard(rank, size), store_in(folder, size), given_up=self._why)
        self._backend: Any = None
        self._loads = 0

    def _why(self) -> str:
        path = self._folder / f"over-{self._epoch}"
        return path.read_text() if path.exists() else ""

    def load(self, folder: str, **arguments: Any) -> dict[str, Any]:
        """Loads a model; `arguments` are those of `gpu_backends.load`, as `model_arguments` reads them."""
        from tests.support.gpu_backends import load

        self.group.abort()
        self._backend = None
        _collect()
        self._backend = load(Path(folder), ranks=self.group, **model_arguments(arguments))
        self._loads += 1
        return {"blocks": self._backend.num_blocks}

    def form(self, epoch: int) -> dict[str, Any]:
        """Forms the group, and the backend's graphs if there is one."""
        self._epoch = epoch
        self.group.form(epoch)
        began_at, captured = time.monotonic(), None
        if self._backend is not None:
            before = self._backend._graphs
            self._backend.regroup()
            captured = self._backend._graphs is not before
        return {"seconds": time.monotonic() - began_at, "captured": captured, "loads": self._loads}

    def generate(self, prompts: list[list[int]], seed: int, max_tokens: int, logprobs: int = 0) -> list[list[int]]:
        """Returns the greedy tokens after each prompt, by random plans that all ranks execute alike."""
        from tests.support.greedy_driver import RandomDriver

        return RandomDriver(self._backend, random.Random(seed)).generate(prompts, max_tokens, 40)

    def lose(self, prompts: list[list[int]], seed: int, max_tokens: int) -> dict[str, Any]:
        """As `generate`, while another rank is killed; returns the error, and seconds since the group was given up."""
        try:
            self.generate(prompts, seed, max_tokens)
        except Exception as error:
            over = self._folder / f"over-{self._epoch}"
            since = time.time() - over.stat().st_mtime if over.exists() else -1.0
            return {"error": f"{error}", "since": since, "broken": self._backend.is_broken_by(error)}
        return {"error": "", "since": 0.0, "broken": False}

    def exchange(self, seed: int, replays: int) -> dict[str, Any]:
        """Exchanges tensors of random sizes, then replays a graph of such exchanges; compares all with their sums."""
        from tests.support.gpu_exchanges import exchanged

        return exchanged(self.group, seed, replays)

    def spin(self) -> None:
        """Waits for an exchange that the others never begin."""
        from tests.support.gpu_exchanges import spun

        spun(self.group)


def model_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `gpu_backends.load` from what JSON has of them."""
    import torch

    from runner_svc.weights.on_load import OnLoad

    made = dict(arguments)
    if "dtype" in made:
        made["dtype"] = getattr(torch, made["dtype"])
    if "on_load" in made:
        made["on_load"] = OnLoad(made["on_load"], False)
    return made


def _collect() -> None:
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()


def main(arguments: Sequence[str]) -> None:
    rank = Rank(int(arguments[0]), int(arguments[1]), Path(arguments[2]))
    for line in sys.stdin:
        request = json.loads(line)
        do: Callable[..., Any] = getattr(rank, request.pop("do"))
        faulthandler.dump_traceback_later(20)
        try:
            answer = {"is": do(**request)}
        except BaseException as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        faulthandler.cancel_dump_traceback_later()
        print(_MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
