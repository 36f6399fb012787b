"""Everything dies under load, again and again: every answer is still the one that its request would get alone.

    ROSTER_TEST_REQUESTS=20000 ROSTER_CHAOS_RESULT=bench/results/DATE-cpu-chaos.json pytest tests/chaos/test_chaos.py

runs the full count and writes how long streams stood still after a kill.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bench.provenance import provenance, write_results
from tests.support.chaos import EOS_PROBABILITY, Havoc, Load, Outcome, settled
from tests.support.processes import RosterProcesses

NUM_REQUESTS = int(os.environ.get("ROSTER_TEST_REQUESTS", "800"))
RESULT = os.environ.get("ROSTER_CHAOS_RESULT")
RUNNERS = ("runner", "runner-2")


@pytest.mark.timeout(3600)
async def test_every_answer_is_as_if_nothing_had_happened(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    runner = {
        "device": "hash", "slots": 32, "step_ms": 8, "kv_tokens": 8192, "max_step_tokens": 256, "silence_s": 1.0,
        "eos_probability": EOS_PROBABILITY,
    }  # fmt: skip
    scheduler = {"retention_s": 5, "attach_s": 5, "flush_ms": 5, "runner_timeout_s": 5}
    begin = time.monotonic()
    with RosterProcesses(tmp_path, scheduler=scheduler, runner=runner, runners=len(RUNNERS)) as roster:
        load = Load(roster, NUM_REQUESTS, concurrency=32, seed=seed)
        havoc = Havoc(roster, load.outcome, seed, RUNNERS)
        breaking = [
            asyncio.create_task(havoc.runners(every_s=2.0)),
            asyncio.create_task(havoc.scheduler(every_s=6.0)),
            asyncio.create_task(havoc.policies(every_s=0.5)),
        ]
        try:
            outcome = await load.run()
        finally:
            for task in breaking:
                task.cancel()
            ended = await asyncio.gather(*breaking, return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in ended), ended
        await settled(roster, len(RUNNERS))
    assert outcome.completed + outcome.cancelled + len(outcome.refused) == NUM_REQUESTS
    # Whoever is alone on trial when the script kills its runner is taken for the culprit: rare, and no wrong answer.
    assert len(outcome.refused) <= max(2, NUM_REQUESTS // 200), outcome.refused
    report(outcome, time.monotonic() - begin)


def percentiles(times_s: list[float]) -> dict[str, float]:
    """Seconds from the kill to the next token; streams of the other runner are among those of a runner's death."""
    if not times_s:
        return {"streams": 0}
    values = {f"p{q}": round(float(np.percentile(times_s, q)), 3) for q in (50, 90, 99, 100)}
    return {"streams": len(times_s), **values}


def report(outcome: Outcome, seconds: float) -> None:
    result = {
        "requests": NUM_REQUESTS,
        "completed": outcome.completed,
        "cancelled": outcome.cancelled,
        "refused_as_poison": len(outcome.refused),
        "seconds": round(seconds, 1),
        "kills": Counter(name.partition("-")[0] for _, name in outcome.kills),
        "resumed_s": {name: percentiles(times) for name, times in outcome.resumed_s.items()},
    }
    print(json.dumps(result, indent=1))
    if RESULT:
        source = provenance("pytest", ("grpcio", "pyzmq", "protobuf", "numpy"))
        write_results(Path(RESULT), source, result)
