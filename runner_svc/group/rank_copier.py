"""Copies between the cache and the host pool of one rank; a ticket is done when every rank has done it.

Each rank copies its own part of the blocks, and counts its done tickets on the board.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from runner_svc.group.member import Member
from runner_svc.interface.ranks import RankLost
from runner_svc.tiers.kv_copier import Direction, DoneTicket, KVCopier, Tickets


class RankCopier:
    """Implements `KVCopier` over that of this rank, for one epoch."""

    def __init__(self, member: Member, copier: KVCopier) -> None:
        self._member, self._copier = member, copier
        self.num_host_blocks, self.block_bytes = copier.num_host_blocks, copier.block_bytes
        self.block_ns = copier.block_ns
        self._lock = threading.Lock()
        self._done: dict[Direction, deque[DoneTicket]] = {direction: deque() for direction in Direction}
        self._num_started = dict.fromkeys(Direction, 0)  # in this epoch
        self._num_counted = dict.fromkeys(Direction, 0)  # of these, done by this rank
        self._num_taken = dict.fromkeys(Direction, 0)  # of these, done by all ranks and returned
        self._on_done: Callable[[], None] | None = None
        self._ends = threading.Event()
        copier.on_done = self._hear

    @property
    def on_done(self) -> Callable[[], None] | None:
        """As `KVCopier.on_done`; rank 0 also hears of other ranks' tickets."""
        return self._on_done

    @on_done.setter
    def on_done(self, on_done: Callable[[], None] | None) -> None:
        self._on_done = on_done
        if on_done is not None:
            threading.Thread(target=self._watch, name="tickets of ranks", daemon=True).start()

    def start(self, offloads: Tickets, loads: Tickets) -> None:
        self._num_started[Direction.OFFLOAD] += len(offloads.counts)
        self._num_started[Direction.LOAD] += len(loads.counts)
        self._copier.start(offloads, loads)

    def take_done(self) -> list[DoneTicket]:
        self._collect()
        taken = []
        for direction, waiting in self._done.items():
            done_by_all = self._member.board.tickets_of_all(direction)
            while waiting and self._num_taken[direction] < done_by_all:
                self._num_taken[direction] += 1
                taken.append(self._as_of_rank_0(waiting.popleft()))
        return taken

    @property
    def in_flight(self) -> int:
        board = self._member.board
        return sum(started - board.tickets_of_all(direction) for direction, started in self._num_started.items())

    def finish(self) -> None:
        """As `KVCopier.finish`. Raises RankLost if the group is given up meanwhile."""
        self._copier.finish()
        self._collect()
        member = self._member
        member.board.wait(lambda: not self.in_flight or bool(member.lost))
        if member.lost:
            raise RankLost(member.lost)

    def restart(self) -> None:
        self._copier.restart()
        for direction, waiting in self._done.items():
            self._num_taken[direction] += len(waiting)
            waiting.clear()

    def close(self) -> None:
        """Ends this rank's copies at the end of the epoch, so that the copier can be used in the next one."""
        self._ends.set()
        self._copier.on_done = None
        with suppress(Exception):  # a copy that failed: what it wrote is forgotten anyway
            self._copier.finish()
        with suppress(Exception):
            self._copier.take_done()
        self._copier.restart()

    def _collect(self) -> None:
        """Takes this rank's done tickets, and counts them on the board. Any thread calls it that the copier allows."""
        with self._lock:
            for ticket in self._copier.take_done():
                self._done[ticket.direction].append(ticket)
                self._num_counted[ticket.direction] += 1
                self._member.board.count_tickets(
                    self._member.shard.rank, ticket.direction, self._num_counted[ticket.direction]
                )

    def _as_of_rank_0(self, ticket: DoneTicket) -> DoneTicket:
        """Returns the ticket; only where rank 0 says so it is lost, as its results name tickets."""
        return replace(ticket, is_lost=False) if ticket.is_lost and self._member.shard.rank else ticket

    def _hear(self) -> None:
        with suppress(Exception):  # of a copy: the runner's thread meets it, too
            self._collect()

    def _watch(self) -> None:
        """Reports tickets that have become done on all ranks."""
        self._told = [0, 0]
        while not self._ends.is_set():
            self._member.board.wait(lambda: self._counts() != self._told or self._ends.is_set())
            self._told = self._counts()
            if self._on_done is not None:
                self._on_done()

    def _counts(self) -> list[int]:
        return [self._member.board.tickets_of_all(direction) for direction in Direction]
