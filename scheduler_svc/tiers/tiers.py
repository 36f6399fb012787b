"""The host tier of one runner's KV cache, as the scheduler sees it: the host pool, and copies to it and back.

A plan starts the tickets that were begun since the one before; its copies begin once all earlier plans have computed.
Results confirm tickets. If no row can run, a plan without rows starts copies, or asks for confirmations: its result is
held by the runner until a copy is done. If it names none although no later plan was sent, no copy is left, and what was
not confirmed is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from roster_common.link_protocol import TAG_BYTES
from roster_protos import plan_pb2
from scheduler_svc.kv.block_hashes import HASH_BYTES
from scheduler_svc.kv.block_pool import BlockPool, PoolListener
from scheduler_svc.kv.copy_times import CopyTimes
from scheduler_svc.kv.host_pool import HostPool
from scheduler_svc.kv.tickets import Ticket, UnknownTicket
from scheduler_svc.plan.applied_result import MalformedResult
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.step_times.step_time_model import StepTimeModel
from scheduler_svc.tiers.loads import HostLoads
from scheduler_svc.tiers.offloads import Content, HostOffloads

_NO_NAME = bytes(HASH_BYTES)


class BadHostBlocks(ValueError):
    """A snapshot whose host blocks are inconsistent."""


class Tiers:
    """The host pool of one runner and its copies in flight."""

    def __init__(
        self, hello: plan_pb2.Hello, pool: BlockPool, step_times: StepTimeModel, clock: Callable[[], float]
    ) -> None:
        self.host = HostPool(hello.num_host_blocks)
        self.block_bytes = hello.block_bytes
        self.offloads = HostOffloads(pool, self.host, CopyTimes(hello.offload_block_ns), clock)
        self.loads = HostLoads(pool, self.host, CopyTimes(hello.load_block_ns), step_times, clock)
        self.is_open = False
        """Whether copies may begin: it is known what the runner has kept from a former session."""
        self.purged_in = 0
        """Number of the last plan that purged anything."""
        self.answered = 0
        """Plans without rows whose results have arrived."""
        self._pool = pool
        pool.listener = self.listener = _CacheChanges(self)
        pool.when_evicted = self.offloads.note_evicted

    @property
    def busy(self) -> bool:
        """Whether a copy is in flight or to be started, something is to be purged, or blocks are kept for a waiting
        sequence."""
        return bool(self.offloads.line or self.loads.line or self.loads.num_pins or self.host.purged)

    @property
    def wants_plan(self) -> bool:
        """Whether copies are to be started, or something is to be purged."""
        return bool(self.offloads.line.unsent or self.loads.line.unsent or self.host.purged)

    @property
    def is_copying(self) -> bool:
        """Whether a copy is in flight or to be started."""
        return bool(self.offloads.line or self.loads.line)

    def open(self, snapshot: plan_pb2.Snapshot | None = None) -> int:
        """Lets copies begin, with what the runner has kept in its host pool; returns the number of these blocks.

        Raises BadHostBlocks, changing nothing.
        """
        copies = [] if snapshot is None else self._read_copies(snapshot)
        self.host.adopt(copies)
        self.is_open = True
        return len(copies)

    def _read_copies(self, snapshot: plan_pb2.Snapshot) -> list[tuple[int, bytes]]:
        blocks, tags = np.frombuffer(snapshot.host_blocks, "<i4").tolist(), snapshot.host_tags
        if len(tags) != TAG_BYTES * len(blocks) or len(set(blocks)) != len(blocks):
            raise BadHostBlocks(
                f"{len(blocks)} host blocks, {len(set(blocks))} different, and {len(tags)} bytes of tags"
            )
        if any(not 1 <= block <= self.host.num_blocks for block in blocks):
            raise BadHostBlocks(f"a host block outside the {self.host.num_blocks} of the pool")
        names = [tags[TAG_BYTES * i : TAG_BYTES * i + HASH_BYTES] for i in range(len(blocks))]
        return [pair for pair in zip(blocks, names, strict=True) if pair[1] != _NO_NAME]

    # ------------------------------------------------------------------ plans and results

    def start(self, number: int, plan: plan_pb2.Plan) -> None:
        """Adds the copies begun since the last plan to this one, and what was purged."""
        if self.host.purged:
            plan.purged_host_blocks, self.host.purged = pack(self.host.purged), []
            self.purged_in = number
        if self.offloads.line.unsent:
            offloads = self.offloads.line.send(number)
            plan.offload_sources, plan.offload_targets, plan.offload_counts = _columns(offloads)
            plan.offload_tags = b"".join(self._tag(*pair) for offload in offloads for pair in offload.pairs)
        if self.loads.line.unsent:
            plan.load_sources, plan.load_targets, plan.load_counts = _columns(self.loads.line.send(number))

    def _tag(self, block: int, content: Content) -> bytes:
        """Returns the tag of a host block's copy: zeros if its content was forgotten before the copy has begun."""
        if self.host.name_of(block) != content.name:
            return bytes(TAG_BYTES)
        return content.name + content.tokens.to_bytes(TAG_BYTES - HASH_BYTES, "little")

    def apply(self, number: int, result: plan_pb2.Result, is_empty: bool, is_last: bool) -> None:
        """Applies what the result of plan `number` says about copies.

        `is_empty`: the plan had no rows. `is_last`: no later plan has been sent. Raises MalformedResult.
        """
        self.answered += is_empty
        if not (result.offloads_done or result.loads_done or (is_empty and is_last)):
            return
        offloads, loads = self.offloads, self.loads
        offloads_s, loads_s = (
            _times(result.offloads_done, result.offloads_us),
            _times(result.loads_done, result.loads_us),
        )
        try:
            done, lost = offloads.line.confirm(offloads_s)
            arrived, missing = loads.line.confirm(loads_s)
        except UnknownTicket as error:
            raise MalformedResult(f"result of plan {number}: {error}") from error
        if is_empty and is_last and not offloads_s and not loads_s:
            lost, missing = offloads.line.lose(), loads.line.lose()
        for offload in lost:
            offloads.lost(offload)
        for offload in done:
            offloads.done(offload, offloads_s[offload.number])
        for load in missing:
            loads.lost(load)
        for load in arrived:
            loads.done(load, loads_s[load.number])

    def copying(self) -> set[int]:
        """Returns the blocks of the cache that are being offloaded, or loaded for no sequence that waits."""
        loading = (load.targets for load in self.loads.line if load.pin.is_released)
        return {block for blocks in chain(self.offloads.held(), loading) for block in blocks}

    def prefetch(self, names: list[bytes]) -> int:
        """Begins to load what the cache lacks of a prefix, front to back, into up to half of the free blocks; returns
        the number of blocks. If there are any, the caller has the runner woken, so that a plan starts the load."""
        if not self.is_open:
            return 0
        return self.loads.prefetch(names, self._pool.num_ready(names), self._pool.num_free // 2)

    # ------------------------------------------------------------------ content

    def note_used(self, names: list[bytes]) -> None:
        """Notes that a sequence uses these blocks of the cache."""
        self.host.note_used(names)
        self.loads.prefetched.used(names)

    def forget(self, names: Iterable[bytes]) -> None:
        """Removes the copies of this content."""
        for name in names:
            self.host.forget(name)

    def purge(self, names: Iterable[bytes]) -> None:
        """Removes them for good: the next plan has the runner forget them too. The caller has it woken."""
        self.host.purge(names)

    def flush(self) -> None:
        """Removes all copies for good, after the cache has forgotten all names; what is in flight is dropped."""
        self.host.flush()
        self.loads.drop()

    # ------------------------------------------------------------------ checks

    def held(self) -> Iterator[list[int]]:
        """Yields lists of blocks of the cache to which copies and pins have references."""
        yield from self.offloads.held()
        yield from self.loads.held()

    def check(self) -> None:
        """Raises RuntimeError for the first violated invariant of the host pool."""
        writing = (block for offload in self.offloads.line for block in offload.targets)
        reading = (block for load in self.loads.line for block in load.sources)
        self.host.check(writing, reading)
        self.loads.check()
        if not self.is_open and self.busy:
            raise RuntimeError("copies have begun although it is not known what the host pool has")


class _CacheChanges:
    """Reports to the host tier what the cache loses, and to another listener everything."""

    def __init__(self, tiers: Tiers) -> None:
        self.other: PoolListener | None = None
        self._tiers = tiers

    def ready(self, name: bytes) -> None:
        """Called when a block of this name becomes READY."""
        if self.other is not None:
            self.other.ready(name)

    def gone(self, name: bytes) -> None:
        """Called when no block has this name any more."""
        self._tiers.host.note_gone([name])
        self._tiers.loads.prefetched.gone([name])
        if self.other is not None:
            self.other.gone(name)

    def evicted(self, names: Sequence[bytes]) -> None:
        """Called in place of `gone` for all names that are evicted together."""
        self._tiers.host.note_gone(names)
        self._tiers.loads.prefetched.gone(names)
        if self.other is not None:
            self.other.evicted(names)


def _columns(tickets: Iterable[Ticket]) -> tuple[bytes, bytes, bytes]:
    """Returns the columns of sources, targets and counts."""
    tickets = list(tickets)
    sources = [block for ticket in tickets for block in ticket.sources]
    targets = [block for ticket in tickets for block in ticket.targets]
    return pack(sources), pack(targets), pack([len(ticket.sources) for ticket in tickets])


def _times(numbers: bytes, microseconds: bytes) -> dict[int, float]:
    """Returns the seconds of each ticket, by its number. Raises MalformedResult."""
    if len(numbers) != len(microseconds) or len(numbers) % 4:
        raise MalformedResult("a result's columns of tickets and of their times differ in length")
    seconds = (np.frombuffer(microseconds, "<i4") * 1e-6).tolist()
    return dict(zip(np.frombuffer(numbers, "<i4").tolist(), seconds, strict=True))
