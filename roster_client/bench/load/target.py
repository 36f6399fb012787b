"""What a load generator needs of a system: to send one request, and to tell when tokens come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeVar

from roster_client.bench.load.workload import LoadRequest
from roster_client.bench.records.record import Status
from roster_client.client.errors import DeadlineError, InvalidRequestError, OverloadedError, RosterError

Take = Callable[[int], None]
"""Called as soon as a message with so many tokens is here; its time is taken then."""

Prepared = TypeVar("Prepared")


@dataclass(frozen=True, slots=True)
class Answer:
    """A request's counts, by the server. `cached_tokens` is None where it does not tell."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None


class RequestFailed(Exception):
    """The request was not served to its end; the message says why."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


def status_of(error: RosterError) -> Status:
    """What an error of Roster's API is to a benchmark."""
    if isinstance(error, OverloadedError | InvalidRequestError):
        return Status.REFUSED
    return Status.TIMEOUT if isinstance(error, DeadlineError) else Status.FAILED


class Target(Protocol[Prepared]):
    """A system under load; used as `async with`."""

    @property
    def url(self) -> str:
        """What is driven, for reports."""
        ...

    def prepare(self, request: LoadRequest) -> Prepared:
        """Builds the message ahead of its time, so that building it makes no request late."""
        ...

    async def serve(self, prepared: Prepared, take: Take) -> Answer:
        """Sends it, and reads its stream to the end. Raises RequestFailed."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
