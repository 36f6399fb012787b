"""Coverage-guided fuzzing of the runner's plan decoder and checker (atheris, which is libFuzzer for Python).

    python -m bench.fuzz_plan --seconds 300

An input is a sequence of plans. Each is either raw bytes for the decoder or columns that mostly fit the slots, with
some values corrupted. A plan may be executed or refused with a PlanFault; anything else (another exception, a slot or
block out of range that reaches the backend, slots changed by a refused plan) is a crash, and becomes a test in
tests/fuzz/test_plans.py. atheris supports Python 3.11 to 3.13: `pip install atheris`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["runner_svc"]):
    from runner_svc.execution import runner  # noqa: F401

from bench.common.provenance import provenance, write_results
from tests.support.random_plans import PlanFuzzer


class Campaign:
    """Runs inputs until the time is over. libFuzzer never returns, so the report is written from within an input."""

    def __init__(self, seconds: float, output: Path | None) -> None:
        self._began = time.monotonic()
        self._seconds = seconds
        self._output = output
        self._inputs = 0
        self._plans: Counter[str] = Counter()

    def one_input(self, data: bytes) -> None:
        """Runs one input; libFuzzer calls this."""
        source = atheris.FuzzedDataProvider(data)
        fuzzer = PlanFuzzer(source.ConsumeIntInRange, source.ConsumeBytes)
        for _ in range(source.ConsumeIntInRange(1, 6)):
            self._plans[fuzzer.turn()] += 1
        self._inputs += 1
        if time.monotonic() - self._began > self._seconds:
            self._report()
            sys.stdout.flush()
            os._exit(0)

    def _report(self) -> None:
        result = {
            "seconds": round(time.monotonic() - self._began, 1),
            "inputs": self._inputs,
            "plans": dict(self._plans),
            "crashes": 0,  # libFuzzer ends the process at the first crash
        }
        print(json.dumps(result, indent=1))
        if self._output is not None:
            write_results(self._output, provenance("bench.fuzz_plan", ["atheris", "numpy", "protobuf"]), result)


def main() -> None:
    """Fuzzes for the requested time, then prints how many plans were executed and refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=300, help="how long")
    parser.add_argument("--corpus", type=Path, default=None, help="folder of inputs, kept between runs")
    parser.add_argument("--output", type=Path, default=None, help="file for the counts, as JSON")
    arguments = parser.parse_args()
    flags = [sys.argv[0], "-max_len=2048", "-timeout=20"]
    if arguments.corpus is not None:
        arguments.corpus.mkdir(parents=True, exist_ok=True)
        flags.append(str(arguments.corpus))
    campaign = Campaign(arguments.seconds, arguments.output)
    atheris.Setup(flags, campaign.one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
