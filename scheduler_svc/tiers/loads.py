"""Loads: waiting sequences get the blocks of their prefix back from the host pool instead of computing them.

A load is one ticket. Its blocks of the cache are announced (PENDING), and its sequence is parked until they are READY,
as if another sequence computed them. A *pin* keeps its hit, and what was loaded, from eviction until it is admitted,
ends, or runs elsewhere; pins give way to running sequences, and to sequences that are ahead in the line.

A load that takes longer than its deadline is *over*: its blocks lose their names, and what waited for it is computed
instead. The ticket keeps the blocks until it ends. The same holds for a lost one. A sequence whose load failed does not
try again while it waits, and for a time nothing is loaded behind a ticket that is late.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.kv.copy_times import CopyTimes
from scheduler_svc.kv.host_pool import HostPool
from scheduler_svc.kv.tickets import Ticket, TicketLine
from scheduler_svc.model.sequence import Phase, Sequence
from scheduler_svc.step_times.step_time_model import StepTimeModel
from scheduler_svc.tiers.prefetched import Prefetched

LEAST_DEADLINE_S = 0.05
"""Least time after which a load is late: copies share the link of their machine with other processes."""
UNKNOWN_DEADLINE_S = 1.0
"""The same where neither copies nor steps have been measured."""
SUSPENDED_S = 1.0
"""Time for which nothing is loaded behind a late ticket. Its end may never be reported: a later one then shows it."""
SLOWER = 3.0
"""Factor of its predicted time after which a load is late, unless computing takes longer still."""


@dataclass(slots=True, eq=False)
class Pin:
    """Blocks of the cache kept for a waiting sequence."""

    blocks: list[int]
    """Its hit and, once they are READY, the full blocks loaded for it. The pin has a reference to each."""
    loaded: int = 0
    """Number of full blocks that were loaded for it."""
    tail: int = 0
    """The loaded block behind them that holds the last, partial block of its tokens; 0 for none."""
    tail_tokens: int = 0
    is_released: bool = False


@dataclass(slots=True, eq=False)
class Tail:
    """The partial block behind a sequence's full ones, in the host pool."""

    source: int
    tokens: int


@dataclass(slots=True, eq=False)
class Load(Ticket):
    """Blocks on their way from the host pool into the cache: full ones, then perhaps a tail."""

    sequence: Sequence | None
    """The sequence for which it was begun; None for a prefetch."""
    pin: Pin
    tail_tokens: int
    deadline_at: float
    is_over: bool = False
    """Whether nothing waits for it any more, and its content is dropped."""

    @property
    def full(self) -> list[int]:
        """Its full blocks of the cache."""
        return self.targets[:-1] if self.tail_tokens else self.targets


@dataclass(slots=True)
class LoadCounts:
    """What loads have done so far."""

    blocks: int = 0
    """Blocks whose load was confirmed."""
    seconds: float = 0.0
    """Time that these took to copy."""
    hit_tokens: int = 0
    """Tokens of admitted sequences whose KV had been loaded for them."""
    wasted: int = 0
    """Blocks of loads that failed, were late, or whose sequence was gone."""


