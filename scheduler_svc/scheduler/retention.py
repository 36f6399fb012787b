"""What one runner's pools keep: the values that the retention policy gives to prefixes, and what it learns from.

A value is asked for at most every `REVISE_S` for each prefix, and more rarely the longer it is idle. Hints of clients
reach the policy only within limits: a time, and a share of the pool for each tenant while others have cached blocks
too.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.kv.eviction import EvictionOrder
from scheduler_svc.kv.prefix_tree import Prefix, Turn
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.policy import Load, PolicyGuard, PolicyParameters
from scheduler_svc.policy.interface import Policy
from scheduler_svc.policy.prefix_view import PrefixView
from scheduler_svc.tiers.tiers import Tiers

REVISE_S, MOST_REVISE_S = 0.05, 0.5
"""Least and greatest time for which a value is used."""
IDLE_SHARE = 1 / 64
"""Part of a prefix's idle time for which its value is used, between these: what was idle for a minute is worth as much
half a second later."""
MOST_PREFETCHES = 1024
"""Maximum number of prefixes whose return is expected; further ones are loaded when a request needs them."""


@dataclass(slots=True, frozen=True)
class HintLimits:
    """Limits of clients' hints."""

    longest_s: float = 3600.0
    """Longest time for which a hint keeps a prefix, and furthest next turn."""
    share: float = 0.5
    """Share of the pool that a tenant's cached blocks may take for its hints to count, if others have cached blocks."""


