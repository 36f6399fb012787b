"""Measures what retention and a host tier add to a scheduler's step, by the number of conversations in its pools.

    python -m bench.scheduler.retained [--ends 2000 20000] [--retention lru session] [--steps 400]

The pools are those of one H200 with an 8B model: 50,000 blocks, nearly all of them cached, and 100,000 in the host
pool, full. Both are divided among `--ends` conversations, which ended in the last ten minutes. 256 sequences run; in
each step about one ends and another conversation's begins, so that blocks are evicted, copied and linked all the time.
A null runner answers each plan, copies included, and each step advances the clock by 20 ms. Printed are CPU times of
apply and plan in µs a step: 10th percentile, which a busy machine changes least, median and mean; and the first over
that of the same retention without a tier.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from bench.scheduler.load import BLOCK_SIZE, DEPTH, take
from roster_protos import engine_pb2, plan_pb2
from scheduler_svc.engine.engine_loop import GC_THRESHOLD
from scheduler_svc.kv.prefix_tree import Turn
from scheduler_svc.model.intake import build_request
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.plan.plan_builder import PlannedStep
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.policy import PolicyGuard, load_policy, load_retention
from scheduler_svc.policy.rank import Rank
from scheduler_svc.queue.tenant_queues import Queue, queue_for
from scheduler_svc.scheduler.policy_views import request_view
from scheduler_svc.scheduler.scheduler import Scheduler

NUM_BLOCKS, NUM_HOST_BLOCKS, CACHED_BLOCKS = 50_000, 100_000, 42_000
SEQUENCES, PROMPT_TOKENS, OUTPUT_TOKENS = 256, 256, 250
STEP_S, BLOCK_NS = 0.02, 42_000
BEGIN_S = 1000.0
WARM_UP = 250
"""Steps until all sequences run and copies are under way."""


@dataclass(slots=True)
class NullRunner:
    """Answers plans; the copies that a plan starts are done in its result."""

    offloads: int = 0
    loads: int = 0
    results: list[tuple[int, bytes]] = field(default_factory=list)

    def take(self, step: PlannedStep) -> None:
        """Keeps the result of a plan."""
        plan, sampled = step.plan, step.flight.sample
        result = plan_pb2.Result(
            statuses=bytes(len(step.flight.slots)),
            token_counts=sampled.astype(np.uint8).tobytes(),
            tokens=np.full(int(sampled.sum()), 1000 + step.number % 1000, "<i4").tobytes(),
        )
        offloads, loads = len(plan.offload_counts) // 4, len(plan.load_counts) // 4
        result.offloads_done = pack([*range(self.offloads + 1, self.offloads + offloads + 1)])
        result.loads_done = pack([*range(self.loads + 1, self.loads + loads + 1)])
        result.offloads_us, result.loads_us = pack([1000] * offloads), pack([1000] * loads)
        self.offloads += offloads
        self.loads += loads
        self.results.append((step.number, result.SerializeToString()))


def hello(has_tier: bool) -> plan_pb2.Hello:
    """Returns the Hello of the runner."""
    made = plan_pb2.Hello(
        num_slots=SEQUENCES,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        block_bytes=2 << 20,
        max_step_tokens=8192,
        max_depth=DEPTH,
    )
    if has_tier:
        made.num_host_blocks, made.load_block_ns, made.offload_block_ns = NUM_HOST_BLOCKS, BLOCK_NS, BLOCK_NS
    return made


def fill_queue(queue: Queue, policy: PolicyGuard, ledger: Ledger, count: int) -> None:
    """Queues requests, each a conversation's first turn."""
    rng = random.Random(1)
    for number in range(count):
        submit = engine_pb2.Submit(
            handle=number,
            request_id=str(number),
            prompt=pack([number] * PROMPT_TOKENS),
            n=1,
            max_tokens=rng.randint(1, 2 * OUTPUT_TOKENS),
            sampling=plan_pb2.Sampling(top_p=1, repetition_penalty=1, stop_ids=pack([2])),
            conversation_id=f"new-{number}",
            next_turn_s=rng.uniform(1, 300),
        )
        request = build_request(submit, b"", number + 1, 0.0)
        request.sequences[0].rank = Rank.of(policy.key(request_view(request), ledger), number)
        queue.arrive(request.tenant)
        queue.push(request.sequences[0])


def fill_pools(scheduler: Scheduler, ends: int) -> None:
    """Fills the cache, and the host pool if there is one, with as many conversations each."""
    rng, pool, tiers = random.Random(2), scheduler.pool, scheduler.tiers

    def names_of(number: int, count: int) -> tuple[list[bytes], Turn]:
        names = [rng.randbytes(16) for _ in range(count)]
        next_turn_s = rng.uniform(1, 300) if number % 2 else None
        ended_at = BEGIN_S - rng.uniform(0, 600)
        return names, Turn("", f"old-{number}", ended_at, ended_at, True, next_turn_s=next_turn_s)

    for number in range(ends if tiers is not None else 0):
        names, turn = names_of(ends + number, NUM_HOST_BLOCKS // ends)
        pool.tree.link(names, turn, set(names))
        assert tiers is not None
        tiers.host.written(tiers.host.write(names))
    for number in range(ends):
        names, turn = names_of(number, CACHED_BLOCKS // ends)
        blocks = pool.allocate(len(names))
        pool.name(blocks, names)
        pool.tree.link(names, turn, pool.named)
        pool.release(blocks)


def timed_steps(retention: str, has_tier: bool, ends: int, steps: int) -> Iterator[float]:
    """Yields the CPU time of each step after the warm-up, in seconds."""
    ledger, now_s = Ledger(), BEGIN_S
    policy = PolicyGuard(load_policy("fcfs", {}))
    queue = queue_for(policy, ledger)
    fill_queue(queue, policy, ledger, SEQUENCES + 2 * (steps + WARM_UP))
    scheduler = Scheduler(
        hello(has_tier),
        clock=lambda: now_s,
        ledger=ledger,
        retention=PolicyGuard(load_retention(retention, {})),
    )
    fill_pools(scheduler, ends)
    if scheduler.tiers is not None:
        scheduler.tiers.is_open = True
    gc.collect()
    gc.freeze()  # as the engine's loop does
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    runner = NullRunner()
    for number in range(steps + WARM_UP):
        now_s += STEP_S
        ledger.now_s = now_s
        began_s = time.thread_time()
        if len(runner.results) == DEPTH:
            take(scheduler, policy, *runner.results.pop(0))
        step = scheduler.plan(queue, policy)
        assert step is not None
        plan_pb2.ToRunner(session=1, number=step.number, plan=step.plan).SerializeToString()
        seconds = time.thread_time() - began_s
        runner.take(step)
        if number >= WARM_UP:
            yield seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ends", type=int, nargs="+", default=[2000, 20_000])
    parser.add_argument("--retention", nargs="+", default=["lru", "session"])
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    print(f"{'retention':>9} {'ends':>7} {'tier':>5} {'p10':>8} {'median':>8} {'mean':>8} {'over none':>9}")
    for retention in options.retention:
        for ends in options.ends:
            without = 0.0
            for has_tier in (False, True):
                times = [seconds * 1e6 for seconds in timed_steps(retention, has_tier, ends, options.steps)]
                p10, median = np.percentile(times, (10, 50)).tolist()
                over = f"{p10 / without:.2f}" if has_tier else ""
                without = p10
                print(
                    f"{retention:>9} {ends:>7} {'yes' if has_tier else 'no':>5} {p10:>8.0f} {median:>8.0f} "
                    f"{statistics.fmean(times):>8.0f} {over:>9}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
