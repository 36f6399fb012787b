"""Measures the longest engine step with thousands of waiting sequences, with and without swaps of the policy."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from roster_protos import plan_pb2
from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.engine.engine_loop import GC_THRESHOLD
from tests.support.in_process import Stack
from tests.support.policies import policy_named

POLICIES = ("sjf", "fair", "priority", "auto")
TENANTS = 50
SLOTS = 64
OUTPUT_TOKENS = 12
"""So small that sequences end and are admitted every few steps, as they do while the queue is long."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """Processor time of the thread in the longest step, in seconds."""

    without_s: float
    with_swap_s: float
    turns_reordering: int

    @property
    def ratio(self) -> float:
        """The longest step with a swap relative to the longest without."""
        return self.with_swap_s / self.without_s


class SwapTrial:
    """An engine with `waiting` sequences in its queue; a few end and are replaced in each turn."""

    def __init__(self, waiting: int) -> None:
        self._stack = Stack(clock=time.monotonic, check=False, max_waiting_requests=1 << 20, max_waiting_tokens=1 << 40)
        backend = HashBackend(
            num_slots=SLOTS, block_size=16, num_blocks=1024, max_step_tokens=512, context_length=64, eos_probability=0
        )
        self._session = self._stack.add_runner(backend)
        self._stack.step()
        self._count = 0
        for _ in range(waiting // 500):
            self._submit(500)
            self._stack.step()
        self._turns(4 * OUTPUT_TOKENS)

    def _submit(self, count: int) -> None:
        for _ in range(count):
            self._count += 1
            number = self._count
            self._stack.submit(
                [number % 256, number // 256 % 256, 1],
                OUTPUT_TOKENS - number % 5,
                tenant=f"t{number * 7 % TENANTS}",
                priority=number % 7 - 3,
                sampling=plan_pb2.Sampling(temperature=0, top_p=1, repetition_penalty=1),
            )

    def _turn_s(self, swap_to: str = "") -> float:
        stack = self._stack
        policy = policy_named(swap_to) if swap_to else None  # a service loads it outside its loop
        begin_at = time.thread_time()
        if policy is not None:
            stack.engine.change_policy(policy)
        stack.engine.step()
        took_s = time.thread_time() - begin_at
        messages, stack.front.messages = stack.front.messages, []
        for _, message in messages:
            stack._take(message)
        stack.runners.execute(self._session)
        stack.runners.deliver(self._session)
        self._submit(4)
        return took_s

    def _turns(self, count: int) -> list[float]:
        return [self._turn_s() for _ in range(count)]

    def measure(self, turns: int) -> Gaps:
        """Runs `turns` turns without a swap, then as many during which each policy is swapped in."""
        with _collections_of_a_service():
            without = self._turns(turns)
            with_swap, reordering = [], 0
            for name in POLICIES:
                with_swap.append(self._turn_s(swap_to=name))
                for _ in range(turns // len(POLICIES) - 1):
                    reordering += self._stack.engine.swap.active
                    with_swap.append(self._turn_s())
        return Gaps(max(without), max(with_swap), reordering)


@contextmanager
def _collections_of_a_service() -> Iterator[None]:
    threshold = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*threshold)  # and all that is frozen stays so: see tests/conftest.py
