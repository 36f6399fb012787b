"""The interface of a system under load: sends one request and reports when its tokens arrive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeVar

from roster_client.bench.load.workload import LoadRequest
from roster_client.bench.records.record import Status
from roster_client.client.errors import DeadlineError, InvalidRequestError, OverloadedError, RosterError

Take = Callable[[int], None]
"""Called with the number of tokens of a message as soon as it arrives, which records the time."""

Prepared = TypeVar("Prepared")


@dataclass(frozen=True, slots=True)
class Answer:
    """A request's token counts from the server; those that it does not report are None."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None


class RequestFailed(Exception):
    """The request was not completed; the message says why."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


def status_of(error: RosterError) -> Status:
    """Returns a record's status for an error of Roster's API."""
    if isinstance(error, OverloadedError | InvalidRequestError):
        return Status.REFUSED
    return Status.TIMEOUT if isinstance(error, DeadlineError) else Status.FAILED


class Target(Protocol[Prepared]):
    """A system under load; used in an `async with`."""

    @property
    def url(self) -> str:
        """Address of the system, for reports."""
        ...

    def prepare(self, request: LoadRequest) -> Prepared:
        """Builds the message ahead of its time, so that building does not delay a request."""
        ...

    async def serve(self, prepared: Prepared, take: Take) -> Answer:
        """Sends the message and reads its stream to the end. Raises RequestFailed."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
