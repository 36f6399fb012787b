"""A load of mixed requests, each of which must end correctly despite failures, and a wait for the idle state.

`havoc.py` causes the failures; `chaos_requests.py` defines the requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc

from roster_client.client import EventStream, RosterClient
from roster_client.client.admin import AdminClient
from roster_client.client.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestCancelledError,
    RosterError,
    UnavailableError,
)
from roster_client.client.events import Delta, Event, FinishReason
from roster_client.client.session import Session, SessionStream
from roster_protos import admin_pb2
from roster_protos import inference_pb2 as pb
from tests.support.chaos_requests import RequestSpec, ToldPrompt
from tests.support.processes import RosterProcesses

PATIENCE_S = 120.0
ON_ITS_WAY_S = 0.3
"""Tokens that arrive within this time of a scheduler's death are its own: the next one has not started."""


@dataclass(slots=True)
class Copied:
    """What host tiers and moves did, summed over the schedulers' lives as far as their status told it in time."""

    counts: Counter[str] = field(default_factory=Counter)
    _life: Counter[str] = field(default_factory=Counter)
    _uptime_s: float = 0.0

    async def watch(self, admin_address: str) -> None:
        """Asks for the status again and again, until it is cancelled."""
        async with AdminClient(admin_address) as admin:
            while True:
                with contextlib.suppress(RosterError):  # raised while the scheduler starts
                    self._take(await admin.get_status(deadline_s=1))
                await asyncio.sleep(0.3)

    def _take(self, status: admin_pb2.GetStatusResponse) -> None:
        totals, moves = status.totals, status.moves
        tier = totals.host_tier
        now = Counter(
            loaded_tokens=tier.loaded_tokens,
            loaded_blocks=tier.loaded_blocks,
            offloaded_blocks=tier.offloaded_blocks,
            wasted_blocks=tier.wasted_blocks,
            swaps=totals.swaps,
            failed_moves=moves.failed,
            **{f"moves_{use}": count for use, count in moves.by_use.items()},
        )
        if status.uptime_s < self._uptime_s:
            self._life = Counter()
        self.counts += now - self._life
        self._life, self._uptime_s = now, status.uptime_s


