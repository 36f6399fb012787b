"""The null runner of `bench.frontend`: `roster-runner --device null` that also records the engine's turnarounds.

One turnaround is the time in milliseconds from sending result N to receiving plan N + depth, which that result allows.
Each is appended to a file as a line.
"""

from __future__ import annotations

import argparse
import signal
import time
from pathlib import Path

from roster_protos import plan_pb2
from runner_svc.backends.null_backend import NullBackend
from runner_svc.execution.runner import Runner
from runner_svc.link.plan_socket import PlanSocket


class ProbedSocket(PlanSocket):
    """Plan socket that records turnarounds."""

    def __init__(self, runner: Runner, endpoint: str, depth: int, out: Path) -> None:
        super().__init__(runner, endpoint)
        self._depth = depth
        self._sent_s: dict[int, float] = {}
        self._file = out.open("a", buffering=1)

    def _take_message(self, message: plan_pb2.ToRunner) -> None:
        sent_s = self._sent_s.pop(message.number - self._depth, None) if message.HasField("plan") else None
        if sent_s is not None:
            self._file.write(f"{(time.monotonic() - sent_s) * 1000:.3f}\n")
        super()._take_message(message)

    def _post(self, message: plan_pb2.ToScheduler) -> bytes:
        if message.HasField("result"):
            self._sent_s[message.number] = time.monotonic()
        return super()._post(message)


def main() -> None:
    """Serves until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--link", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    backend = NullBackend(num_slots=arguments.slots, step_ms=arguments.step_ms)
    socket = ProbedSocket(Runner(backend, "bench"), arguments.link, arguments.depth, arguments.out)
    signal.signal(signal.SIGTERM, lambda number, frame: socket.stop())
    socket.run()


if __name__ == "__main__":
    main()
