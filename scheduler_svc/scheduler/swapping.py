"""Preemption by swap: a sequence that would soon be preempted is preempted early, and its KV goes to the host pool.

Its blocks are free once they are copied, which is before the running sequences need them; it loads them when it is
admitted again. Where blocks are needed at once, or computing its KV is faster than loading it, it is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.plan.slot_table import SlotTable
from scheduler_svc.policy import PolicyGuard
from scheduler_svc.queue.tenant_queues import Queue
from scheduler_svc.scheduler.preemption import choose_victim
from scheduler_svc.scheduler.prefix_cache import PrefixCache
from scheduler_svc.step_times.step_time_model import StepTimeModel
from scheduler_svc.tiers.offloads import Content
from scheduler_svc.tiers.tiers import Tiers

LEAST_STEPS = 4
"""Steps ahead for which the room of running sequences is looked at, at least: a plan is answered two or three later."""


class Swapping:
    """Swaps out sequences of one runner. It must have a host pool."""

    def __init__(
        self,
        table: SlotTable,
        pool: BlockPool,
        prefix: PrefixCache,
        tiers: Tiers,
        step_times: StepTimeModel,
        preempt: Callable[[Sequence, Queue], None],
    ) -> None:
        """`preempt` returns a running sequence to the queue."""
        self._table = table
        self._pool = pool
        self._prefix = prefix
        self._tiers = tiers
        self._step_times = step_times
        self._preempt = preempt
        self.swaps = 0
        """Sequences swapped out so far."""

    def swap_out(self, queue: Queue, policy: PolicyGuard) -> bool:
        """Swaps out a sequence if the running ones will soon need more blocks than are free; returns whether it did."""
        table, num_free = self._table, self._pool.num_free
        if num_free >= table.num_running or table.num_running < 2:
            return False
        needy = self._needy()
        if len(needy) <= num_free + self._tiers.offloads.num_swapping or self._tiers.loads.give_up():
            return False
        by_rank = sorted(needy.tolist(), key=lambda slot: table.at(slot).rank)
        victim = choose_victim(table.at(by_rank[num_free]), table, policy)
        if victim is None or not self._is_worth(victim):
            return False
        self._swap(victim, queue)
        return True

    def _needy(self) -> npt.NDArray[np.int64]:
        """Returns the slots whose sequences will need a block soon, and have none for it."""
        table, steps = self._table, LEAST_STEPS
        row_s = self._step_times.fitted_row_s
        if row_s > 0:
            steps += math.ceil(self._tiers.offloads.times.seconds(self._pool.num_blocks // table.num_running) / row_s)
        soon = table.capacity - table.planned < min(steps, self._pool.block_size)
        return (soon & (table.epoch > 0) & (table.capacity < table.limit - 1)).nonzero()[0]

    def _is_worth(self, victim: Sequence) -> bool:
        """Returns whether loading the sequence's KV is possible, and faster than computing it."""
        computed = self._computed(victim)
        names = self._prefix.shareable_names(victim, computed)
        needed = self._pool.blocks_for(computed)
        if not names or len(names) < computed // self._pool.block_size or needed > self._tiers.host.num_room:
            return False  # without its first blocks the rest would be of no use
        times, steps = self._tiers.loads.times, self._step_times
        compute_s = steps.seconds(computed, 0, 0) if steps.known else 0.0
        return not compute_s or times.seconds(needed) < compute_s

    def _computed(self, sequence: Sequence) -> int:
        """Returns the positions of a running sequence whose KV a result has confirmed and that a hit may cover."""
        table, slot = self._table, sequence.slot
        if table.announced[slot] >= table.limit[slot]:  # computed before a flush
            return 0
        return min(int(table.computed[slot]), len(sequence.tokens) - 1)

    def _swap(self, victim: Sequence, queue: Queue) -> None:
        """Preempts the sequence and begins to offload what it has computed, except blocks that others share."""
        pool, size, computed = self._pool, self._pool.block_size, self._computed(victim)
        names = self._prefix.shareable_names(victim, computed)[:]
        held = victim.blocks[: pool.blocks_for(computed)]
        for block in held:
            if pool.is_pending(block):  # the last one: no row goes on to compute it
                pool.forget(block)
        alone = {block for block in held if pool.num_owners(block) == 1}
        pool.share(held)
        self._preempt(victim, queue)
        contents = []
        if tokens := computed % size:
            contents.append(Content(held[-1], self._prefix.tail_name(victim, computed), tokens))
        for name in reversed(names):
            ready = pool.ready_block(name)
            if ready is not None and ready in alone:
                contents.append(Content(ready, name, size))
        self._tiers.host.note_leaving(reversed(names))  # not evicted for the rest of its blocks
        self._tiers.offloads.begin(contents, is_swap=True)
        victim.swapped = computed
        pool.release(held)
        self.swaps += 1
