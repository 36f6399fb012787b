"""A Session call for load generators: reads only each request's number of tokens from a flush.

A load generator must not become the bottleneck of its measurement.
"""

from __future__ import annotations

import itertools

from roster_client.bench.load.target import Answer, RequestFailed, Take, status_of
from roster_client.bench.records.record import Status
from roster_client.client.errors import RosterError, from_status
from roster_client.client.events import FinishReason, Usage
from roster_client.client.whole_answers import PendingRequest, WholeAnswers
from roster_protos import inference_pb2 as pb

ENDINGS = {
    FinishReason.DEADLINE: Status.TIMEOUT,
    FinishReason.CANCELLED: Status.FAILED,
    FinishReason.ERROR: Status.FAILED,
    FinishReason.UNAVAILABLE: Status.FAILED,
}


class _Counted(PendingRequest):
    """A request whose tokens are counted."""

    def __init__(self, take: Take) -> None:
        super().__init__()
        self.take = take


class TokenSession(WholeAnswers[_Counted]):
    """One Session call, used in an `async with`."""

    async def serve(self, message: pb.GenerateRequest, take: Take) -> Answer:
        """Sends a request and waits until it ends. Raises RequestFailed."""
        try:
            answer: Answer = await self._answer(message, _Counted(take))
        except RosterError as error:
            raise RequestFailed(status_of(error), str(error)) from None
        return answer

    def _dispatch(self, response: pb.SessionResponse) -> None:
        counts = response.token_counts or itertools.repeat(1, len(response.tags))
        for tag, count in zip(response.tags, counts, strict=True):
            if one := self._pending.get(tag):
                one.take(count)
        for event in response.events:
            if one := self._pending.get(event.tag):
                _take_event(one, event)


def answer_of(usage: pb.Usage | Usage) -> Answer:
    """Returns the token counts of a request that has ended."""
    return Answer(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        usage.drafted_tokens,
        usage.accepted_tokens,
    )


def _take_event(one: _Counted, event: pb.SessionEvent) -> None:
    match event.WhichOneof("event"):
        case "finish":
            reason = FinishReason(event.finish.reason)
            if reason in ENDINGS:
                one.fail(RequestFailed(ENDINGS[reason], event.finish.message or f"ended: {reason.name.lower()}"))
        case "usage":
            one.end(answer_of(event.usage))
        case "refused":
            refused = event.refused
            one.fail(from_status(refused.code, refused.message, refused.details))