class Retention:
    """Values of the prefixes of one runner."""

    def __init__(
        self,
        pool: BlockPool,
        ledger: Ledger,
        load: Callable[[], Load],
        policy: PolicyGuard | None = None,
        limits: HintLimits = HintLimits(),
        tiers: Tiers | None = None,
    ) -> None:
        """`load` returns the runner's present load. `policy`: None keeps the least recently used blocks last. `tiers`:
        the runner's host pool; None if it has none."""
        self._pool = pool
        self._tree = pool.tree
        self._ledger = ledger
        self._make_load = load
        self._load: Load | None = None
        self._policy = policy or PolicyGuard(Policy(PolicyParameters()))
        self._limits = limits
        self._due: list[tuple[float, int, Prefix]] = []  # a heap of prefetches
        self._last: dict[Prefix, int] = {}  # the serial number of the one that holds
        self._serial = 0
        self._tiers = tiers
        self._host_order = None
        if tiers is not None:
            self._host_order = EvictionOrder(self._tree, 1, tiers.host.may_evict)
            self._host_order.above = pool.order
            self._host_order.other_has, pool.order.other_has = pool.has, tiers.host.has
            tiers.host.set_order(self._host_order)
            pool.order.copy_below()
            pool.order.when_cut = tiers.forget
        self.install()

    @property
    def num_conversations(self) -> int:
        """Conversations whose context is known, cached or not."""
        return self._tree.num_conversations

    def install(self) -> None:
        """Ranks the cached blocks again, as the policy has changed. Nothing is evicted."""
        self._tree.unknown.valued_at = self._tree.left.valued_at = -1.0
        self._epoch = self._policy.policy
        value_of = self.value if self._policy.retains else None
        if self._tiers is not None and self._host_order is not None:
            self._host_order.rank(value_of, self._tiers.host.names())
        self._pool.rank(value_of)  # it depends on what the host pool has
        if not self._policy.prefetches:
            self._due.clear()
            self._last.clear()

    def left(self, sequence: Sequence, computed: int, ended: bool) -> None:
        """Takes note that the sequence leaves its slot, with `computed` positions cached. Its blocks are not yet
        released."""
        request, size = sequence.request, self._pool.block_size
        if not (self._policy.retains or request.conversation_id) or sequence.hashed_block_size != size:
            return
        conversation = request.conversation_id if sequence.index == 0 else ""
        now_s, longest_s = self._ledger.now_s, self._limits.longest_s
        turn = Turn(
            tenant=request.tenant,
            conversation=conversation,
            arrival_s=request.arrival_s,
            now_s=now_s,
            ended=ended,
            retain_s=None if request.kv_retain_s is None else min(request.kv_retain_s, longest_s),
            next_turn_s=None if request.next_turn_s is None else min(request.next_turn_s, longest_s),
        )
        tail = self._tree.link(sequence.hashes[: computed // size], turn, self._pool.named)
        if tail is not None and self._host_order is not None:
            self._host_order.revalue_end(tail)
        if ended and conversation and self._policy.prefetches:
            self._expect(self._tree.find(request.tenant, conversation))

    def forget(self, tenant: str, conversation: str) -> int:
        """Removes what is cached of a conversation and shared with no other; returns its tokens."""
        prefix = self._tree.find(tenant, conversation)
        if prefix is None:
            return 0
        names = self._tree.names(prefix, own=True)
        prefix.retain_s, prefix.valued_at = 0.0, -1.0
        kept = {name for name in names if self._pool.has(name)}
        num_purged = self._pool.purge(names, set() if self._tiers is None else self._tiers.copying())
        if self._tiers is not None:
            num_purged += sum(self._tiers.host.has(name) for name in names if name not in kept)
            self._tiers.purge(names)
        return num_purged * self._pool.block_size

    # ------------------------------------------------------------------ values

    def value(self, prefix: Prefix) -> float:
        """Returns the policy's value of a block of the prefix."""
        now_s = self._ledger.now_s
        age_s = now_s - prefix.valued_at
        if 0 <= age_s < REVISE_S and prefix.valued_at >= 0 and prefix.valued_by is self._epoch:
            return prefix.value
        is_awaited = (prefix.tenant.name, prefix.conversation) in self._ledger.awaited
        is_recent = prefix.valued_at >= 0 and 0 <= age_s < prefix.valued_for_s and prefix.valued_by is self._epoch
        if is_recent and is_awaited == prefix.is_awaited:
            return prefix.value
        if prefix is self._tree.unknown or prefix is self._tree.left:
            prefix.value = 0.0
        else:
            prefix.value = self._policy.retain(self._view(prefix), self._recent_load(now_s))
        prefix.valued_at, prefix.valued_by, prefix.is_awaited = now_s, self._epoch, is_awaited
        prefix.valued_for_s = max(REVISE_S, min(MOST_REVISE_S, IDLE_SHARE * (now_s - prefix.ended_at)))
        return prefix.value

    def _view(self, prefix: Prefix) -> PrefixView:
        tree, tenant, limits = self._tree, prefix.tenant, self._limits
        tenants = tree.num_tenants(0)
        share = tenant.blocks[0] / self._pool.num_blocks
        arrivals, now_s = self._ledger.awaited.get((tenant.name, prefix.conversation)), self._ledger.now_s
        told = not prefix.shared and (tenants < 2 or share <= limits.share)
        return PrefixView(
            tenant=tenant.name,
            conversation=prefix.conversation,
            tokens=prefix.tokens,
            shared=prefix.shared,
            users=prefix.users,
            turns=prefix.turns,
            awaited_s=None if arrivals is None else max(0.0, now_s - min(arrivals)),
            idle_s=max(0.0, now_s - prefix.ended_at),
            gaps=prefix.gaps,
            all_gaps=tree.shared_gaps if prefix.shared else tree.gaps,
            returns=tenant.later if prefix.turns > 1 else tenant.first,
            tenant_share=share,
            tenants=tenants,
            retain_s=prefix.retain_s if told else None,
            next_turn_s=prefix.next_turn_s if told else None,
        )

    def _recent_load(self, now_s: float) -> Load:
        """Returns a load that is as recent as values are."""
        load = self._load
        if load is None or not 0 <= now_s - load.now_s < REVISE_S:
            load = self._load = self._make_load()
        return load

    # ------------------------------------------------------------------ prefetching

    def _expect(self, prefix: Prefix | None) -> None:
        """Notes when the prefix should be back in the cache, if the policy says so; what it said before no longer
        holds. What is further ahead than hints reach is loaded when a request needs it."""
        if prefix is None or self._tiers is None:
            return
        self._last.pop(prefix, None)
        now_s = self._ledger.now_s
        in_s = self._policy.prefetch_s(self._view(prefix), self._recent_load(now_s))
        if in_s is None or in_s > self._limits.longest_s or len(self._last) >= MOST_PREFETCHES:
            return
        self._serial += 1
        self._last[prefix], at_s = self._serial, now_s + max(0.0, in_s)
        heapq.heappush(self._due, (at_s, self._serial, prefix))
        if len(self._due) > 2 * len(self._last) + 64:
            self._due = [entry for entry in self._due if self._last.get(entry[2]) == entry[1]]
            heapq.heapify(self._due)
        self._ledger.prefetch_at = min(self._ledger.prefetch_at, at_s)

    def prefetch(self) -> int:
        """Begins to load those prefixes into the cache whose return is near; returns the number of blocks.

        Not while sequences wait: they need the blocks, and what returns would wait behind them.
        """
        now_s, num_blocks = self._ledger.now_s, 0
        may_load = bool(self._due) and not self._make_load().waiting
        while self._due and self._due[0][0] <= now_s:
            _, serial, prefix = heapq.heappop(self._due)
            if self._last.get(prefix) != serial:  # said otherwise since
                continue
            del self._last[prefix]
            names = self._tree.names(prefix)[::-1]
            if self._tiers is not None and may_load and self._pool.num_ready(names) < len(names):
                num_blocks += self._tiers.prefetch(names)
        if self._due:
            self._ledger.prefetch_at = min(self._ledger.prefetch_at, self._due[0][0])
        return num_blocks
