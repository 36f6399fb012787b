"""Cost of prefix sharing in the scheduler's step, in µs: apply + plan under churn, with and without sharing.

    python -m bench.prefix_sharing [--sequences 256] [--steps 3000] [--json FILE]

A null runner answers each plan; two plans are in flight. All slots are always in use. Prompts have 512 tokens, the
first half of which is one of 16 stems; outputs have 50 to 150 tokens, so two or three sequences end and are admitted
per step. The measured work is what hashing, naming, lookups and eviction add to a step; the prefill that sharing saves
is on the runner and is not counted. `behind one block`: 10,000 sequences wait for one prompt that is being computed.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.provenance import provenance, write_results
from bench.scheduler.load import DEPTH, answer
from roster_protos import engine_pb2, plan_pb2
from scheduler_svc.model.intake import build_request
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.policy import PolicyGuard, load_policy
from scheduler_svc.policy.rank import Rank
from scheduler_svc.queue.waiting_queue import WaitingQueue
from scheduler_svc.scheduler.prefix_cache import SharingRules
from scheduler_svc.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
PROMPT_TOKENS = 512
NUM_STEMS = 16
WARMUP_STEPS = 300


class Load:
    """Endless source of sequences, the same for every measurement."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._stems = [self._rng.choices(range(1000, 30_000), k=PROMPT_TOKENS // 2) for _ in range(NUM_STEMS)]
        self._count = 0

    def next(self) -> Sequence:
        rest = self._rng.choices(range(1000, 30_000), k=PROMPT_TOKENS // 2)
        return self.sequence(self._rng.choice(self._stems) + rest, self._rng.randint(50, 150))

    def sequence(self, prompt: list[int], max_tokens: int) -> Sequence:
        self._count += 1
        submit = engine_pb2.Submit(
            handle=self._count,
            request_id=str(self._count),
            prompt=pack(prompt),
            n=1,
            max_tokens=max_tokens,
            sampling=plan_pb2.Sampling(top_p=1, repetition_penalty=1, stop_ids=pack([2])),
        )
        (sequence,) = build_request(submit, b"", self._count, float(self._count)).sequences
        sequence.rank = Rank.of(float(self._count), self._count)
        return sequence


class Roster:
    """A scheduler with its queue and a null runner."""

    def __init__(self, slots: int, step_tokens: int, sharing: bool) -> None:
        hello = plan_pb2.Hello(
            num_slots=slots,
            block_size=BLOCK_SIZE,
            num_blocks=slots * 2 * PROMPT_TOKENS // BLOCK_SIZE,
            max_step_tokens=step_tokens,
            max_depth=DEPTH,
        )
        self.scheduler = Scheduler(hello, sharing=SharingRules(sharing))
        self.queue = WaitingQueue()
        self._policy = PolicyGuard(load_policy("fcfs", {}))
        self._results: deque[tuple[int, bytes]] = deque()

    def step(self) -> tuple[float, int]:
        """Runs apply, leave and plan. Returns the time in µs and the number of sequences that left."""
        result = self._results.popleft() if len(self._results) == DEPTH else None
        start, ended = time.perf_counter(), 0
        if result is not None:
            applied = self.scheduler.apply(result[0], plan_pb2.Result.FromString(result[1]))
            if applied is None:
                raise RuntimeError("the scheduler took a result for a duplicate")
            for sequence, _ in applied.ends:
                self.scheduler.leave(sequence, "length")
            ended = len(applied.ends)
        step = self.scheduler.plan(self.queue, self._policy)
        if step is None:
            raise RuntimeError("nothing to plan")
        plan_pb2.ToRunner(session=1, number=step.number, plan=step.plan).SerializeToString()
        elapsed = time.perf_counter() - start
        self._results.append((step.number, answer(step)))
        return elapsed * 1e6, ended


def churn(slots: int, steps: int, sharing: bool) -> dict[str, Any]:
    """Measures steps while sequences join and leave."""
    load, roster = Load(), Roster(slots, 8192, sharing)
    times, ended, cached = [], 0, 0
    for number in range(WARMUP_STEPS + steps):
        while len(roster.queue) < 16:
            roster.queue.push(load.next())
        elapsed, left = roster.step()
        if number == WARMUP_STEPS:
            cached = roster.scheduler.cached_tokens
        if number >= WARMUP_STEPS:
            times.append(elapsed)
            ended += left
    return {
        "case": "churn",
        "sharing": sharing,
        **_times(times),
        "ends_per_step": round(ended / steps, 2),
        "cached_share": round((roster.scheduler.cached_tokens - cached) / (ended * PROMPT_TOKENS), 3),
    }


def behind_one_block() -> dict[str, Any]:
    """Measures steps while one prompt of 1,024 tokens is computed, 8 positions per step, and 10,000 equal ones wait."""
    load, roster = Load(), Roster(8, 8, sharing=True)
    prompt = list(range(1000, 2024))
    for _ in range(10_000):
        roster.queue.push(load.sequence(prompt, 4))
    times = [roster.step()[0] for _ in range(120)]
    return {"case": "behind one block", "sharing": True, **_times(times)}


def _times(times: list[float]) -> dict[str, float]:
    return {
        "mean_us": round(float(np.mean(times)), 1),
        "p50_us": round(float(np.percentile(times, 50)), 1),
        "p99_us": round(float(np.percentile(times, 99)), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    rows = [churn(options.sequences, options.steps, sharing) for sharing in (False, True)]
    rows.append(behind_one_block())
    print(f"{'':<18} {'sharing':>7} {'mean µs':>9} {'p50 µs':>9} {'p99 µs':>9}")
    for row in rows:
        sharing = "on" if row["sharing"] else "off"
        print(f"{row['case']:<18} {sharing:>7} {row['mean_us']:>9} {row['p50_us']:>9} {row['p99_us']:>9}")
    ends, share = rows[1]["ends_per_step"], rows[1]["cached_share"]
    print(f"churn: {options.sequences} slots, {ends} sequences end a step; {share:.0%} of prompt tokens hit")
    if options.json:
        source = provenance("bench.prefix_sharing", ("numpy", "protobuf"))
        write_results(options.json, source, {"rows": rows})


if __name__ == "__main__":
    main()
