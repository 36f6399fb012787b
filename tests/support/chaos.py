"""A load of mixed requests, and what breaks things under it: for tests of what must survive.

Every request is made from its number and a seed, and its answer is known: `RequestSpec.check` compares it exactly.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from protos import admin_pb2
from roster_client.admin import AdminClient
from roster_client.client import EventStream, RosterClient
from roster_client.errors import (
    NotFoundError,
    OverloadedError,
    RequestCancelledError,
    RosterError,
    UnavailableError,
)
from roster_client.events import Completion, Delta, FinishReason
from roster_client.requests import Options
from roster_client.session import Session, SessionStream
from runner_svc.byte_tokenizer import IM_END_ID
from runner_svc.hash_model import expected_tokens
from tests.support.processes import RosterProcesses

EOS_PROBABILITY = 1 / 64
EARLY_KILLS = 0.2
"""Part of the kills after which the next may come while the process still starts."""
PATIENCE_S = 120.0
ON_ITS_WAY_S = 0.3
"""What comes sooner after a scheduler's death is what it had sent: the next one has not even started."""
MAX_TOKENS = 60


def text_of(tokens: Sequence[int]) -> str:
    """What the byte tokenizer makes of tokens."""
    return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request of the load, made from its number."""

    number: int
    prompt: list[int]
    max_tokens: int
    n: int
    seed: int
    temperature: float
    logprobs: int | None
    stop: str | None
    in_session: bool
    cancel_after: int | None
    """Tokens after which the request is cancelled; None: never."""
    cancel_by_id: bool
    """By a call of its own, while the stream stays open; else the client cuts the stream."""

    @classmethod
    def of(cls, number: int, seed: int) -> RequestSpec:
        """The request of this number."""
        rng = random.Random(f"{seed}-{number}")
        stem = [7, 3, 1, 4] * 8 if rng.random() < 0.3 else []
        spec = cls(
            number=number,
            prompt=[*stem, *(rng.randrange(256) for _ in range(rng.randrange(1, 24)))],
            max_tokens=rng.randrange(1, MAX_TOKENS),
            n=rng.choice([1, 1, 1, 1, 2]),
            seed=rng.randrange(1 << 60),
            temperature=rng.choice([0.0, 1.0]),
            logprobs=1 if rng.random() < 0.1 else None,
            stop=None,
            in_session=rng.random() < 0.5,
            cancel_after=rng.randrange(1, 20) if rng.random() < 0.1 else None,
            cancel_by_id=rng.random() < 0.5,
        )
        if rng.random() < 0.1 and spec.n == 1:
            text = text_of(spec.expected(0))
            if len(text) > 12:
                begin = rng.randrange(4, len(text) - 4)
                return cls(**{**{f: getattr(spec, f) for f in cls.__slots__}, "stop": text[begin : begin + 4]})
        return spec

    def expected(self, index: int) -> list[int]:
        """The choice's tokens where no stop string cuts them."""
        return expected_tokens(
            self.prompt,
            self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            sample_index=index,
            stop_ids=[IM_END_ID],
            eos_probability=EOS_PROBABILITY,
        )

    @property
    def options(self) -> Options:
        """As the client sends it."""
        options: Options = {
            "request_id": f"chaos-{self.number}", "max_tokens": self.max_tokens, "n": self.n, "seed": self.seed,
            "temperature": self.temperature,
        }  # fmt: skip
        if self.logprobs is not None:
            options["logprobs"] = self.logprobs
        if self.stop is not None:
            options["stop"] = [self.stop]
        return options

    def check(self, completion: Completion) -> None:
        """A whole answer is the one that it would have been alone; part of one is its beginning."""
        for index in range(self.n):
            expected = self.expected(index)
            choice = completion.choices[index]
            told = f"{self}, choice {index}: {choice}"
            assert choice.token_ids == expected[: len(choice.token_ids)], told
            if self.logprobs is not None:
                assert len(choice.logprobs) == len(choice.token_ids), told
            assert choice.finish is not None, told
            if choice.finish.reason is FinishReason.CANCELLED:
                assert self.cancel_after is not None, told
            elif self.stop is not None and choice.finish.stop_string is not None:
                text = text_of(expected)
                assert choice.text == text[: text.index(self.stop)], told
            else:
                assert choice.token_ids == expected, told
                assert choice.text == text_of(expected), told
                assert choice.finish.reason in (FinishReason.STOP, FinishReason.LENGTH), told


