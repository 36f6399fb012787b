"""Sequences of one runner share the KV blocks of equal prefixes; those whose prefix is being computed wait for it.

Blocks of a prompt are announced (PENDING) when their sequence is seated and become READY as results confirm them.
Blocks that decoding fills get their names when the sequence leaves: until then hardly anybody could ask for them, and
a decoding step pays nothing. A lookup happens when the sequence is about to be seated, and its hit is pinned at once.

A sequence whose next block is PENDING steps aside: it still waits, but out of the queue's order, until that block is
READY or its owner is gone. Only a few step aside or come back for each one seated, so a step stays cheap however many
wait behind one block.

Not shared: prompts that want log-probabilities of every position (they compute all), sequences that failed, and
positions whose KV depends on the prompt's length (`Model.prefix_positions`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from roster_protos import plan_pb2
from scheduler_svc.kv.block_hashes import chain_hashes, root_hash
from scheduler_svc.kv.block_pool import BlockPool, CacheListener, Match
from scheduler_svc.model.sequence import Phase, Sequence
from scheduler_svc.plan.in_flight import InFlight
from scheduler_svc.plan.slot_table import SlotTable
from scheduler_svc.queue.tenant_queues import Queue

STEPS_ASIDE = 16
"""Sequences that step aside, and that come back, for each one that is seated."""
HASHED_ASIDE = 64
"""Blocks hashed (a microsecond each) for sequences that step aside, after which no further one does."""


class KvEventRecorder(CacheListener, Protocol):
    """Who hears what is cached."""

    def first_unknown(self, names: list[bytes]) -> int:
        """Index of the first of a sequence's names that was not described; their number if all were."""

    def describe(self, names: list[bytes], first: int, tokens: bytes) -> None:
        """`tokens` (an int32 column) are those of the blocks `names[first:]` of one sequence."""


@dataclass(slots=True, frozen=True)
class SharingRules:
    """What an operator allows to be shared."""

    enabled: bool = True
    isolate_tenants: bool = False
    """Only within a tenant: whether a prompt was seen before can then not be told from its time to first token."""


class Candidate(NamedTuple):
    """The sequence that goes first, and the blocks of its prefix that it need not compute (not pinned yet)."""

    sequence: Sequence
    hit: list[int]


