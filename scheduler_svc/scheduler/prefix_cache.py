"""Prefix cache of one runner: sequences share the KV blocks of equal prefixes, and wait for a prefix being computed.

The blocks of a prompt are announced (PENDING) when its sequence is admitted and become READY as results confirm them.
Blocks filled by decoding are named when the sequence leaves: earlier, almost no request could hit them, and naming them
then keeps decoding steps free of the cost. A sequence is looked up just before its admission, and its hit is pinned at
once.

A sequence whose next block is PENDING is parked: it still waits, but outside the queue's order, until that block is
READY or its owner has left. Only a few sequences are parked or unparked per admission, so the cost of a step does not
grow with the number of sequences that wait for one block.

What the cache lacks may be in the host pool of the runner. It is loaded into blocks that are PENDING meanwhile, for
which its sequence is parked too (`scheduler_svc/tiers`).

Never shared are: prompts with log-probabilities of every position (they compute all of them), failed sequences, and
positions whose KV depends on the prompt's length (`Model.prefix_positions`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from roster_protos import plan_pb2
from scheduler_svc.kv.block_hashes import chain_hash, chain_hashes, root_hash
from scheduler_svc.kv.block_pool import BlockPool, Match, PoolListener
from scheduler_svc.kv.naming_secret import NamingSecret
from scheduler_svc.model.sequence import Phase, Sequence
from scheduler_svc.plan.in_flight import InFlight
from scheduler_svc.plan.slot_table import SlotTable
from scheduler_svc.queue.tenant_queues import Queue
from scheduler_svc.tiers.loads import Tail
from scheduler_svc.tiers.tiers import Tiers

STEPS_ASIDE = 16
"""Maximum number of sequences parked, and of those unparked, per admission."""
HASHED_ASIDE = 64
"""Blocks hashed (a microsecond each) for parked sequences in one admission, after which no further one is tried."""


class KvEventRecorder(PoolListener, Protocol):
    """Listener that also receives the tokens of cached blocks."""

    def first_unknown(self, names: list[bytes]) -> int:
        """Returns the index of the first name not yet described, or the number of names if all are."""

    def describe(self, names: list[bytes], first: int, tokens: bytes) -> None:
        """Receives the tokens (an int32 column) of the blocks `names[first:]` of one sequence."""


@dataclass(slots=True, frozen=True)
class SharingRules:
    """Limits that an operator sets on prefix sharing."""

    enabled: bool = True
    isolate_tenants: bool = False
    """Share only within a tenant, so that TTFT does not reveal whether another tenant has sent the same prompt."""


class Candidate(NamedTuple):
    """The next sequence to admit, with the cached blocks of its prefix, not yet pinned."""

    sequence: Sequence
    hit: list[int]


class PrefixCache:
    """Index of one runner's block pool by content; it lives as long as the runner's scheduler."""

    def __init__(
        self,
        pool: BlockPool,
        model: plan_pb2.Model,
        rules: SharingRules,
        secret: NamingSecret,
        tiers: Tiers | None = None,
    ) -> None:
        """`secret`: with which blocks are named. `tiers`: the runner's host pool; None if it has none."""
        self._pool = pool
        self._secret = secret
        self._tiers = tiers
        if tiers is not None:
            tiers.loads.settle = self._settled
        self._weights = (model.weights_version, model.numerics)
        self._isolate_tenants = rules.isolate_tenants
        self._limit: float = 0
        """Maximum number of positions shared; a prompt longer than this shares none."""
        if rules.enabled:
            self._limit = model.prefix_positions if model.HasField("prefix_positions") else float("inf")
        self._unlimited = self._limit == float("inf")
        self._owners: dict[int, Sequence] = {}  # of announced blocks not yet confirmed by a result
        # Parked sequences with their queue, by the block for which they wait; then those to be unparked.
        self._aside: defaultdict[int, list[tuple[Queue, Sequence]]] = defaultdict(list)
        self._returning: deque[tuple[Queue, Sequence]] = deque()
        self._recorder: KvEventRecorder | None = None

    # ------------------------------------------------------------------ looking up

    def match(self, sequence: Sequence) -> Match:
        """Returns the sequence's current hit. Its last token is never part of it, as it must be computed."""
        return self._pool.match(self.prompt_names(sequence))

    def prompt_names(self, sequence: Sequence) -> list[bytes]:
        """Returns the names of the prefixes that the sequence could hit, shortest first."""
        if sequence.request.scores_prompt:
            return []
        return self._names(sequence, self._shareable(sequence, len(sequence.tokens) - 1))

    def cached_tokens(self, sequence: Sequence) -> int:
        """Returns the positions that a waiting sequence would hit now."""
        names, size = sequence.hashes, self._pool.block_size
        all_made = sequence.hashed_block_size == size and len(names) == (len(sequence.log) - 1) // size
        # A complete list of hashes equals `prompt_names`, unless a limit or scored prompt shortens that.
        if not (all_made and self._unlimited) or sequence.request.scores_prompt:
            names = self.prompt_names(sequence)
        return self._pool.num_ready(names) * size

    def first_in_line(self, queue: Queue, line: Iterator[Sequence]) -> Candidate | None:
        """Returns the next sequence of `line` to admit, or None. Parks sequences whose next block is PENDING."""
        num_back = num_hashed = 0
        while self._returning and num_back < STEPS_ASIDE:
            left, returning = self._returning.popleft()
            num_back += left.unpark(returning)
        for _ in range(STEPS_ASIDE):
            sequence = next(line, None) if num_hashed < HASHED_ASIDE else None
            if sequence is None or sequence.stale:
                return None
            num_hashed -= len(sequence.hashes)
            match = self.match(sequence)
            num_hashed += len(sequence.hashes)
            if match.awaited is None:
                return Candidate(sequence, match.blocks)
            self.park(sequence, queue, match.awaited)
            owner = self._owners.get(match.awaited)
            # Without this, the waiting sequence would effectively rank as low as the owner. It lasts until the owner's
            # prompt is computed. A block that is loaded has no owner.
            if owner is not None:
                owner.rank = min(owner.rank, owner.rank.ahead_of(sequence.rank))
        return None

    def park(self, sequence: Sequence, queue: Queue, block: int) -> None:
        """Parks a waiting sequence until this block, which is computed or loaded, is settled."""
        queue.park(sequence)
        self._aside[block].append((queue, sequence))

    def _shareable(self, sequence: Sequence, positions: int) -> int:
        """Returns how many full blocks of the sequence's first `positions` may be shared."""
        if sequence.prompt_len > self._limit:
            return 0
        return int(min(positions, self._limit)) // self._pool.block_size

    def _names(self, sequence: Sequence, count: int) -> list[bytes]:
        """Returns the names of the sequence's first `count` blocks, cached on the sequence. Do not modify the list."""
        hashes, size = sequence.hashes, self._pool.block_size
        if sequence.hashed_block_size != size:  # none yet, or made for a former runner's block size
            hashes.clear()
            sequence.hashed_block_size = size
        if len(hashes) < count:
            parent = hashes[-1] if hashes else self._root(sequence)
            hashes += chain_hashes(parent, sequence.column(len(hashes) * size, count * size), size)
        return hashes if len(hashes) == count else hashes[:count]

    def _root(self, sequence: Sequence) -> bytes:
        request, tenant = sequence.request, sequence.request.tenant if self._isolate_tenants else ""
        return root_hash(self._secret.value, *self._weights, request.cache_salt, tenant)

    # ------------------------------------------------------------------ host pool

    def begin_load(self, sequence: Sequence, hit: list[int]) -> int | None:
        """Begins to load what the host pool has behind the `hit` of a waiting sequence, if that is worth it.

        Returns the block to wait for, or None.
        """
        tiers = self._tiers
        if tiers is None or not tiers.is_open:
            return None
        return tiers.loads.begin(sequence, hit, self.prompt_names(sequence), self._tail(sequence, tiers))

    def _tail(self, sequence: Sequence, tiers: Tiers) -> Tail | None:
        """Returns the partial block that was offloaded when the sequence was swapped out, if the host pool has it."""
        tokens = sequence.swapped % self._pool.block_size
        blocks = tiers.host.ready_run([self.tail_name(sequence, sequence.swapped)]) if tokens else []
        return Tail(blocks[0], tokens) if blocks else None

    def tail_name(self, sequence: Sequence, positions: int) -> bytes:
        """Returns the name of the partial block that ends the sequence's first `positions`."""
        full = positions // self._pool.block_size
        parent = self._names(sequence, full)[-1] if full else self._root(sequence)
        return chain_hash(parent, sequence.column(full * self._pool.block_size, positions))

    def num_reachable(self, sequence: Sequence) -> int:
        """Returns the positions that a waiting sequence would hit now, those that would be loaded included."""
        names = self.prompt_names(sequence)
        count = self._pool.num_ready(names)
        if self._tiers is not None:
            count += len(self._tiers.host.ready_run(names[count:]))
        return count * self._pool.block_size

    def shareable_names(self, sequence: Sequence, positions: int) -> list[bytes]:
        """Returns the names of the full blocks among the sequence's first `positions` that may be shared; none if the
        sequence itself could not hit them."""
        if sequence.request.scores_prompt:
            return []
        return self._names(sequence, self._shareable(sequence, positions))

    # ------------------------------------------------------------------ KV events

    def record(self, recorder: KvEventRecorder | None) -> None:
        """Sets the recorder of cached blocks; None removes it."""
        self._recorder = recorder
        if self._tiers is None:
            self._pool.listener = recorder
        else:
            self._tiers.listener.other = recorder

    def describe(self, sequence: Sequence) -> None:
        """Passes the tokens of the sequence's named blocks to the recorder.

        Omits requests with a cache salt or, with isolated tenants, a tenant: other requests could not hit their
        blocks. Of a finished sequence, omits everything after the first evicted block; most finished sequences still
        known have few blocks left.
        """
        request, size = sequence.request, self._pool.block_size
        if self._recorder is None or request.cache_salt or (self._isolate_tenants and request.tenant):
            return
        # A stop string may have removed tokens that are already cached.
        names = sequence.hashes[: len(sequence.tokens) // size] if sequence.hashed_block_size == size else []
        if sequence.phase is Phase.FINISHED:
            names = names[: self._pool.num_ready(names)]
        first = self._recorder.first_unknown(names)
        if first < len(names):
            self._recorder.describe(names, first, sequence.column(first * size, len(names) * size))

    # ------------------------------------------------------------------ naming

    def announce(self, sequence: Sequence, num_hit: int, table: SlotTable) -> None:
        """Announces as PENDING the full blocks after the `num_hit` of the hit, for a sequence just admitted."""
        count = self._shareable(sequence, len(sequence.log))
        blocks, names = sequence.blocks[num_hit:count], self._names(sequence, count)
        self._pool.announce(blocks, names[num_hit:])
        if self._tiers is not None and num_hit:
            self._tiers.note_used(names[:num_hit])
        if self._recorder is not None:
            self.describe(sequence)
        self._owners.update(dict.fromkeys(blocks, sequence))
        table.announced[sequence.slot] = count * self._pool.block_size

    def confirm(self, flight: InFlight, table: SlotTable) -> None:
        """Marks READY the announced blocks that a plan, whose result has been applied, filled."""
        if not self._pool.num_pending:
            return
        size = self._pool.block_size
        for row in (flight.starts < table.announced[flight.slots]).nonzero()[0].tolist():
            start, slot = int(flight.starts[row]), int(flight.slots[row])
            if table.epoch[slot] != flight.epochs[row]:
                continue
            end = min(start + int(flight.counts[row]), int(table.announced[slot]))
            if flight.drafts is not None:  # the result may have confirmed fewer positions
                end = min(end, int(table.computed[slot]))
            blocks = flight.sequences[row].blocks[start // size : end // size]
            self._pool.confirm(blocks)
            if self._settled(blocks):
                table.lowest = None

    def keep(self, sequence: Sequence, table: SlotTable) -> None:
        """Names the blocks filled by decoding, as READY, before the sequence leaves. Its log must be complete."""
        computed = min(int(table.computed[sequence.slot]), len(sequence.log))
        first, count = int(table.announced[sequence.slot]) // self._pool.block_size, self._shareable(sequence, computed)
        if first < count:
            names = self._names(sequence, count)
            self._pool.name(sequence.blocks[first:count], names[first:])
            if self._recorder is not None:
                self.describe(sequence)

    def keep_copied(self, sequence: Sequence, blocks: list[int]) -> None:
        """Names blocks, as READY, that were copied from another runner: the first full ones of the sequence."""
        count = self._shareable(sequence, len(blocks) * self._pool.block_size)
        self._pool.name(blocks[:count], self._names(sequence, count))
        if self._recorder is not None:
            self.describe(sequence)

    def forget_pending(self, sequence: Sequence) -> None:
        """Removes the names of blocks that the sequence still computes, before it leaves: no result confirms them."""
        for block in sequence.blocks:
            if self._pool.is_pending(block):
                self._pool.forget(block)

    def forget(self, sequence: Sequence) -> None:
        """Removes a failed sequence's blocks from the index: the position of the failure is unknown, so none may be
        hit."""
        for block in sequence.blocks:
            self._pool.forget(block)
        if self._tiers is not None:
            self._tiers.purge(sequence.hashes)

    def flush(self, table: SlotTable) -> None:
        """Empties the index, and keeps what running sequences still compute out of it. Sequences that waited for a
        PENDING block are to be unparked."""
        self._pool.flush()
        if self._settled(list(self._owners)):
            table.lowest = None
        if self._tiers is not None:
            self._tiers.flush()
        table.announced[:] = table.limit  # so that `keep` names no block of a running sequence

    def release_blocks(self, sequence: Sequence, plan: int) -> None:
        """Releases the blocks of a leaving sequence. Sequences that waited for one not yet READY are to be unparked."""
        self._pool.release(sequence.blocks, plan)
        if self._owners:
            self._settled([block for block in sequence.blocks if self._owners.get(block) is sequence])

    # ------------------------------------------------------------------ waiting

    def _settled(self, blocks: Iterable[int]) -> bool:
        """Handles announced blocks that are READY or never will be: sequences waiting for them are to be unparked.

        An owner without further announced blocks returns to its own rank. Returns whether an owner of these blocks had
        been moved ahead.
        """
        ahead = set()
        for block in blocks:
            owner = self._owners.pop(block, None)
            if owner is not None and owner.rank.ahead:
                ahead.add(owner)
            if block in self._aside:
                self._returning.extend(self._aside.pop(block))
        if ahead:
            ahead.difference_update(self._owners.values())
            for owner in ahead:
                owner.rank = owner.rank.alone()
        return bool(ahead)

    def clear(self) -> None:
        """Unparks all sequences, because the runner or the queue is gone."""
        for waiting in [*self._aside.values(), self._returning]:
            for queue, sequence in waiting:
                queue.unpark(sequence)
        self._aside.clear()
        self._returning.clear()

    def check(self, running: Iterable[Sequence]) -> None:
        """Raises RuntimeError if a parked sequence waits for a block that is not being computed, an owner no longer has
        its announced block, or a running sequence ranks ahead of others but computes no block for them.
        """
        for block, waiting in self._aside.items():
            is_loading = self._tiers is not None and self._tiers.loads.is_loading(block)
            if not (self._pool.is_pending(block) or is_loading):
                raise RuntimeError(f"{len(waiting)} sequences wait for block {block}, which is not PENDING")
        for block, owner in self._owners.items():
            if block not in owner.blocks:
                raise RuntimeError(f"block {block} was announced for sequence {owner.id}, which does not hold it")
        owners = set(self._owners.values())
        for sequence in running:
            if sequence.rank.ahead and sequence not in owners:
                raise RuntimeError(f"sequence {sequence.id} ranks ahead of others but computes no block for them")
