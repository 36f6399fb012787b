"""The host tier of the KV cache: starts the tickets of plans, and names those that are done in results.

The host pool outlives sessions as long as the scheduler, or its successor, names blocks with the same secret. What a
session that failed left unfinished never counts: the step that should have filled a block may be the one that failed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import structlog
from numpy.typing import NDArray

from roster_protos import plan_pb2
from runner_svc.batch.host_tickets import HostTickets
from runner_svc.batch.plan_copies import PlanCopies
from runner_svc.tiers.kv_copier import Direction, DoneTicket, KVCopier

log = structlog.get_logger()

Forget = Callable[[NDArray[np.int32]], None]
"""Has a drafter forget blocks of the cache: they have no KV of its own any more."""


class HostTier:
    """One runner's copies. Used by the thread that launches plans, except `naming_secret`."""

    def __init__(self, copier: KVCopier, tickets: HostTickets, forget: Forget | None) -> None:
        """`forget`: None without a drafter that has KV of its own."""
        self._copier, self._tickets, self._forget = copier, tickets, forget
        self._news: list[DoneTicket] = []  # of no result yet
        self._secret = b""
        self._faulted = False
        self._error: Exception | None = None  # of a copy

    @property
    def naming_secret(self) -> bytes:
        """The secret that names the blocks of the host pool; empty if it holds none."""
        return self._secret if self._tickets.holds_any else b""

    def describe(self, hello: plan_pb2.Hello) -> None:
        """Adds the host pool to the message."""
        hello.num_host_blocks = self._copier.num_host_blocks
        hello.block_bytes = self._copier.block_bytes
        hello.load_block_ns = self._copier.block_ns[Direction.LOAD]
        hello.offload_block_ns = self._copier.block_ns[Direction.OFFLOAD]

    def wake(self, on_done: Callable[[], None]) -> None:
        """Has `on_done` called, from any thread, when a ticket is done."""
        self._copier.on_done = on_done

    def start(self, copies: PlanCopies) -> None:
        """Starts an applied plan's tickets, behind the steps launched so far."""
        if self._forget is not None and len(copies.loads.targets):
            self._forget(copies.loads.targets)
        self._copier.start(copies.offloads, copies.loads)

    @property
    def in_flight(self) -> bool:
        """Whether a ticket is being copied."""
        return self._copier.in_flight > 0

    def look(self) -> bool:
        """Lets a copier without threads go on; returns whether a ticket is being copied.

        An error is raised where the next result asks for tickets.
        """
        if self._faulted or not self._copier.in_flight:
            return False
        try:
            self._poll()
        except Exception as error:
            self._error = error
            return False
        return self._copier.in_flight > 0

    def has_news(self) -> bool:
        """Returns whether tickets are done that no result has named, or none is in flight."""
        self._poll()
        return bool(self._news) or not self._copier.in_flight

    def name_done(self, result: plan_pb2.Result) -> None:
        """Names the tickets in the result that are done and in none before."""
        self._poll()
        if not self._news:
            return
        news, self._news = self._news, []
        result.offloads_done, result.offloads_us = _columns(news, Direction.OFFLOAD)
        result.loads_done, result.loads_us = _columns(news, Direction.LOAD)

    def _poll(self) -> None:
        if self._faulted:
            return
        if self._error is not None:
            raise self._error
        for done in self._copier.take_done():
            self._tickets.end(done)
            if not done.is_lost:
                self._news.append(done)

    def fault(self) -> None:
        """Notes that the session has failed: tickets that are not done by now never count."""
        self._faulted = True

    def finish(self) -> None:
        """Waits for all copies."""
        self._copier.finish()
        self._poll()

    def begin_session(self, naming_secret: bytes) -> None:
        """Counts tickets from 1 again; empties the host pool if its blocks have other names. No copy is in flight."""
        self._copier.restart()
        self._tickets.restart()
        self._news, self._faulted, self._error = [], False, None
        if not naming_secret or naming_secret != self._secret:
            if self._tickets.holds_any:
                log.warning("emptied the host pool: the scheduler names its blocks with another secret")
            self._tickets.empty()
        self._secret = naming_secret


def _columns(news: list[DoneTicket], direction: Direction) -> tuple[bytes, bytes]:
    """Returns the columns of ordinals and times of a direction's tickets."""
    done = [ticket for ticket in news if ticket.direction is direction]
    ordinals, times = [ticket.ordinal for ticket in done], [ticket.us for ticket in done]
    return np.array(ordinals, "<i4").tobytes(), np.array(times, "<i4").tobytes()
