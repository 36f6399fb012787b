"""Measures a restart of the scheduler: from the kill to each stream's next token, stage by stage.

Streams run on a hash runner; the scheduler is killed (SIGKILL) and restarted at once, several times. The stages are log
lines of both services, in seconds after the kill; "next token" is measured by the clients.

    python -m bench.scheduler.restart [--restarts 10] [--streams 16] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import tempfile
import time
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.provenance import provenance, write_results
from roster_client.client import EventStream, RosterClient
from roster_client.client.events import Delta
from tests.support.processes import RosterProcesses

STAGES = {
    "engine's process has imported and bound": "listening",
    "the engine runs": "the engine runs",
    "the runner's sequences go on": "a runner's sequences go on",
    "the front worker listens": "a front worker listens",
}
SCHEDULER = {"retention_s": 1}
RUNNER = {
    "device": "hash",
    "slots": 64,
    "kv_tokens": 1 << 19,
    "context_length": 1 << 16,
    "test_backend": {"step_ms": 8},
}
TOKENS = 60_000
BETWEEN_S = 2.0
LINE = re.compile(r"^(?P<time>\S+Z) \[\w+ *\] (?P<event>.*?)(?:  |$)", re.MULTILINE)


class Watched:
    """Stream that records the time of its next token after each kill."""

    def __init__(self, stream: EventStream, kills: list[float], resumed_s: list[float]) -> None:
        self._stream = stream
        self._kills = kills
        self._resumed_s = resumed_s
        self.num_tokens = 0

    async def read(self) -> None:
        """Reads the stream until the task is cancelled."""
        seen = 0
        async for event in self._stream:
            if not isinstance(event, Delta):
                continue
            self.num_tokens += len(event.token_ids)
            if len(self._kills) > seen:
                seen = len(self._kills)
                self._resumed_s.append(time.time() - self._kills[-1])


def stages_after(log: str, kill_s: float) -> dict[str, float]:
    """Returns the seconds from the kill to the first log line of each stage."""
    found: dict[str, float] = {}
    for match in LINE.finditer(log):
        at_s = datetime.fromisoformat(match["time"]).timestamp()
        for stage, event in STAGES.items():
            if match["event"] == event and at_s >= kill_s:
                found.setdefault(stage, at_s - kill_s)
    return found


async def measure(folder: Path, restarts: int, streams: int) -> dict[str, list[float]]:
    """Returns, in seconds after the kill, each stage of each restart and each stream's next token."""
    times: dict[str, list[float]] = defaultdict(list)
    kills: list[float] = []
    with RosterProcesses(folder, scheduler=SCHEDULER, runner=RUNNER) as roster:
        async with RosterClient(roster.address) as client:
            options: Any = {"max_tokens": TOKENS, "ignore_eos": True}
            watched = [
                Watched(client.generate([number], **options), kills, times["next token"]) for number in range(streams)
            ]
            reading = [asyncio.create_task(stream.read()) for stream in watched]
            while not all(stream.num_tokens for stream in watched):
                await asyncio.sleep(0.05)
            for number in range(1, restarts + 1):
                kill_s = time.time()
                await asyncio.to_thread(roster.end, "scheduler", signal.SIGKILL)
                kills.append(kill_s)
                roster.start_one("scheduler")
                while len(times["next token"]) < number * streams:
                    await asyncio.sleep(0.05)
                for stage, seconds in stages_after((folder / "scheduler.log").read_text(), kill_s).items():
                    times[stage].append(seconds)
                await asyncio.sleep(BETWEEN_S)
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        times = asyncio.run(measure(Path(folder), arguments.restarts, arguments.streams))
    rows = {}
    for stage in (*STAGES, "next token"):
        p50, p99 = np.percentile(times[stage], [50, 99])
        rows[stage] = {"p50_s": round(p50, 3), "p99_s": round(p99, 3)}
        print(f"{stage:42} p50 {p50:6.3f} s   p99 {p99:6.3f} s")
    if arguments.json:
        result = {"restarts": arguments.restarts, "streams": arguments.streams, "after_the_kill": rows}
        source = provenance("bench.scheduler.restart", ("grpcio", "pyzmq", "pydantic", "numpy"))
        write_results(arguments.json, source, result)


if __name__ == "__main__":
    main()