class HostLoads:
    """The loads of one runner, and the pins of waiting sequences."""

    def __init__(
        self,
        pool: BlockPool,
        host: HostPool,
        times: CopyTimes,
        step_times: StepTimeModel,
        clock: Callable[[], float],
    ) -> None:
        self.line: TicketLine[Load] = TicketLine()
        self.times = times
        self.counts = LoadCounts()
        self.prefetched = Prefetched()
        self.settle: Callable[[list[int]], object] = lambda blocks: None
        """Called with the blocks of a load for which nothing has to wait any more."""
        self._pool = pool
        self._host = host
        self._step_times = step_times
        self._clock = clock
        self._pins: dict[Sequence, Pin] = {}
        self._computing: set[Sequence] = set()  # waiting sequences whose load has failed
        self._suspended_until_at = 0.0

    @property
    def num_pins(self) -> int:
        """Sequences for which blocks are kept."""
        return len(self._pins)

    @property
    def num_kept(self) -> int:
        """Blocks of the cache that are not free only because they are kept for waiting sequences."""
        return self._pool.kept.count

    @property
    def num_loading(self) -> int:
        """Those of them whose load is in flight."""
        return sum(not load.pin.is_released for load in self.line)

    @property
    def deadline_at(self) -> float:
        """When the next load is late; infinity if none can be."""
        return min((load.deadline_at for load in self.line.in_flight if not load.is_over), default=math.inf)

    # ------------------------------------------------------------------ beginning

    def begin(self, sequence: Sequence, hit: list[int], names: list[bytes], tail: Tail | None) -> int | None:
        """Begins to load what the host pool has of the prefix `names` of a sequence behind its `hit`, if that is worth
        it; returns the block to wait for, or None.

        The caller has checked that there is room for all its blocks. `tail`: its partial block, if the host pool has
        it; it follows the full blocks that its tokens fill.
        """
        if self._is_suspended or sequence in self._computing:
            return None
        sources = self._sources(names, len(hit))
        num_full, reach = len(sources), len(hit) + len(sources)
        former, tail_tokens = self._pins.get(sequence), 0
        if former is not None and former.tail and not sources:
            return None  # all of it is loaded
        if tail is not None and reach == sequence.swapped // self._pool.block_size and self._may_read(tail.source):
            sources.append(tail.source)
            tail_tokens = tail.tokens
        if not sources:
            return None
        start, positions = len(hit) * self._pool.block_size, num_full * self._pool.block_size + tail_tokens
        deadline_s = self._deadline_s(len(sources), positions, start)
        if deadline_s is None:
            return None
        pin = Pin(hit, 0 if former is None else former.loaded)
        self._pool.keep(hit)
        self.release(sequence)
        self._pins[sequence] = pin
        load = self._add(sources, names[len(hit) : reach], pin, deadline_s, sequence, tail_tokens)
        return load.targets[-1]

    def prefetch(self, names: list[bytes], num_hit: int, most: int) -> int:
        """Begins to load up to `most` blocks of a prefix, behind the `num_hit` that the cache has, for no sequence yet;
        returns their number."""
        sources = [] if self._is_suspended else self._sources(names, num_hit)[:most]
        if sources:
            deadline_s = max(UNKNOWN_DEADLINE_S, SLOWER * self._copy_s(len(sources)))
            self._add(sources, names[num_hit : num_hit + len(sources)], Pin([], is_released=True), deadline_s)
        return len(sources)

    def _may_read(self, block: int) -> bool:
        """Returns whether the next plan does not load this host block yet: a plan may name it only once. Two choices of
        a request may have the same partial block; full ones are awaited."""
        return all(block not in load.sources for load in self.line.unsent)

    def _sources(self, names: list[bytes], first: int) -> list[int]:
        """Returns the host blocks of the names from `first` on that the cache lacks."""
        return self._host.ready_run(self._pool.lacking(names[first:]))

    def _add(
        self,
        sources: list[int],
        names: list[bytes],
        pin: Pin,
        deadline_s: float,
        sequence: Sequence | None = None,
        tail_tokens: int = 0,
    ) -> Load:
        targets = self._pool.allocate(len(sources))
        self._pool.announce(targets[: len(names)], names)
        self._host.read(sources)
        now_s = self._clock()
        load = Load(sources, targets, sequence, pin, tail_tokens, now_s + deadline_s)
        self.times.plan(len(sources), now_s)
        self.line.add(load)
        return load

    @property
    def _is_suspended(self) -> bool:
        """Whether nothing may be loaded because a load in flight is late."""
        return self._suspended_until_at > 0 and self._clock() < self._suspended_until_at

    def _copy_s(self, num_blocks: int) -> float:
        return self.times.wait_s(self._clock()) + self.times.seconds(num_blocks)

    def _deadline_s(self, num_blocks: int, positions: int, start: int) -> float | None:
        """Returns the seconds after which this load is late; None if computing the positions is faster."""
        copy_s, steps = self._copy_s(num_blocks), self._step_times
        compute_s = steps.seconds(positions, 0, 0, start) if steps.known else 0.0
        if not self.times.known:
            return UNKNOWN_DEADLINE_S
        if compute_s and copy_s >= compute_s:
            return None
        return max(LEAST_DEADLINE_S, SLOWER * copy_s, compute_s)

    # ------------------------------------------------------------------ ending

    def done(self, load: Load, seconds: float) -> None:
        """Ends a confirmed load."""
        self._host.unread(load.sources, is_used=not load.is_over)
        self.times.note(len(load.sources), seconds)
        self.counts.blocks += len(load.sources)
        self.counts.seconds += seconds
        if load.pin.is_released or load.is_over:
            if load.sequence is not None and not load.is_over:  # a late one is counted already
                self.counts.wasted += len(load.sources)
            self._pool.confirm(load.full)
            if load.sequence is None and not load.is_over:
                self.prefetched.arrived(map(self._pool.name_of, load.full), len(load.full))
            self._pool.release(load.targets)
        else:
            self._pool.confirm(load.full)
            self._pool.kept.mark(load.full)
            load.pin.blocks = load.pin.blocks + load.full
            load.pin.loaded += len(load.full)
            if load.tail_tokens:
                load.pin.tail, load.pin.tail_tokens = load.targets[-1], load.tail_tokens
        self._ended(load)

    def lost(self, load: Load) -> None:
        """Ends a load that was never confirmed."""
        self._fail(load)
        self._host.unread(load.sources, is_used=False)
        self._pool.release(load.targets)
        self._ended(load)

    def _ended(self, load: Load) -> None:
        self.settle(load.targets)
        if not self.line:
            self.times.rest()
        if not any(other.is_over for other in self.line.in_flight):
            self._suspended_until_at = 0.0

    def _fail(self, load: Load) -> None:
        """Drops the content of a load; what waited for it will be computed."""
        if load.is_over:
            return
        load.is_over = True
        self.counts.wasted += len(load.sources)
        for block in load.full:
            self._pool.forget(block)
        sequence = load.sequence
        if sequence is not None:
            self._computing.add(sequence)
            if self._pins.get(sequence) is load.pin:
                self.release(sequence)

    def expire(self) -> bool:
        """Ends the waits for loads that are late; returns whether there were any."""
        if not self.line.in_flight:
            return False
        now_s = self._clock()
        late = [load for load in self.line.in_flight if load.deadline_at <= now_s and not load.is_over]
        for load in late:
            self._fail(load)
            self._suspended_until_at = now_s + SUSPENDED_S
            self.settle(load.targets)
        return bool(late)

    def drop(self) -> None:
        """Drops the content of all loads, after the cache has forgotten all names."""
        for load in self.line:
            self._fail(load)
            self.settle(load.targets)
        self.give_up()
        self._computing.clear()

    # ------------------------------------------------------------------ pins

    def tail_tokens(self, sequence: Sequence, num_hit: int) -> int:
        """Returns the tokens in the sequence's loaded partial block, if it follows a hit of `num_hit` blocks; otherwise
        0."""
        pin = self._pins.get(sequence)
        if pin is None or num_hit != sequence.swapped // self._pool.block_size:
            return 0
        return pin.tail_tokens

    def take(self, sequence: Sequence, uses_tail: bool) -> list[int]:
        """Releases the pin of a sequence that has just been admitted; its own references keep the hit.

        `uses_tail`: it takes over the reference to its tail, whose block is returned.
        """
        pin = self._pins.get(sequence)
        if pin is None:
            return []
        self.counts.hit_tokens += pin.loaded * self._pool.block_size + uses_tail * pin.tail_tokens
        tail = [pin.tail] if uses_tail else []
        if uses_tail:
            pin.tail = pin.tail_tokens = 0
        self.release(sequence)
        return tail

    def release(self, sequence: Sequence) -> None:
        """Releases the sequence's pin, if it has one."""
        pin = self._pins.pop(sequence, None)
        if pin is not None:
            pin.is_released = True
            self._pool.let_go(pin.blocks)
            if pin.tail:
                self._pool.release([pin.tail])

    def give_up(self, which: Callable[[Sequence], bool] = lambda sequence: True) -> bool:
        """Releases the pins of sequences for which `which` holds, by default all; returns whether there was any."""
        given_up = [sequence for sequence in self._pins if which(sequence)]
        for sequence in given_up:
            self.release(sequence)
        return bool(given_up)

    def sweep(self) -> None:
        """Releases the pins of sequences that wait no longer."""
        for sequence in [sequence for sequence in self._pins if sequence.phase is not Phase.WAITING]:
            self.release(sequence)
        if self._computing:
            self._computing = {sequence for sequence in self._computing if sequence.phase is Phase.WAITING}

    # ------------------------------------------------------------------ checks

    def held(self) -> Iterator[list[int]]:
        """Yields the blocks of the cache to which loads and pins have references."""
        for load in self.line:
            yield load.targets
        for pin in self._pins.values():
            yield [*pin.blocks, pin.tail] if pin.tail else pin.blocks

    def check(self) -> None:
        """Raises RuntimeError unless the pool counts the blocks of the pins."""
        self._pool.kept.check(pin.blocks for pin in self._pins.values())

    def is_loading(self, block: int) -> bool:
        """Whether a sequence may wait for this block of the cache."""
        return any(not load.is_over and block in load.targets for load in self.line)