class PrefixCache:
    """The index of one runner's pool by content. It dies with the runner's roster."""

    def __init__(self, pool: BlockPool, model: plan_pb2.Model, rules: SharingRules) -> None:
        self._pool = pool
        self._weights_version = model.weights_version
        self._isolate_tenants = rules.isolate_tenants
        self._limit: float = 0
        """Positions that may be shared; a longer prompt shares none."""
        if rules.enabled:
            self._limit = model.prefix_positions if model.HasField("prefix_positions") else float("inf")
        self._unlimited = self._limit == float("inf")
        self._owners: dict[int, Sequence] = {}  # of announced blocks that no result has confirmed
        # Who stepped aside, and out of which queue, by the block that they wait for; and who may come back.
        self._aside: defaultdict[int, list[tuple[Queue, Sequence]]] = defaultdict(list)
        self._returning: deque[tuple[Queue, Sequence]] = deque()
        self._recorder: KvEventRecorder | None = None

    # ------------------------------------------------------------------ looking up

    def match(self, sequence: Sequence) -> Match:
        """What the sequence would hit now. It always computes its last token itself."""
        return self._pool.match(self.prompt_names(sequence))

    def prompt_names(self, sequence: Sequence) -> list[bytes]:
        """Names of the prefixes that the sequence could hit, the shortest first."""
        if sequence.request.scores_prompt:
            return []
        return self._names(sequence, self._shareable(sequence, len(sequence.tokens) - 1))

    def cached_tokens(self, sequence: Sequence) -> int:
        """Positions that the sequence, which waits, would hit now."""
        names, size = sequence.hashes, self._pool.block_size
        all_made = sequence.hashed_block_size == size and len(names) == (len(sequence.log) - 1) // size
        if not (all_made and self._unlimited) or sequence.request.scores_prompt:  # else they are its `prompt_names`
            names = self.prompt_names(sequence)
        return self._pool.num_ready(names) * size

    def first_in_line(self, queue: Queue, line: Iterator[Sequence]) -> Candidate | None:
        """Who of `line` is to be seated next; None when nobody can be. Those whose next block is PENDING step aside."""
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
            queue.park(sequence)
            self._aside[match.awaited].append((queue, sequence))
            owner = self._owners[match.awaited]
            # Or who waits for it would rank as low as it does; until its prompt is computed.
            owner.rank = min(owner.rank, owner.rank.ahead_of(sequence.rank))
        return None

    def _shareable(self, sequence: Sequence, positions: int) -> int:
        """How many full blocks of the sequence's first `positions` may be shared."""
        if sequence.prompt_len > self._limit:
            return 0
        return int(min(positions, self._limit)) // self._pool.block_size

    def _names(self, sequence: Sequence, count: int) -> list[bytes]:
        """Names of the sequence's first `count` blocks (made once, kept on the sequence). Not to be changed."""
        hashes, size = sequence.hashes, self._pool.block_size
        if sequence.hashed_block_size != size:  # none yet, or those of a runner that is gone
            hashes.clear()
            sequence.hashed_block_size = size
        if len(hashes) < count:
            parent = hashes[-1] if hashes else self._root(sequence)
            hashes += chain_hashes(parent, sequence.column(len(hashes) * size, count * size), size)
        return hashes if len(hashes) == count else hashes[:count]

    def _root(self, sequence: Sequence) -> bytes:
        request = sequence.request
        return root_hash(self._weights_version, request.cache_salt, request.tenant if self._isolate_tenants else "")

    # ------------------------------------------------------------------ telling

    def record(self, recorder: KvEventRecorder | None) -> None:
        """From now on `recorder` hears what is cached; None: nobody does."""
        self._recorder = self._pool.listener = recorder

    def describe(self, sequence: Sequence) -> None:
        """Tells the recorder what the sequence's named blocks hold.

        Left out is what a request without a name or secret of its own could not hit, and of a sequence that has ended
        what lies behind a block that is gone: most that are still known left little.
        """
        request, size = sequence.request, self._pool.block_size
        if self._recorder is None or request.cache_salt or (self._isolate_tenants and request.tenant):
            return
        # A stop string may have taken back tokens that were cached already.
        names = sequence.hashes[: len(sequence.tokens) // size] if sequence.hashed_block_size == size else []
        if sequence.phase is Phase.FINISHED:
            names = names[: self._pool.num_ready(names)]
        first = self._recorder.first_unknown(names)
        if first < len(names):
            self._recorder.describe(names, first, sequence.column(first * size, len(names) * size))

    # ------------------------------------------------------------------ naming

    def announce(self, sequence: Sequence, num_hit: int, table: SlotTable) -> None:
        """The sequence was just seated: the full blocks of its tokens after the `num_hit` that it hit are PENDING."""
        count = self._shareable(sequence, len(sequence.log))
        blocks = sequence.blocks[num_hit:count]
        self._pool.announce(blocks, self._names(sequence, count)[num_hit:])
        if self._recorder is not None:
            self.describe(sequence)
        self._owners.update(dict.fromkeys(blocks, sequence))
        table.announced[sequence.slot] = count * self._pool.block_size

    def confirm(self, flight: InFlight, table: SlotTable) -> None:
        """A plan's result is here and applied: announced blocks that it filled are READY."""
        if not self._pool.num_pending:
            return
        size = self._pool.block_size
        for row in (flight.starts < table.announced[flight.slots]).nonzero()[0].tolist():
            start, slot = int(flight.starts[row]), int(flight.slots[row])
            if table.epoch[slot] != flight.epochs[row]:
                continue
            end = min(start + int(flight.counts[row]), int(table.announced[slot]))
            blocks = flight.sequences[row].blocks[start // size : end // size]
            self._pool.confirm(blocks)
            if self._settled(blocks):
                table.lowest = None

    def keep(self, sequence: Sequence, table: SlotTable) -> None:
        """Names the blocks that decoding filled, READY: the sequence, whose log is complete, is about to leave."""
        computed = min(int(table.computed[sequence.slot]), len(sequence.log))
        first, count = int(table.announced[sequence.slot]) // self._pool.block_size, self._shareable(sequence, computed)
        if first < count:
            names = self._names(sequence, count)
            self._pool.name(sequence.blocks[first:count], names[first:])
            if self._recorder is not None:
                self.describe(sequence)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has failed, and nobody knows at which position: nobody hits its blocks from now on."""
        for block in sequence.blocks:
            self._pool.forget(block)

    def flush(self, table: SlotTable) -> None:
        """Nobody hits what was computed so far, nor what goes on from it; who waited for some of it comes back."""
        self._pool.flush()
        if self._settled(list(self._owners)):
            table.lowest = None
        table.announced[:] = table.limit  # so that `keep` names nothing of those who run

    def release_blocks(self, sequence: Sequence, plan: int) -> None:
        """The sequence leaves its blocks; who waited for one that never became READY comes back."""
        self._pool.release(sequence.blocks, plan)
        if self._owners:
            self._settled([block for block in sequence.blocks if self._owners.get(block) is sequence])

    # ------------------------------------------------------------------ waiting

    def _settled(self, blocks: Iterable[int]) -> bool:
        """These announced blocks are READY, or will never be: who waits for one of them comes back.

        Who has computed them all ranks by itself again; returns whether there was one that had gone ahead.
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
        """Everybody who stepped aside is back in the queue's order: the runner is gone, or the queue."""
        for waiting in [*self._aside.values(), self._returning]:
            for queue, sequence in waiting:
                queue.unpark(sequence)
        self._aside.clear()
        self._returning.clear()

    def check(self, running: Iterable[Sequence]) -> None:
        """Raises RuntimeError if a sequence waits for a block that nobody computes, a block's owner has left it, or one
        of `running` still ranks ahead of others without computing anything for them.
        """
        for block, waiting in self._aside.items():
            if not self._pool.is_pending(block):
                raise RuntimeError(f"{len(waiting)} sequences wait for block {block}, which is not PENDING")
        for block, owner in self._owners.items():
            if block not in owner.blocks:
                raise RuntimeError(f"block {block} was announced for sequence {owner.id}, which does not hold it")
        owners = set(self._owners.values())
        for sequence in running:
            if sequence.rank.ahead and sequence not in owners:
                raise RuntimeError(f"sequence {sequence.id} ranks ahead of others, and computes nothing for them")
