"""A random rank is killed or stopped, again and again: every answer equals that of the request alone.

    ROSTER_TEST_REQUESTS=5000 ROSTER_TEST_EVENTS=200 ROSTER_CHAOS_RESULT=FILE pytest tests/chaos/test_ranks.py

runs the full count and records how long streams paused after a kill. Each event comes at a random time within two
seconds after the group has formed again.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from pathlib import Path

import pytest

from tests.support.chaos import Load, Outcome, settled
from tests.support.chaos_requests import EOS_PROBABILITY
from tests.support.processes import RosterProcesses
from tests.support.rank_log import RankLog
from tests.support.rank_losses import START_S, Loss, RankLosses, pauses, percentiles
from tests.support.thoroughness import FULL, count

NUM_REQUESTS = int(os.environ.get("ROSTER_TEST_REQUESTS", count(5000, in_ci=120)))
NUM_EVENTS = int(os.environ.get("ROSTER_TEST_EVENTS", count(200, in_ci=10)))
RESULT = os.environ.get("ROSTER_CHAOS_RESULT")
SEED = int(os.environ.get("ROSTER_CHAOS_SEED", random.randrange(1 << 32)))
RANKS = 3
RUNNER = {
    "device": "hash", "tensor_parallel": RANKS, "rank_timeout_s": 2.5, "slots": 16, "kv_tokens": 2048,
    "max_step_tokens": 512, "silence_s": 1.0, "host_kv_tokens": 1024,
    "test_backend": {
        "step_ms": 25, "eos_probability": EOS_PROBABILITY, "draft_wrong": 0.25, "copy_delay_ms": 10, "copy_lost": 0.1,
    },
}  # fmt: skip
SCHEDULER = {"retention_s": 5, "attach_s": 5, "flush_ms": 5, "runner_timeout_s": 10, "no_runner_s": 120}
MEASURES = FULL or RESULT is not None
"""Whether the times are checked: not in CI, where other tests take the processors."""
STOP_EVERY = 2 if MEASURES else 5
"""One of so many events stops a rank, which is found after `rank_timeout_s`; the others kill one."""
WITHIN_S = 2.0 if MEASURES else 1.0
LIMIT_S = 0.5
USUAL_START_S = 0.1
"""Seconds that a rank takes to start on an idle machine, forked and without weights; on a busy one all takes longer."""


@pytest.mark.timeout(7200)
async def test_every_answer_is_as_if_no_rank_had_been_lost(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    begin = time.monotonic()
    roster = RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=RUNNER, ready_s=START_S)
    with roster:
        log = RankLog(tmp_path / "runner.log")
        trouble = RankLosses(log, RANKS, NUM_EVENTS, random.Random(SEED), WITHIN_S, STOP_EVERY)
        load = Load(
            roster,
            NUM_REQUESTS,
            concurrency=12,
            seed=SEED,
            may_begin=lambda number: number * NUM_EVENTS < (len(trouble.losses) + 1) * NUM_REQUESTS,
        )
        async with asyncio.TaskGroup() as group:  # the load would wait for the next event after a failure
            loading = group.create_task(load.run())
            group.create_task(trouble.run())
        outcome = loading.result()
        await settled(roster, 1)
    assert outcome.completed + outcome.cancelled + len(outcome.refused) == NUM_REQUESTS
    assert len(outcome.refused) <= max(1, NUM_REQUESTS // 1000), outcome.refused
    report(outcome, trouble.losses, time.monotonic() - begin)


def report(outcome: Outcome, losses: list[Loss], seconds: float) -> None:
    """Records how long it took from each kill to the next token of any stream, and of each stream; checks the former.

    Streams wait longer than the service if the scheduler isolates them as suspects.
    """
    waited = {index: streams for index, streams in pauses(losses, outcome.gaps).items() if losses[index].is_kill}
    service = {index: min(streams) for index, streams in waited.items()}
    starts = [loss.start_s for loss in losses if loss.is_kill]
    less_start = percentiles([pause - losses[index].start_s for index, pause in service.items()])
    slowest = sorted(service, key=service.__getitem__)[-5:]
    result = {
        "ranks": RANKS,
        "requests": NUM_REQUESTS,
        "completed": outcome.completed,
        "cancelled": outcome.cancelled,
        "refused_as_poison": len(outcome.refused),
        "kills": len(starts),
        "stops": len(losses) - len(starts),
        "start_s": percentiles(starts),
        "formed_s": percentiles([losses[index].formed_s - losses[index].at_s for index in service]),
        "pause_s": percentiles(list(service.values())),
        "pause_less_start_s": less_start,
        "pause_of_streams_s": percentiles([pause for streams in waited.values() for pause in streams]),
        "slowest": [slowest_of(losses[index], service[index], len(waited[index])) for index in slowest],
        "drafted_tokens": outcome.drafted,
        "accepted_tokens": outcome.accepted,
        "seconds": round(seconds, 1),
        "load": os.getloadavg(),
    }
    print(json.dumps(result, indent=1))
    if RESULT:
        Path(RESULT).write_text(json.dumps(result, indent=1) + "\n")
    assert len(losses) == NUM_EVENTS
    if MEASURES:
        slowness = max(1.0, percentiles(starts)["p50"] / USUAL_START_S)
        assert less_start["p99"] <= LIMIT_S * slowness, result


def slowest_of(loss: Loss, pause_s: float, streams: int) -> dict[str, float]:
    """Returns what one of the longest pauses consisted of."""
    since_1970_s = time.time() - time.monotonic() + loss.at_s
    return {
        "at": round(since_1970_s, 3),
        "pause_s": round(pause_s, 3),
        "formed_s": round(loss.formed_s - loss.at_s, 3),
        "start_s": loss.start_s,
        "streams": streams,
    }
