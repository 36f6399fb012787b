"""A random rank is killed or stopped, again and again: every answer equals that of the request alone.

    ROSTER_TEST_REQUESTS=5000 ROSTER_TEST_EVENTS=200 ROSTER_CHAOS_RESULT=FILE pytest tests/chaos/test_ranks.py

runs the full count and records how long streams paused after a kill. Each event comes at a random time within two
seconds after the group has formed again.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.support.chaos import Load, Outcome, settled
from tests.support.chaos_requests import EOS_PROBABILITY
from tests.support.processes import RosterProcesses
from tests.support.rank_log import RankLog
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
START_S = 90.0
LIMIT_S = 0.5
USUAL_START_S = 0.1
"""Seconds that a rank takes to start on an idle machine, forked and without weights; on a busy one all takes longer."""


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to a rank, and when."""

    at_s: float
    number: signal.Signals


@pytest.mark.timeout(7200)
async def test_every_answer_is_as_if_no_rank_had_been_lost(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    begin = time.monotonic()
    roster = RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=RUNNER, ready_s=START_S)
    with roster:
        log = RankLog(tmp_path / "runner.log")
        events, starts = list[Event](), dict[float, float]()
        load = Load(
            roster,
            NUM_REQUESTS,
            concurrency=12,
            seed=SEED,
            may_begin=lambda number: number * NUM_EVENTS < (len(events) + 1) * NUM_REQUESTS,
        )
        async with asyncio.TaskGroup() as group:  # the load would wait for the next event after a failure
            loading = group.create_task(load.run())
            group.create_task(lose_ranks(log, load.outcome, events, starts))
        outcome = loading.result()
        await settled(roster, 1)
    assert outcome.completed + outcome.cancelled + len(outcome.refused) == NUM_REQUESTS
    assert len(outcome.refused) <= max(1, NUM_REQUESTS // 1000), outcome.refused
    report(outcome, events, starts, time.monotonic() - begin)


async def lose_ranks(log: RankLog, outcome: Outcome, events: list[Event], starts: dict[float, float]) -> None:
    """Loses NUM_EVENTS ranks.

    Adds what happened to `events`, and to `starts` the seconds that the new process took, by the time of each kill.
    """
    rng = random.Random(SEED)
    while len(events) < NUM_EVENTS:
        await asyncio.sleep(rng.uniform(0, WITHIN_S))
        pids, epoch, num_loaded = log.pids(), log.epoch, len(log.lines("a rank has loaded"))
        rank = rng.randrange(RANKS)
        number = signal.SIGKILL if (len(events) + 1) % STOP_EVERY else signal.SIGSTOP
        os.kill(pids[rank], number)
        at_s = time.monotonic()
        if number is signal.SIGKILL:
            outcome.kills.append((at_s, "rank"))
        await formed(log, epoch + 1, num_loaded + 1)
        assert log.pids() == {**pids, rank: log.pids()[rank]} != pids, "a survivor was started again"
        loaded = log.lines("a rank has loaded")
        assert len(loaded) == num_loaded + 1, "a survivor has loaded again"
        if number is signal.SIGKILL:
            starts[at_s] = float(loaded[-1].fields["seconds"])
        events.append(Event(at_s, number))


async def formed(log: RankLog, epoch: int, num_loaded: int) -> None:
    deadline = time.monotonic() + START_S
    while log.epoch < epoch or len(log.lines("a rank has loaded")) < num_loaded:
        assert time.monotonic() < deadline, "the group did not form again"
        await asyncio.sleep(0.02)


def report(outcome: Outcome, events: list[Event], starts: dict[float, float], seconds: float) -> None:
    """Records how long it took from each kill to the next token of any stream, and of each stream; checks the former.

    Streams wait longer than the service if the scheduler isolates them as suspects. Those that got no token before the
    next event, and so waited for two, are left out.
    """
    after = {event.at_s: following.at_s for event, following in pairwise([*events, Event(math.inf, signal.SIGKILL)])}
    streams = [(at_s, next_s - at_s) for at_s, next_s in outcome.pauses if at_s in starts and next_s < after[at_s]]
    service = {at_s: min(pause for begun, pause in streams if begun == at_s) for at_s in {at_s for at_s, _ in streams}}
    less_start = percentiles([pause - starts[at_s] for at_s, pause in service.items()])
    result = {
        "ranks": RANKS,
        "requests": NUM_REQUESTS,
        "completed": outcome.completed,
        "cancelled": outcome.cancelled,
        "refused_as_poison": len(outcome.refused),
        "kills": sum(event.number is signal.SIGKILL for event in events),
        "stops": sum(event.number is signal.SIGSTOP for event in events),
        "start_s": percentiles(list(starts.values())),
        "pause_s": percentiles(list(service.values())),
        "pause_less_start_s": less_start,
        "pause_of_streams_s": percentiles([pause for _, pause in streams]),
        "drafted_tokens": outcome.drafted,
        "accepted_tokens": outcome.accepted,
        "seconds": round(seconds, 1),
    }
    print(json.dumps(result, indent=1))
    if RESULT:
        Path(RESULT).write_text(json.dumps(result, indent=1) + "\n")
    assert len(events) == NUM_EVENTS
    if MEASURES:
        slowness = max(1.0, percentiles(list(starts.values()))["p50"] / USUAL_START_S)
        assert less_start["p99"] <= LIMIT_S * slowness, result


def percentiles(times_s: list[float]) -> dict[str, float]:
    """Returns the number of times and their percentiles."""
    if not times_s:
        return {"count": 0, "p50": 0.0}
    return {"count": len(times_s), **{f"p{q}": round(float(np.percentile(times_s, q)), 3) for q in (50, 90, 99, 100)}}
