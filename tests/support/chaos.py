"""A load of mixed requests that must all come to their right ends, whatever breaks meanwhile; and the rest afterwards.

What breaks things is in `havoc.py`, what the requests are in `chaos_requests.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc

from roster_client.client import EventStream, RosterClient
from roster_client.client.admin import AdminClient
from roster_client.client.errors import (
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
"""What comes sooner after a scheduler's death is what it had sent: the next one has not even started."""


@dataclass(slots=True)
class Outcome:
    """What became of the load."""

    completed: int = 0
    cancelled: int = 0
    refused: list[str] = field(default_factory=list)
    """Refused as poison: two runners ended while it was alone on each."""
    cut_short: int = 0
    """Answers that a scheduler's drain ended; each was asked for once more."""
    too_large: int = 0
    """Refusals of large requests while no large runner was there; each was sent once more."""
    troubles: Counter[str] = field(default_factory=Counter)
    """What happened, and how often."""
    resumed_s: dict[str, list[float]] = field(default_factory=lambda: {"runner": [], "scheduler": []})
    """Of each stream that had tokens when something was killed, from then to its next token."""
    kills: list[tuple[float, str]] = field(default_factory=list)
    """When each runner and scheduler was killed, on the monotonic clock."""


class Load:
    """Sends `count` requests, `concurrency` at a time, each until it has its answer."""

    def __init__(self, roster: RosterProcesses, count: int, concurrency: int, seed: int, large: float = 0.0) -> None:
        """`large`: see `RequestSpec.of`."""
        self._roster = roster
        self._count = count
        self._concurrency = concurrency
        self._seed = seed
        self._large = large
        self._next = 0
        self.outcome = Outcome()

    @property
    def taken(self) -> int:
        """Requests that have been taken up."""
        return self._next

    async def run(self) -> Outcome:
        """Returns once all are done. Raises AssertionError at the first wrong answer."""
        async with RosterClient(self._roster.address, reconnect_s=60) as client, client.session() as session:
            await asyncio.gather(*[self._work(client, session) for _ in range(self._concurrency)])
        return self.outcome

    async def _work(self, client: RosterClient, session: Session) -> None:
        while self._next < self._count:
            spec = RequestSpec.of(self._next, self._seed, self._large)
            self._next += 1
            deadline = time.monotonic() + PATIENCE_S
            while (failure := await self._attempt(spec, client, session)) is not None:
                assert time.monotonic() < deadline, f"{spec} was never taken: {failure!r}"
                await asyncio.sleep(0.1)

    async def _attempt(self, spec: RequestSpec, client: RosterClient, session: Session) -> RosterError | None:
        """One try; why it never began, or None: it has come to its end."""
        stream = (session if spec.in_session else client).generate(spec.prompt, **spec.options)
        prompts = recorded_prompts(stream)
        try:
            if not await self._follow(spec, client, stream):
                self.outcome.cancelled += 1
                return None
            completion = await stream.completion()
        except (UnavailableError, RequestCancelledError, OverloadedError, NotFoundError) as error:
            return error
        except InvalidRequestError as error:
            # The runners that hold it are away, and one is there that does not. What has tokens waits aside for them,
            # also where it is sent again to a new scheduler; unless there are several choices, which begin again.
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
        reasons = {choice.finish.reason for choice in completion.choices if choice.finish is not None}
        if FinishReason.UNAVAILABLE in reasons:
            assert self.outcome.troubles["scheduler drained"], completion
            self.outcome.cut_short += 1
            return UnavailableError(grpc.StatusCode.UNAVAILABLE, "the service shut down")
        self.outcome.cancelled += FinishReason.CANCELLED in reasons
        self.outcome.completed += FinishReason.CANCELLED not in reasons
        return None

    async def _follow(self, spec: RequestSpec, client: RosterClient, stream: EventStream | SessionStream) -> bool:
        """Reads the stream, and cancels where the request says so; False when it was cut."""
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
            ):  # gone, or just restarting
                await client.cancel(stream.request_id, deadline_s=PATIENCE_S)
        return True

    def _note(self, heard_s: float | None) -> float:
        """A delta came; `heard_s` is when the last one did. Counts from the first kill in between, if there was any."""
        now_s = time.monotonic()
        since = [kill for kill in self.outcome.kills if heard_s is not None and kill[0] >= heard_s]
        if since and heard_s is not None:
            at_s, name = since[0]
            if name == "scheduler" and now_s - at_s < ON_ITS_WAY_S:
                return heard_s
            self.outcome.resumed_s[name].append(now_s - at_s)
        return now_s


def recorded_prompts(stream: EventStream | SessionStream) -> list[ToldPrompt]:
    """Fills with what each of the stream's connections tells of the prompt; the client itself takes the first."""
    assembler, told = stream._assembler, list[ToldPrompt]()
    events = assembler.events

    def recorded(response: pb.GenerateResponse) -> Iterator[Event]:
        if response.HasField("prompt"):
            told.append(ToldPrompt(response.prompt, assembler.received))
        return events(response)

    assembler.events = recorded  # type: ignore[method-assign]
    return told


async def settled(roster: RosterProcesses, runners: int, within_s: float = 30.0) -> admin_pb2.GetStatusResponse:
    """The status once nothing waits, runs or holds a block on any of so many runners."""
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
