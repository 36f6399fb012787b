"""Compares each early refusal with the truth: the time that the same request took in a fork that admitted it.

    python -m tests.support.refusal_trials MIX SEED SECONDS

prints one world's results as JSON. It forks, so it is a process of its own, without threads.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from roster_common.logs import configure_logs
from tests.support.refusal_mixes import MIXES
from tests.support.refusal_verdicts import Report, Verdict
from tests.support.refusal_world import World


def trials(mixes: Iterable[str], seeds: Iterable[int], seconds: float, *, refuse_all: bool = False) -> Report:
    """Runs one world per mix and seed, each in a process of its own, two at a time.

    `refuse_all`: refuse every request with a deadline.
    """
    tries = [(mix, seed) for mix in mixes for seed in seeds]
    report = Report()
    with ThreadPoolExecutor(2) as pool:
        for told in pool.map(lambda one: _trial(one[0], one[1], seconds, refuse_all), tries):
            report.add(told)
    return report


def _trial(mix: str, seed: int, seconds: float, refuse_all: bool) -> Report:
    command = [sys.executable, "-m", "tests.support.refusal_trials", mix, str(seed), str(seconds)]
    command += ["all"] if refuse_all else []
    done = subprocess.run(command, cwd=Path(__file__).parents[2], check=True, capture_output=True, text=True)
    told = json.loads(done.stdout)
    return Report([Verdict(**verdict) for verdict in told["verdicts"]], told["requests"])


def main() -> None:
    configure_logs("console", "error")
    mix, seed, seconds, *refuse_all = sys.argv[1:]
    world = World(MIXES[mix], int(seed), float(seconds))
    if refuse_all:
        world.refuse_all()
    print(json.dumps(asdict(world.run())))


if __name__ == "__main__":
    main()
