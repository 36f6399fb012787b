"""Offloads: blocks of the cache are copied into the host pool, ahead of the need for their room.

An offload keeps a reference to each of its blocks until it has ended: such a block is not free, but may be hit. The
blocks that would be evicted next are offloaded while blank blocks are few; so eviction finds blocks with a copy and
loses nothing. The blocks of a sequence that is swapped out go ahead of those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.kv.copy_times import CopyTimes
from scheduler_svc.kv.host_pool import HostPool
from scheduler_svc.kv.tickets import Ticket, TicketLine

TICKET_BLOCKS = 32
"""Maximum number of blocks of a ticket, so that their room is free soon: 64 MB of an 8B model, 1.5 ms."""
LEAST_AHEAD, MOST_AHEAD, AHEAD_SHARE = 128, 512, 12
"""Maximum number of blocks that are offloaded ahead of need at a time: a part of the pool, within these bounds. They
are not free meanwhile. A long prompt takes as many at once, and may be all that its step and the next one compute."""
LOW_SHARE, HIGH_SHARE = 4, 2
"""Blank blocks, and those with a copy that would be evicted next, are kept at the first part of the pool. Each block
that is evicted without a copy raises that mark by one, up to the second part."""
MOST_AHEAD_S = 3.0
"""The mark is at most what is copied in this time: slow copies would never get further. On an H200 that is more than
half of the cache; with a second, agents' sessions hit 51.6% for 57.1% (`bench.policies.retention`)."""


class Content(NamedTuple):
    """A block of the cache and what it holds."""

    block: int
    name: bytes
    tokens: int


@dataclass(slots=True, eq=False)
class Offload(Ticket):
    """Blocks on their way from the cache into the host pool."""

    contents: list[Content]
    is_swap: bool

    @property
    def pairs(self) -> Iterator[tuple[int, Content]]:
        """Each host block, with what is copied into it."""
        return zip(self.targets, self.contents, strict=True)


@dataclass(slots=True)
class OffloadCounts:
    """What offloads have done so far."""

    blocks: int = 0
    """Blocks whose offload was confirmed."""
    seconds: float = 0.0
    """Time that these took to copy."""
    lost: int = 0
    """Blocks of offloads that were never confirmed."""
    demoted: int = 0
    """Blocks evicted from the cache with a copy in the host pool."""
    dropped: int = 0
    """Blocks evicted from the cache without one."""


class HostOffloads:
    """The offloads of one runner."""

    def __init__(self, pool: BlockPool, host: HostPool, times: CopyTimes, clock: Callable[[], float]) -> None:
        self.line: TicketLine[Offload] = TicketLine()
        self.times = times
        self.counts = OffloadCounts()
        self._most_ahead = min(MOST_AHEAD, max(LEAST_AHEAD, pool.num_blocks // AHEAD_SHARE))
        self.low = max(1, pool.num_blocks // LOW_SHARE)
        """Low-water mark of blank blocks, before the limit by the time of copies."""
        self._pool = pool
        self._host = host
        self._clock = clock

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache under offload."""
        return sum(len(offload.sources) for offload in self.line)

    @property
    def num_swapping(self) -> int:
        """Those of them that will be free because their sequence was swapped out."""
        return sum(len(offload.sources) for offload in self.line if offload.is_swap)

    def begin(self, contents: list[Content], is_swap: bool = False) -> int:
        """Begins to offload blocks that the host pool lacks, as far as it has room; returns their number.

        Deeper ones come before those that they follow: both pools evict the first first.
        """
        new = {content.name: content for content in contents if not self._host.has(content.name)}
        wanted = list(new.values())[: self._host.num_room]
        for first in range(0, len(wanted), TICKET_BLOCKS):
            part = wanted[first : first + TICKET_BLOCKS]
            targets = self._host.write([content.name for content in part])
            sources = [content.block for content in part]
            self._pool.share(sources)
            self.times.plan(len(part), self._clock())
            self.line.add(Offload(sources, targets, part, is_swap))
        return len(wanted)

    def demote(self, num_running: int) -> None:
        """Begins to offload the blocks that would be evicted next, if blank ones are few.

        Those with a copy are put first in the order of eviction. It leaves a free block for each running sequence.
        """
        pool, ahead = self._pool, min(self.low, self._most_low) - self._pool.num_blank
        if ahead <= 0 or not pool.num_cached:
            return
        if pool.order.ranked:
            self._copy_valuable(num_running, ahead)
            return
        ahead = min(ahead, self._host.num_blocks) - pool.num_first  # copies of more would replace each other
        if ahead <= 0:
            return
        most = min(pool.num_free - num_running, self._most_ahead - self.num_blocks, self._host.num_blocks // 2)
        contents, copied, names = list[Content](), list[int](), list[bytes]()
        for block, name in pool.upcoming(ahead):
            if self._host.has(name):
                copied.append(block)
                names.append(name)
            elif len(contents) >= most:
                break
            else:
                contents.append(Content(block, name, pool.block_size))
        pool.put_first(copied)
        self._host.note_leaving(names)
        if contents:
            self.begin(contents)

    def _copy_valuable(self, num_running: int, ahead: int) -> None:
        """Begins to offload the least valuable blocks that have a value and no copy, if a policy ranks them.

        It evicts blocks with a copy before others of the same prefix's value, so what counts is how many have one.
        """
        pool, host = self._pool, self._host
        ahead -= max(0, pool.tree.num_copied - host.num_duplicates)
        limits = (pool.num_free - num_running, self._most_ahead - self.num_blocks, host.num_blocks // 2, host.num_room)
        count = min(ahead, *limits)
        if count <= 0:
            return
        contents = []
        for block in pool.to_copy(count, host.make_room):
            name = pool.name_of(block)
            if name is not None:
                contents.append(Content(block, name, pool.block_size))
        if contents:
            self.begin(contents)

    def note_evicted(self, names: list[bytes]) -> None:
        """Notes that the cache has evicted the content of these names."""
        demoted = sum(map(self._host.has, names))
        dropped = len(names) - demoted
        self.counts.demoted += demoted
        self.counts.dropped += dropped
        self.low = min(max(1, self._pool.num_blocks // HIGH_SHARE), self.low + dropped)

    @property
    def _most_low(self) -> int:
        """Maximum of the mark by the time of copies."""
        block_s = self.times.seconds(1)
        return max(LEAST_AHEAD, int(MOST_AHEAD_S / block_s)) if block_s > 0 else self._pool.num_blocks

    # ------------------------------------------------------------------ ending

    def done(self, offload: Offload, seconds: float) -> None:
        """Ends a confirmed offload."""
        self._host.written(offload.targets)
        self.times.note(len(offload.sources), seconds)
        self.counts.blocks += len(offload.sources)
        self.counts.seconds += seconds
        self._ended(offload)
        if not self._pool.order.ranked:
            self._pool.put_first(offload.sources)

    def lost(self, offload: Offload) -> None:
        """Ends an offload that was never confirmed."""
        self._host.unwritten(offload.targets)
        self.counts.lost += len(offload.sources)
        self._ended(offload)

    def _ended(self, offload: Offload) -> None:
        self._pool.release(offload.sources[::-1])  # in the order of the sources
        if not self.line:
            self.times.rest()

    def held(self) -> Iterator[list[int]]:
        """Yields the blocks of the cache to which offloads have references."""
        for offload in self.line:
            yield offload.sources