@dataclass(slots=True)
class Outcome:
    """Results of the load."""

    completed: int = 0
    cancelled: int = 0
    refused: list[str] = field(default_factory=list)
    """Messages of requests refused as poison: two runners were lost while each computed only that request."""
    drafted: int = 0
    """Tokens that were drafted, as far as answers tell."""
    accepted: int = 0
    """Those of them that were accepted."""
    cut_short: int = 0
    """Answers ended by a scheduler's drain; each request was sent once more."""
    too_large: int = 0
    """Refusals of large requests while no large runner was connected; each request was sent once more."""
    troubles: Counter[str] = field(default_factory=Counter)
    """Number of failures of each kind."""
    resumed_s: dict[str, list[float]] = field(default_factory=lambda: {"runner": [], "scheduler": []})
    """Seconds from a kill to the next token, for each stream that had tokens at that moment."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """For each two deltas of a stream that followed one another, the times of both, on the monotonic clock."""
    kills: list[tuple[float, str]] = field(default_factory=list)
    """Time on the monotonic clock at which each runner or scheduler was killed."""


class Load:
    """Sends `count` requests, `concurrency` at a time, each until it is answered."""

    def __init__(
        self,
        roster: RosterProcesses,
        count: int,
        concurrency: int,
        seed: int,
        large: float = 0.0,
        first: int = 0,
        may_begin: Callable[[int], bool] = lambda number: True,
    ) -> None:
        """`large`: see `RequestSpec.of`. `first`: number of the first request; a service refuses a number it had.

        `may_begin`: whether the request of a number may be sent yet.
        """
        self._may_begin = may_begin
        self._roster = roster
        self._end = first + count
        self._concurrency = concurrency
        self._seed = seed
        self._large = large
        self._first = self._next = first
        self.outcome = Outcome()

    @property
    def taken(self) -> int:
        """Number of requests started."""
        return self._next - self._first

    async def run(self) -> Outcome:
        """Returns once all requests are done. Raises AssertionError at the first wrong answer."""
        async with RosterClient(self._roster.address, reconnect_s=60) as client, client.session() as session:
            await asyncio.gather(*[self._work(client, session) for _ in range(self._concurrency)])
        return self.outcome

    async def _work(self, client: RosterClient, session: Session) -> None:
        while self._next < self._end:
            spec = RequestSpec.of(self._next, self._seed, self._large)
            self._next += 1
            while not self._may_begin(spec.number):
                await asyncio.sleep(0.02)
            deadline = time.monotonic() + PATIENCE_S
            failure: RosterError | None = None
            while (failure := await self._attempt(spec, client, session, failure)) is not None:
                assert time.monotonic() < deadline, f"{spec} was never accepted: {failure!r}"
                await asyncio.sleep(0.1)

    async def _attempt(
        self, spec: RequestSpec, client: RosterClient, session: Session, failure: RosterError | None
    ) -> RosterError | None:
        """Makes one attempt; returns None if the request has ended, otherwise the error for which it never began.

        `failure`: of the attempt before.
        """
        stream = (session if spec.in_session else client).generate(spec.prompt, **spec.options)
        prompts = recorded_prompts(stream)
        try:
            if not await self._follow(spec, client, stream):
                self.outcome.cancelled += 1
                return None
            completion = await stream.completion()
        except (UnavailableError, RequestCancelledError, OverloadedError, NotFoundError) as error:
            return error
        except AlreadyExistsError as error:
            # The attempt before gave up after it had sent the request with what it had received, which is another body:
            # the server keeps that for `attach_s`.
            if failure is None:
                raise
            return error
        except InvalidRequestError as error:
            # The runners that can hold it are gone, and a smaller one is connected. A request with tokens waits for a
            # large runner instead, even if it is sent again to a new scheduler, unless it has several choices, which
            # start over.
            about_size = any(reason in str(error) for reason in ("the largest", "the model's context"))
            assert spec.is_large and about_size, f"{spec}: {error}"
            assert spec.n > 1 or not any(stream.received) or "context" in str(error), f"{spec}: {error}"
            self.outcome.too_large += 1
            return error
        except RosterError as error:
            if error.code is not grpc.StatusCode.INTERNAL:
                raise
            self.outcome.refused.append(str(error))
            return None
        spec.check(completion, prompts)
        if completion.usage is not None:
            self.outcome.drafted += completion.usage.drafted_tokens
            self.outcome.accepted += completion.usage.accepted_tokens
        reasons = {choice.finish.reason for choice in completion.choices if choice.finish is not None}
        if FinishReason.UNAVAILABLE in reasons:
            assert self.outcome.troubles["scheduler drained"], completion
            self.outcome.cut_short += 1
            return UnavailableError(grpc.StatusCode.UNAVAILABLE, "the service shut down")
        self.outcome.cancelled += FinishReason.CANCELLED in reasons
        self.outcome.completed += FinishReason.CANCELLED not in reasons
        return None

    async def _follow(self, spec: RequestSpec, client: RosterClient, stream: EventStream | SessionStream) -> bool:
        """Reads the stream and cancels it where the request says so; returns False if the stream was cut."""
        tokens, heard_s, cancelled = 0, None, spec.cancel_after is None
        async for event in stream:
            if isinstance(event, Delta):
                heard_s = self._note(heard_s)
                tokens += len(event.token_ids)
            if cancelled or spec.cancel_after is None or tokens < spec.cancel_after:
                continue
            if not spec.cancel_by_id:
                stream.cancel()
                return False
            cancelled = True
            with contextlib.suppress(
                NotFoundError, UnavailableError, RequestCancelledError
            ):  # it has ended, or the scheduler is restarting
                await client.cancel(stream.request_id, deadline_s=PATIENCE_S)
        return True

    def _note(self, heard_s: float | None) -> float:
        """Records a delta; `heard_s` is the previous one's time. Measures from the first kill between the two."""
        now_s = time.monotonic()
        if heard_s is not None:
            self.outcome.gaps.append((heard_s, now_s))
        since = [kill for kill in self.outcome.kills if heard_s is not None and kill[0] >= heard_s]
        if since and heard_s is not None:
            at_s, name = since[0]
            if name != "runner" and now_s - at_s < ON_ITS_WAY_S:
                return heard_s
            self.outcome.resumed_s[name].append(now_s - at_s)
        return now_s


def recorded_prompts(stream: EventStream | SessionStream) -> list[ToldPrompt]:
    """Returns a list that receives the prompt information of each connection; the client itself keeps the first."""
    assembler, told = stream._assembler, list[ToldPrompt]()
    events = assembler.events

    def recorded(response: pb.GenerateResponse) -> Iterator[Event]:
        if response.HasField("prompt"):
            told.append(ToldPrompt(response.prompt, assembler.received))
        return events(response)

    assembler.events = recorded  # type: ignore[method-assign]
    return told


async def settled(roster: RosterProcesses, runners: int, within_s: float = 30.0) -> admin_pb2.GetStatusResponse:
    """Returns the status once `runners` runners are connected and nothing waits, runs or holds a block."""
    deadline = time.monotonic() + within_s
    async with AdminClient(roster.admin_address) as admin:
        while True:
            try:
                status = await admin.get_status(deadline_s=5)
                idle = not status.waiting and not status.waiting_tokens and len(status.runners) == runners
                clean = all(
                    not r.running and not r.plans_in_flight and r.free_blocks == r.blocks for r in status.runners
                )
                if idle and clean:
                    return status
            except RosterError:
                status = admin_pb2.GetStatusResponse()
            assert time.monotonic() < deadline, f"still busy:\n{status}\n{roster.logs()}"
            await asyncio.sleep(0.1)
