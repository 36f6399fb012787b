"""The host pool of one runner: copies of KV blocks in host memory, by the name of their content.

Host blocks are integers 1 to num_blocks. A block is *free*, *being written* by an offload, or READY: its copy is
confirmed and may be loaded. A READY block is *being read* while a load copies it, and only then can't be evicted. A
name is given when the offload is planned, so that no content is offloaded twice. If it is forgotten while its block is
being written or read, the block is free once the ticket has ended.

Evicted first are *duplicates*: copies of blocks that a sequence has used on the runner since, least recently used
first. The others follow, among which are the blocks offloaded ahead of need, whose only copy this will soon be. Their
order is that of their last use, or that of `order`; what that gives no value goes even before the duplicates.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from scheduler_svc.kv.block_pool import CacheListener
from scheduler_svc.kv.eviction import EvictionOrder

_SOME = math.ulp(0.0)
"""The least value that is worth anything."""


class HostPoolFull(RuntimeError):
    """More host blocks were requested than could be evicted: the caller must check `num_room` first."""


class HostPool:
    """A fixed set of host blocks and an index by content. Operations are O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))
        self._name_of: list[bytes | None] = [None] * (num_blocks + 1)
        self._block_of: dict[bytes, int] = {}  # READY and being written
        self._writing: set[int] = set()
        self._readers: dict[int, int] = {}  # loads of each block that has any
        # READY, with a name, and not being read; least recently used first.
        self._duplicates: OrderedDict[int, None] = OrderedDict()
        self._others: OrderedDict[int, None] = OrderedDict()
        self.order: EvictionOrder | None = None
        """Order of the copies that are no duplicates, as far as it ranks them; the others go least recently used first.
        It keeps a copy that is being read or has become a duplicate, as it may be the only one again."""
        self.listener: CacheListener | None = None
        self._stale: dict[int, bytes] = {}  # names of free blocks that the runner would still return to a successor
        self.purged: list[int] = []
        """Blocks whose content was purged, which the runner is yet to hear: a successor must not find it there."""

    @property
    def num_room(self) -> int:
        """Blocks that offloads could take now."""
        return len(self._free) + len(self._duplicates) + len(self._others)

    @property
    def num_ready(self) -> int:
        """Blocks with a confirmed copy that may be loaded."""
        return len(self._block_of) - sum(self._name_of[block] is not None for block in self._writing)

    @property
    def num_duplicates(self) -> int:
        """Copies of blocks that a sequence has used on the runner since."""
        return len(self._duplicates)

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    def set_order(self, order: EvictionOrder | None) -> None:
        """Changes the order among the copies that are no duplicates, whose names it knows."""
        self.order = order

    def names(self) -> list[bytes]:
        """Returns the names of the confirmed copies; last those that are no duplicates and may be evicted, least
        recently used first."""
        others, writing = self._others, self._writing
        in_use = [name for name, block in self._block_of.items() if block not in others and block not in writing]
        return in_use + [self._named(block) for block in others]

    def may_evict(self, name: bytes) -> bool:
        """Whether there is a copy of this name that is no duplicate and may be evicted."""
        return self._block_of.get(name) in self._others

    # ------------------------------------------------------------------ looking up

    def has(self, name: bytes) -> bool:
        """Whether there is a copy of this content, or one is being written."""
        return name in self._block_of

    def all_names(self) -> Iterable[bytes]:
        """Returns the names of all copies, those being written included."""
        return self._block_of.keys()

    def is_ready(self, name: bytes) -> bool:
        """Whether there is a confirmed copy of this content."""
        block = self._block_of.get(name)
        return block is not None and block not in self._writing

    def ready_run(self, names: Iterable[bytes]) -> list[int]:
        """Returns the blocks with confirmed copies of the first of `names`, up to the first without one."""
        blocks = []
        for name in names:
            block = self._block_of.get(name)
            if block is None or block in self._writing:
                break
            blocks.append(block)
        return blocks

    # ------------------------------------------------------------------ offloads

    def write(self, names: Sequence[bytes]) -> list[int]:
        """Takes a block for each of these names, none of which it has, and evicts others for them.

        Raises HostPoolFull, taking none.
        """
        if len(names) > self.num_room:
            raise HostPoolFull(f"{len(names)} host blocks requested, {self.num_room} can be had")
        self._evict(len(names) - len(self._free))
        blocks = [self._free.pop() for _ in names]
        for block, name in zip(blocks, names, strict=True):
            self._stale.pop(block, None)
            self._name_of[block] = name
            self._block_of[name] = block
        self._writing.update(blocks)
        return blocks

    def make_room(self, value: float, count: int) -> int:
        """Evicts for `count` copies of blocks of this value what is worth less, as far as that is needed; returns the
        number of free blocks, up to `count`."""
        if len(self._free) < count:
            self._evict(count - len(self._free), value)
        return min(count, len(self._free))

    def _evict(self, count: int, below: float | None = None) -> None:
        """Frees `count` blocks, fewer if no more may be evicted, or are ranked below this value."""
        order, end = self.order, len(self._free) + count
        if order is not None and self._duplicates and count > 0:
            self._forget_all(order.take(count, _SOME))
        self._forget_all([self._named(block) for block in islice(self._duplicates, max(0, end - len(self._free)))])
        if order is not None and len(self._free) < end:
            self._forget_all(order.take(end - len(self._free), below))
        if below is None:
            self._forget_all([self._named(block) for block in islice(self._others, max(0, end - len(self._free)))])

    def _forget_all(self, names: list[bytes]) -> None:
        for name in names:
            self.forget(name)

    def written(self, blocks: Iterable[int]) -> None:
        """Makes the blocks of a confirmed offload READY, as far as their names were not forgotten."""
        for block in blocks:
            self._writing.remove(block)
            name = self._name_of[block]
            if name is None:
                self._free.append(block)
                continue
            self._enter(block)
            if self.listener is not None:
                self.listener.ready(name)

    def unwritten(self, blocks: Iterable[int]) -> None:
        """Frees the blocks of an offload that was lost."""
        for block in blocks:
            name = self._name_of[block]
            if name is not None:
                self.forget(name)
            self._writing.remove(block)
            self._free.append(block)

    # ------------------------------------------------------------------ loads

    def read(self, blocks: Iterable[int]) -> None:
        """Keeps READY blocks for a load."""
        readers = self._readers
        for block in blocks:
            others = readers.get(block, 0)
            if not others:
                self._withdraw(block)
            readers[block] = others + 1

    def unread(self, blocks: Sequence[int], is_used: bool) -> None:
        """Ends a load. `is_used`: the runner's cache has the content now, so that these are duplicates."""
        readers = self._readers
        for block in reversed(blocks):  # the deepest first, so that a prefix outlives its continuations
            others = readers.pop(block) - 1
            if others:
                readers[block] = others
            elif self._name_of[block] is None:
                self._free.append(block)
            elif is_used:
                self._duplicates[block] = None
            else:
                self._enter(block)

    # ------------------------------------------------------------------ order

    def note_used(self, names: Sequence[bytes]) -> None:
        """Notes that a sequence uses these blocks on the runner: their copies are duplicates."""
        block_of, duplicates, others = self._block_of, self._duplicates, self._others
        for name in reversed(names):
            block = block_of.get(name, 0)  # 0 is no block
            if block in duplicates:
                duplicates.move_to_end(block)
            elif block in others:
                del others[block]
                duplicates[block] = None

    def note_leaving(self, names: Iterable[bytes]) -> None:
        """Notes that the runner's cache evicts this content next: duplicates of it are no longer that, and become the
        most recently used of the others, in this order."""
        block_of, duplicates = self._block_of, self._duplicates
        for name in names:
            block = block_of.get(name, 0)  # 0 is no block
            if block in duplicates:
                del duplicates[block]
                self._enter(block)

    def note_gone(self, names: Iterable[bytes]) -> None:
        """Notes that the runner's cache no longer has this content: its copies, if there are any, are the only ones."""
        block_of, duplicates, others, order = self._block_of, self._duplicates, self._others, self.order
        for name in names:
            block = block_of.get(name, 0)
            if block in others:
                others.move_to_end(block)
                if order is not None:
                    order.add(name)
            elif block in duplicates:
                del duplicates[block]
                self._enter(block)

    def _enter(self, block: int) -> None:
        """Adds a block that may be evicted as the most recently used."""
        self._others[block] = None
        if self.order is not None:
            self.order.add(self._named(block))

    def _withdraw(self, block: int) -> None:
        """Removes a block from those that may be evicted."""
        if block in self._duplicates:
            del self._duplicates[block]
        elif block in self._others:
            del self._others[block]

    def _named(self, block: int) -> bytes:
        name = self._name_of[block]
        if name is None:
            raise RuntimeError(f"host block {block} has no name")
        return name

    # ------------------------------------------------------------------ forgetting

    def forget(self, name: bytes) -> None:
        """Removes the content of this name, if there is a copy."""
        block = self._block_of.get(name)
        if block is None:
            return
        if block not in self._writing and block not in self._readers:
            self._withdraw(block)
            self._free.append(block)
        del self._block_of[name]
        self._name_of[block] = None
        self._stale[block] = name
        if self.order is not None:
            self.order.remove(name)
        if self.listener is not None:
            self.listener.gone(name)

    def purge(self, names: Iterable[bytes]) -> None:
        """Removes the content of these names for good, copies that are being written included."""
        purged = set(names)
        for name in purged & self._block_of.keys():
            self.forget(name)
        blocks = [block for block, name in self._stale.items() if name in purged]
        for block in blocks:
            del self._stale[block]
        self.purged += blocks

    def flush(self) -> None:
        """Removes all content for good."""
        self.purge([*self._block_of, *self._stale.values()])

    def purge_unknown(self) -> None:
        """Removes for good what the runner may have kept, of which this fresh pool knows nothing."""
        self.purged = list(range(1, self.num_blocks + 1))

    def name_of(self, block: int) -> bytes | None:
        """Returns the name of the block's content; None if it has none, or that was forgotten."""
        return self._name_of[block]

    def adopt(self, copies: Iterable[tuple[int, bytes]]) -> None:
        """Fills a fresh pool with the blocks, each with its name, that a runner kept from a former session.

        Of two blocks of the same name, it keeps the first.
        """
        for block, name in copies:
            if name not in self._block_of:
                self._name_of[block], self._block_of[name] = name, block
                self._enter(block)
                if self.listener is not None:
                    self.listener.ready(name)
            else:
                self._stale[block] = name
        self._free = [block for block in range(self.num_blocks, 0, -1) if self._name_of[block] is None]

    def check(self, writing: Iterable[int], reading: Iterable[int]) -> None:
        """Checks that each block is in one state, given the targets of the offloads and the sources of the loads in
        flight.

        Raises RuntimeError with the first difference.
        """
        if Counter(writing) != Counter(self._writing):
            raise RuntimeError("the host blocks being written are not those of the offloads in flight")
        if dict(Counter(reading)) != self._readers:
            raise RuntimeError("the host blocks being read are not those of the loads in flight")
        states = Counter([*self._free, *self._writing, *self._readers, *self._duplicates, *self._others])
        for block in range(1, self.num_blocks + 1):
            if states[block] != 1:
                raise RuntimeError(f"host block {block} is in {states[block]} states")
        if {name: block for block, name in enumerate(self._name_of) if name is not None} != self._block_of:
            raise RuntimeError("the index and the host blocks' names differ")
        if any(self._name_of[block] is not None for block in self._free):
            raise RuntimeError("a free host block has a name")
        if any(self._name_of[block] is None for block in [*self._duplicates, *self._others]):
            raise RuntimeError("a host block that may be evicted has no name")
