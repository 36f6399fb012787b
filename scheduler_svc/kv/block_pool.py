"""The pool of KV blocks of one runner: references, reusable content, and eviction order.

Blocks are integers 1 to num_blocks (0 is the runner's dummy). A block is *blank* (free, without reusable content),
*cached* (free, with READY content that a prefix may hit) or *held* (reference count > 0). Allocation takes blank blocks
first, then evicts cached ones: the least recently used, or if a policy ranks prefixes the least valuable
(`eviction.py`). Content is named by a chained hash (`block_hashes.py`): an equal
name means an equal prefix.

A block with a name is PENDING until a result confirms its KV, then READY; only READY blocks are hit.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import Any, NamedTuple, Protocol

from roster_protos import plan_pb2
from scheduler_svc.kv.eviction import EvictionOrder
from scheduler_svc.kv.kept_blocks import KeptBlocks
from scheduler_svc.kv.prefix_tree import Prefix, PrefixTree


class CacheListener(Protocol):
    """Listener for changes of named blocks."""

    def ready(self, name: bytes) -> None:
        """Called when a block of this name becomes READY."""

    def gone(self, name: bytes) -> None:
        """Called when no block has this name any more."""


class PoolListener(CacheListener, Protocol):
    """That of a block pool."""

    def evicted(self, names: Sequence[bytes]) -> None:
        """Called in place of `gone` for all names that are evicted together."""


class PoolExhausted(RuntimeError):
    """More blocks were requested than are free: the caller must check `num_free` first."""


class Match(NamedTuple):
    """The longest READY prefix, and the last PENDING block that follows it (None if none does)."""

    blocks: list[int]
    awaited: int | None


class BlockPool:
    """A fixed set of blocks with reference counts and an index of reusable content. Operations are O(1) per block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * (num_blocks + 1)
        self._blank = list(range(num_blocks, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._first: OrderedDict[int, None] = OrderedDict()  # cached ones that are evicted before those, in this order
        self._name_of: list[bytes | None] = [None] * (num_blocks + 1)
        self._block_of: dict[bytes, int] = {}  # READY and PENDING
        self._pending: set[int] = set()
        self.last_plan = [0] * (num_blocks + 1)
        """Last plan that touched each freed block. A writer other than compute must wait for that plan's result."""
        self.kept = KeptBlocks(self._references)
        """Of those with references."""
        self.listener: PoolListener | None = None
        self.when_evicted: Callable[[list[bytes]], None] | None = None
        """Called with the names of blocks that are evicted."""
        self.tree = PrefixTree(block_size)
        """The conversations that use the cached blocks, as far as a retention policy or a conversation needs it."""
        self.order = EvictionOrder(self.tree, 0, self._is_cached)

    @property
    def num_free(self) -> int:
        """Blocks without references, cached ones included."""
        return len(self._blank) + len(self._cached) + len(self._first)

    @property
    def num_blank(self) -> int:
        """Free blocks without reusable content."""
        return len(self._blank)

    @property
    def num_pending(self) -> int:
        """Named blocks that are still being computed."""
        return len(self._pending)

    @property
    def num_named(self) -> int:
        """Blocks with a name, PENDING or READY."""
        return len(self._block_of)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content may still be hit."""
        return len(self._cached) + len(self._first)

    @property
    def num_first(self) -> int:
        """Those of them that are evicted before the others, as `put_first` says."""
        return len(self._first)

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that hold the KV of `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def restore(self, tables: Iterable[list[int]]) -> None:
        """Makes a fresh pool hold exactly these block tables, without known content."""
        held = Counter(block for table in tables for block in table)
        self._references[:] = [held[block] for block in range(self.num_blocks + 1)]
        self._blank = [block for block in range(self.num_blocks, 0, -1) if not held[block]]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, each with one reference and no name. Raises PoolExhausted, taking none."""
        if count > self.num_free:
            raise PoolExhausted(f"{count} blocks requested, {self.num_free} free")
        blank = self._blank
        if count <= len(blank):
            blocks = blank[: -count - 1 : -1]
            del blank[len(blank) - count :]
        else:
            blocks = blank[::-1]
            blank.clear()
            blocks += self._evict(count - len(blocks))
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _evict(self, count: int) -> list[int]:
        """Takes the least valuable or least recently used cached blocks and removes their names."""
        cached, first, block_of = self._cached, self._first, self._block_of
        name_of: list[Any] = self._name_of
        blocks = self._least_valuable(count) if self.order.ranked else []
        others = [(first or cached).popitem(last=False)[0] for _ in range(count - len(blocks))]
        if self.order.tracks:
            for block in others:
                self.order.remove(name_of[block])
        blocks += others
        names = [name_of[block] for block in blocks]
        if self.when_evicted is not None:
            self.when_evicted(names)
        for block, name in zip(blocks, names, strict=True):  # inlined `forget`
            name_of[block] = None
            del block_of[name]
        if self.listener is not None:
            self.listener.evicted(names)
        return blocks

    def _least_valuable(self, count: int) -> list[int]:
        """Takes up to `count` blocks out of the cached ones, least valuable first; fewer if all others are still
        continued by blocks in use."""
        blocks = [self._block_of[name] for name in self.order.take(count)]
        for block in blocks:
            self._withdraw(block)
        return blocks

    def _withdraw(self, block: int) -> None:
        """Takes a block out of the cached ones."""
        del (self._first if block in self._first else self._cached)[block]

    def _is_cached(self, name: bytes) -> bool:
        block = self._block_of.get(name)
        return block in self._cached or block in self._first

    def rank(self, value_of: Callable[[Prefix], float] | None) -> None:
        """Evicts by these values of prefixes from now on; None: the least recently used block."""
        self.order.rank(value_of, [name for block in self._free_ones() if (name := self._name_of[block]) is not None])

    def upcoming(self, count: int) -> Iterator[tuple[int, bytes]]:
        """Yields the next `count` cached blocks to be evicted, or fewer, with their names, unless a policy ranks them;
        without those that `put_first` has put first. The caller changes nothing meanwhile."""
        names: list[Any] = self._name_of
        return ((block, names[block]) for block in islice(self._cached, count))

    def _free_ones(self) -> Iterator[int]:
        """Yields the cached blocks, in the order in which they are evicted unless a policy ranks them."""
        return chain(self._first, self._cached)

    def put_first(self, blocks: Iterable[int]) -> None:
        """Has those of the blocks that are cached evicted before all others but those that were put first before."""
        cached, first = self._cached, self._first
        for block in blocks:
            if block in cached:
                del cached[block]
                first[block] = None

    def to_copy(self, count: int, room: Callable[[float, int], int]) -> list[int]:
        """Returns up to `count` cached blocks that a policy values and the host pool lacks, least valuable first, which
        the caller copies. `room`: see `CopyOrder.take`."""
        copies = self.order.copies
        return [] if copies is None else [self._block_of[name] for name in copies.take(count, room)]

    def purge(self, names: Iterable[bytes], unused: Container[int] = ()) -> int:
        """Removes those of these names whose blocks are free, so that they can't be hit; returns their number.

        `unused`: blocks that count as free if they have only one reference, and are free without a name once it is
        dropped.
        """
        purged = 0
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                continue
            if not self._references[block]:
                self._withdraw(block)
                self.forget(block)
                self._blank.append(block)
            elif self._references[block] == 1 and block in unused:
                self.forget(block)
            else:
                continue
            purged += 1
        return purged

    def release(self, blocks: list[int], plan: int = 0) -> None:
        """Drops one reference of each block, deepest first, so that a prefix outlives its continuations."""
        names: list[Any] = self._name_of
        references, last_plan, ranked, kept = self._references, self.last_plan, self.order.ranked, self.kept.number
        for block in reversed(blocks):
            references[block] -= 1
            if kept:
                self.kept.released(block)
            if references[block]:
                continue
            last_plan[block] = plan
            if names[block] is None:
                self._blank.append(block)
            elif block in self._pending:
                self.forget(block)
                self._blank.append(block)
            else:
                self._cached[block] = None
                if ranked:
                    self.order.add(names[block])

    def num_owners(self, block: int) -> int:
        """Returns the block's reference count."""
        return self._references[block]

    def name_of(self, block: int) -> bytes | None:
        """Returns the block's name; None if it has none."""
        return self._name_of[block]

    def ready_block(self, name: bytes) -> int | None:
        """Returns the READY block of this name; None if there is none."""
        block = self._block_of.get(name)
        return None if block is None or block in self._pending else block

    def forget(self, block: int) -> None:
        """Removes the block's name, so that it can't be hit any more."""
        name = self._name_of[block]
        if name is not None:
            self._name_of[block] = None
            del self._block_of[name]
            self._pending.discard(block)
            if self.order.tracks:
                self.order.remove(name)
            if self.listener is not None:
                self.listener.gone(name)

    def flush(self) -> None:
        """Removes every block's name: nothing computed so far can be hit. References stay."""
        self._blank += self._free_ones()
        self._cached.clear()
        self._first.clear()
        for block in list(self._block_of.values()):
            self.forget(block)

    def match(self, hashes: Iterable[bytes]) -> Match:
        """Looks up a chain of block names, front to back. Takes no reference; `share` does."""
        blocks: list[int] = []
        awaited: int | None = None
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            if block in self._pending:
                awaited = block
            elif awaited is None:
                blocks.append(block)
            else:
                break
        return Match(blocks, awaited)

    def num_ready(self, hashes: Iterable[bytes]) -> int:
        """Returns how many blocks `match` would find."""
        block_of, pending, count = self._block_of, self._pending, 0
        for name in hashes:
            block = block_of.get(name)
            if block is None or block in pending:
                break
            count += 1
        return count

    @property
    def named(self) -> Container[bytes]:
        """The names that blocks have, PENDING or READY."""
        return self._block_of

    def has(self, name: bytes) -> bool:
        """Whether a block has this name."""
        return name in self._block_of

    def lacking(self, names: list[bytes]) -> list[bytes]:
        """Returns the names up to the first that a block has."""
        if self._block_of.keys().isdisjoint(names):
            return names
        return list(takewhile(lambda name: name not in self._block_of, names))

    def is_ready(self, name: bytes) -> bool:
        """Whether a READY block has this name."""
        return self.ready_block(name) is not None

    def is_pending(self, block: int) -> bool:
        """Whether the named block is still being computed."""
        return block in self._pending

    def share(self, blocks: list[int]) -> None:
        """Adds a reference to each block of a match; free ones become held."""
        for block in blocks:
            if not self._references[block]:
                self._withdraw(block)
            self._references[block] += 1
        if self.kept.number:
            self.kept.referred(blocks)

    def keep(self, blocks: list[int]) -> None:
        """Adds a reference to each block that only keeps it."""
        self.share(blocks)
        self.kept.mark(blocks)

    def let_go(self, blocks: list[int]) -> None:
        """Drops a reference of each block that only kept it."""
        self.kept.unmark(blocks)
        self.release(blocks)

    def num_free_without(self, blocks: list[int]) -> int:
        """Returns what `num_free` would be after sharing `blocks` (a match)."""
        return self.num_free - sum(1 for block in blocks if not self._references[block])

    def name(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Names the computed, held `blocks`: they hold the content `names` and are READY.

        A block that already has a name keeps it. A name that another block has stays with that block.
        """
        named = self._give_names(blocks, names)
        if self.listener is not None:
            self._tell_ready(named)

    def announce(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Names blocks that are still being computed: like `name`, but PENDING."""
        self._pending.update(self._give_names(blocks, names))

    def _give_names(self, blocks: Sequence[int], names: Sequence[bytes]) -> list[int]:
        """Returns the blocks that were named."""
        block_of, name_of, named = self._block_of, self._name_of, []
        for block, name in zip(blocks, names, strict=True):
            if name not in block_of and name_of[block] is None:
                block_of[name] = block
                name_of[block] = name
                named.append(block)
        return named

    def confirm(self, blocks: Sequence[int]) -> None:
        """Makes PENDING blocks READY, once a result confirms their KV. Ignores blocks without a name."""
        if self.listener is not None:
            self._tell_ready([block for block in blocks if block in self._pending])
        self._pending.difference_update(blocks)

    def _tell_ready(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            name = self._name_of[block]
            if self.listener is not None and name is not None:
                self.listener.ready(name)

    def check(self, tables: Iterable[list[int]]) -> None:
        """Checks that reference counts match `tables` (all live block tables) and that no block is lost.

        Raises RuntimeError with the first difference. O(blocks): for idle moments and tests.
        """
        held = Counter(block for table in tables for block in table)
        free = Counter([*self._blank, *self._free_ones()])
        for block in range(1, self.num_blocks + 1):
            if held[block] != self._references[block]:
                raise RuntimeError(f"block {block}: {held[block]} owners, {self._references[block]} references")
            if free[block] != (0 if held[block] else 1):
                raise RuntimeError(f"block {block}: free {free[block]} times with {held[block]} owners")
        if set(held) - set(range(1, self.num_blocks + 1)):
            raise RuntimeError("a block table contains a block outside the pool")
        if {name: block for block, name in enumerate(self._name_of) if name is not None} != self._block_of:
            raise RuntimeError("the index and the blocks' names differ")
        if any(not self._references[block] or self._name_of[block] is None for block in self._pending):
            raise RuntimeError("a PENDING block has no owner or no name")
        if any(self._name_of[block] is None for block in self._free_ones()):
            raise RuntimeError("a cached block has no name")
        cached = {name for block in self._free_ones() if (name := self._name_of[block]) is not None}
        self.order.check(cached, self.has)


def most_tokens(hello: plan_pb2.Hello) -> int:
    """Returns the maximum number of tokens, prompt and output, of a sequence that has the runner for itself.

    The pool must hold the KV of all tokens but the last, which needs none. The context length is the runner's own and
    may differ between runners (0: not reported).
    """
    in_pool = hello.num_blocks * hello.block_size + 1
    return min(in_pool, hello.model.context_length or in_pool)
