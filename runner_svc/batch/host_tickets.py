"""What is being copied between the cache and the host pool, and what the host pool holds.

A ticket is outstanding from its plan until a result names it. Until then no plan may write the blocks that it reads, or
use those that it writes. A plan that would is a scheduler bug and is refused as a whole, like any other. (That a row
writes into a block under offload which it already had is not checked: it would cost every step.)

The tag of a host block, the scheduler's name for its content, counts from the end of the ticket that wrote it until the
next one that does. So a block whose copy never ended, in a session that is over, holds nothing. A block that is purged
holds nothing either, and its tag is erased, whatever a ticket that is outstanding writes there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roster_common.link_protocol import TAG_BYTES
from roster_protos import plan_pb2
from runner_svc.batch.plan_columns import PlanColumns, require
from runner_svc.batch.plan_copies import PlanCopies
from runner_svc.tiers.kv_copier import Direction, DoneTicket

_COPIED = "block {} is in an unfinished copy"


@dataclass(frozen=True, slots=True, eq=False)
class BlocksInUse:
    """Number of outstanding tickets that read or write each block of a pool, int32 [blocks + 1] each."""

    readers: NDArray[np.int32]
    writers: NDArray[np.int32]

    @classmethod
    def none(cls, num_blocks: int) -> BlocksInUse:
        """Returns counts of 0."""
        return cls(np.zeros(num_blocks + 1, np.int32), np.zeros(num_blocks + 1, np.int32))

    def copy(self) -> BlocksInUse:
        """Returns a deep copy."""
        return BlocksInUse(self.readers.copy(), self.writers.copy())

    def count(self, read: NDArray[np.int32], written: NDArray[np.int32], step: int) -> None:
        """Adds `step` for each of the blocks."""
        np.add.at(self.readers, read, step)
        np.add.at(self.writers, written, step)

    def require_unwritten(self, table: str, blocks: NDArray[np.int32]) -> None:
        """Raises PlanFault if a ticket writes one of the blocks, which the plan would read."""
        require(table, self.writers[blocks] > 0, _COPIED, blocks)

    def require_unused(self, table: str, blocks: NDArray[np.int32]) -> None:
        """Raises PlanFault if a ticket reads or writes one of the blocks, which the plan would write."""
        require(table, self.in_use(blocks), _COPIED, blocks)

    def in_use(self, blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Returns whether a ticket reads or writes each of `blocks` [N], bool [N]."""
        return (self.readers[blocks] > 0) | (self.writers[blocks] > 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket:
    sources: NDArray[np.int32]
    targets: NDArray[np.int32]
    tags: NDArray[np.uint8] | None  # of an offload


class HostTickets:
    """Outstanding tickets and the tags of the host pool; block ids are those of plans."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        """`num_host_blocks`: 0 for a runner without a host pool, which refuses every copy."""
        self._num_blocks, self._num_host_blocks, self._block_size = num_blocks, num_host_blocks, block_size
        self._tags = np.zeros((num_host_blocks + 1, TAG_BYTES), np.uint8)
        self._complete = np.zeros(num_host_blocks + 1, np.bool_)
        self._purged = np.zeros(num_host_blocks + 1, np.bool_)  # since the beginning of the ticket that wrote it
        self.restart()

    def restart(self) -> None:
        """Forgets the outstanding tickets, and with them what they were to write; ordinals count from 1 again."""
        self._cache = BlocksInUse.none(self._num_blocks)
        self._host = BlocksInUse.none(self._num_host_blocks)
        self._outstanding: dict[tuple[Direction, int], _Ticket] = {}
        self._started = {Direction.OFFLOAD: 0, Direction.LOAD: 0}

    def empty(self) -> None:
        """Forgets what the host pool holds."""
        self._complete[:] = False

    @property
    def holds_any(self) -> bool:
        """Whether the host pool holds any block."""
        return bool(self._complete.any())

    def hold(self, blocks: NDArray[np.int32]) -> bool:
        """Returns whether an outstanding ticket reads or writes any of these blocks of the cache, or ids of none."""
        if not self._outstanding or not len(blocks):
            return False
        return bool((blocks > self._num_blocks).any() or self._cache.in_use(blocks).any())

    def check(self, plan: plan_pb2.Plan, columns: PlanColumns, copies: PlanCopies | None) -> None:
        """Raises PlanFault if the plan's copies don't fit the pools, or if it uses blocks that are being copied.

        The plan has passed `PlanCheck`.
        """
        if copies is None and not self._outstanding:
            return
        cache = self._cache
        if copies is not None:
            self._check_copies(copies)
            cache = cache.copy()
            cache.count(copies.offloads.sources, copies.loads.targets, 1)
        for admission in plan.admissions:
            blocks = np.frombuffer(admission.blocks, "<i4")
            shared = admission.num_computed // self._block_size
            table = f"admission to slot {admission.slot}, block"
            cache.require_unwritten(table, blocks[:shared])
            cache.require_unused(table, blocks[shared:])
        cache.require_unused("append", columns.append_blocks)
        cache.require_unwritten("copy source", columns.copy_sources)
        cache.require_unused("copy target", columns.copy_targets)

    def _check_copies(self, copies: PlanCopies) -> None:
        offloads, loads = copies.offloads, copies.loads
        cache, host = "there is no block {}", "there is no host block {}"
        for table, blocks, most, text in (
            ("offload source", offloads.sources, self._num_blocks, cache),
            ("offload target", offloads.targets, self._num_host_blocks, host),
            ("load source", loads.sources, self._num_host_blocks, host),
            ("load target", loads.targets, self._num_blocks, cache),
            ("purged host block", copies.purged, self._num_host_blocks, host),
        ):
            require(table, (blocks < 1) | (blocks > most), text, blocks)
        # Also within the plan: the two directions are not in order with each other.
        for blocks in (
            np.concatenate((offloads.sources, loads.targets)),
            np.concatenate((offloads.targets, loads.sources)),
        ):
            require("copy", np.bincount(blocks)[blocks] > 1, "block {} is copied twice", blocks)
        self._cache.require_unwritten("offload source", offloads.sources)
        self._host.require_unused("offload target", offloads.targets)
        self._host.require_unwritten("load source", loads.sources)
        self._cache.require_unused("load target", loads.targets)
        require("load source", ~self._complete[loads.sources], "host block {} holds nothing", loads.sources)

    def begin(self, copies: PlanCopies) -> None:
        """Makes the checked tickets outstanding."""
        offloads, loads = copies.offloads, copies.loads
        self._cache.count(offloads.sources, loads.targets, 1)
        self._host.count(loads.sources, offloads.targets, 1)
        self._complete[copies.purged] = False
        self._tags[copies.purged] = 0
        self._purged[copies.purged] = True
        self._complete[offloads.targets] = self._purged[offloads.targets] = False
        begin = 0
        for sources, targets in offloads.split():
            tags = copies.tags[begin : begin + len(sources)]
            begin += len(sources)
            self._add(Direction.OFFLOAD, _Ticket(sources, targets, tags))
        for sources, targets in loads.split():
            self._add(Direction.LOAD, _Ticket(sources, targets, None))

    def _add(self, direction: Direction, ticket: _Ticket) -> None:
        self._started[direction] += 1
        self._outstanding[direction, self._started[direction]] = ticket

    def end(self, done: DoneTicket) -> None:
        """Ends a ticket: its blocks may be used, and the tags of an offload count unless it is lost."""
        ticket = self._outstanding.pop((done.direction, done.ordinal))
        if ticket.tags is None:
            self._host.count(ticket.sources, _NONE, -1)
            self._cache.count(_NONE, ticket.targets, -1)
            return
        self._cache.count(ticket.sources, _NONE, -1)
        self._host.count(_NONE, ticket.targets, -1)
        holds = ~self._purged[ticket.targets] & (not done.is_lost)
        self._tags[ticket.targets] = ticket.tags * holds[:, None]
        self._complete[ticket.targets] = holds

    def add_to(self, snapshot: plan_pb2.Snapshot) -> None:
        """Adds the host blocks that hold something, and their tags, to the snapshot."""
        blocks = np.flatnonzero(self._complete).astype("<i4")
        snapshot.host_blocks = blocks.tobytes()
        snapshot.host_tags = self._tags[blocks].tobytes()


_NONE = np.zeros(0, np.int32)