@dataclass(slots=True)
class Outcome:
    """What became of the load."""

    completed: int = 0
    cancelled: int = 0
    refused: list[str] = field(default_factory=list)
    """Refused as poison: killed while it was alone on trial."""
    resumed_s: dict[str, list[float]] = field(default_factory=lambda: {"runner": [], "scheduler": []})
    """Of each stream that had tokens when something was killed, from then to its next token."""
    kills: list[tuple[float, str]] = field(default_factory=list)


class Load:
    """Sends `count` requests, `concurrency` at a time, each until it has its answer."""

    def __init__(self, roster: RosterProcesses, count: int, concurrency: int, seed: int) -> None:
        self._roster = roster
        self._count = count
        self._concurrency = concurrency
        self._seed = seed
        self._next = 0
        self.outcome = Outcome()

    @property
    def done(self) -> bool:
        """Every request has been taken up."""
        return self._next >= self._count

    async def run(self) -> Outcome:
        """Returns once all are done. Raises AssertionError at the first wrong answer."""
        async with RosterClient(self._roster.address, reconnect_s=60) as client, client.session() as session:
            await asyncio.gather(*[self._work(client, session) for _ in range(self._concurrency)])
        return self.outcome

    async def _work(self, client: RosterClient, session: Session) -> None:
        while self._next < self._count:
            spec = RequestSpec.of(self._next, self._seed)
            self._next += 1
            deadline = time.monotonic() + PATIENCE_S
            while (failure := await self._attempt(spec, client, session)) is not None:
                assert time.monotonic() < deadline, f"{spec} was never taken: {failure!r}"
                await asyncio.sleep(0.1)

    async def _attempt(self, spec: RequestSpec, client: RosterClient, session: Session) -> RosterError | None:
        """One try; why it never began, or None: it has come to its end."""
        stream = (session if spec.in_session else client).generate(spec.prompt, **spec.options)
        try:
            if await self._follow(spec, client, stream):
                completion = await stream.completion()
                spec.check(completion)
                cancelled = any(choice.finish.reason is FinishReason.CANCELLED for choice in completion.choices)  # type: ignore[union-attr]
                self.outcome.cancelled += cancelled
                self.outcome.completed += not cancelled
            else:
                self.outcome.cancelled += 1
        except (UnavailableError, RequestCancelledError, OverloadedError, NotFoundError) as error:
            return error
        except RosterError as error:
            if error.code is not grpc.StatusCode.INTERNAL:
                raise
            self.outcome.refused.append(str(error))
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
            self.outcome.resumed_s[name.partition("-")[0]].append(now_s - at_s)
        return now_s


class Havoc:
    """Kills and restarts runners and the scheduler, and swaps policies, until it is cancelled.

    Most of the time what was killed may serve again before it is killed next, however slow the machine; sometimes it
    dies while it starts.
    """

    POLICIES = ("fcfs", "orca", "fair", "sjf", "priority", "deadline")

    def __init__(self, roster: RosterProcesses, outcome: Outcome, seed: int, runners: Sequence[str]) -> None:
        self._roster = roster
        self._outcome = outcome
        self._rng = random.Random(seed)
        self._runners = runners

    async def runners(self, every_s: float) -> None:
        """A runner dies and is started again."""
        while True:
            await asyncio.sleep(every_s * self._rng.uniform(0.5, 1.5))
            await self._kill(self._rng.choice(self._runners))

    async def scheduler(self, every_s: float) -> None:
        """The scheduler dies and is started again."""
        while True:
            await asyncio.sleep(every_s * self._rng.uniform(0.7, 1.3))
            await self._kill("scheduler")

    async def _kill(self, name: str) -> None:
        self._outcome.kills.append((time.monotonic(), name))
        await asyncio.to_thread(self._roster.end, name, signal.SIGKILL)
        self._roster.start_one(name)
        if self._rng.random() < EARLY_KILLS:
            return
        async with AdminClient(self._roster.admin_address) as admin:
            while True:
                await asyncio.sleep(0.1)  # also for the scheduler to notice that it is gone
                with contextlib.suppress(RosterError):
                    here = [runner.id for runner in (await admin.get_status(deadline_s=2)).runners]
                    if name in here or (name == "scheduler" and here):
                        return

    async def policies(self, every_s: float) -> None:
        """Another policy decides."""
        async with AdminClient(self._roster.admin_address) as admin:
            while True:
                await asyncio.sleep(every_s)
                try:
                    await admin.set_policy(self._rng.choice(self.POLICIES), deadline_s=2)
                except RosterError:
                    continue  # the scheduler is being started


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
