"""A stream's events as dataclasses, and their assembly, which both clients share.

`Assembler` converts each `GenerateResponse` to events, checks that the deltas of every choice are contiguous, and
collects the whole answer. `async_client.py` and `sync_client.py` only pass messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from roster_client.client.errors import StreamGapError
from roster_protos import inference_pb2 as pb


class FinishReason(Enum):
    """Reason that a choice ended (roster.v1.FinishReason)."""

    STOP = pb.FINISH_REASON_STOP
    LENGTH = pb.FINISH_REASON_LENGTH
    CANCELLED = pb.FINISH_REASON_CANCELLED
    DEADLINE = pb.FINISH_REASON_DEADLINE
    ERROR = pb.FINISH_REASON_ERROR
    UNAVAILABLE = pb.FINISH_REASON_UNAVAILABLE


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token and of the likeliest tokens at its position, as (token id, log-probability)."""

    sampled: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted under this id. Has the prompt's token ids and log-probabilities if they were requested.

    `prompt_logprobs` are those of prompt tokens 1, 2, ...; token 0 has none. A session accepts a request before its
    prompt is computed, and then yields a second `Started` with the requested data of the prompt.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens of one choice, after its first `first_index` tokens, with their text and, if requested, logprobs."""

    index: int
    first_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """A choice ended; `stop_string` or `stop_token_id` is the match that ended it, `message` explains an error."""

    index: int
    reason: FinishReason
    num_tokens: int
    stop_string: str | None = None
    stop_token_id: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of the whole request.

    `cached_tokens`: prompt tokens found in the prefix cache. `drafted_tokens`: tokens that were drafted and verified;
    `accepted_tokens`: those of them that are among the completion tokens. `numerics`: the service's, if
    it promises that the tokens are the same whatever else is computed; "" otherwise.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    numerics: str = ""


Event = Started | Delta | Finish | Usage


@dataclass(slots=True)
class Choice:
    """One answer, as received so far."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it has not."""
        return self.finish.reason if self.finish is not None else None


@dataclass(slots=True)
class Completion:
    """Everything received from a stream: choices in order of index, and usage once it has ended."""

    request_id: str = ""
    started: Started | None = None
    choices: list[Choice] = field(default_factory=list)
    usage: Usage | None = None

    @property
    def text(self) -> str:
        """The text of choice 0; "" without choices."""
        return self.choices[0].text if self.choices else ""

    @property
    def token_ids(self) -> list[int]:
        """The token ids of choice 0; [] without choices."""
        return self.choices[0].token_ids if self.choices else []

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """The log-probabilities of choice 0's tokens, if they were requested."""
        return self.choices[0].logprobs if self.choices else []

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why choice 0 ended; None while it has not."""
        return self.choices[0].finish_reason if self.choices else None


class Assembler:
    """Collects a stream's messages; `cursors`: number of tokens of each choice received before this stream."""

    def __init__(self, cursors: tuple[int, ...] = ()) -> None:
        self.completion = Completion()
        self._cursors = dict(enumerate(cursors))

    @property
    def received(self) -> list[int]:
        """Number of tokens received of each choice, earlier streams included, for `attach`."""
        return [self._cursors.get(index, 0) for index in range(max(self._cursors, default=-1) + 1)]

    def events(self, response: pb.GenerateResponse) -> Iterator[Event]:
        """Yields the events of one message in order, without those that a resumed stream repeats.

        Raises StreamGapError if a delta does not continue the previous one.
        """
        if self._tells_of_the_start(response):
            yield self._start(response)
        for delta in response.deltas:
            yield self._delta(delta)
        for finish in response.finishes:
            choice = self._choice(finish.index)
            if choice.finish is None:
                choice.finish = finish_of(finish)
                yield choice.finish
        if response.HasField("usage"):
            self.completion.usage = usage_of(response.usage)
            yield self.completion.usage

    def cut_by_deadline(self, num_choices: int) -> Iterator[Event]:
        """Yields the finishes of the choices that have none, as if `timeout_ms` had passed on the server."""
        for index in range(max(num_choices, len(self._cursors))):
            choice = self._choice(index)
            if choice.finish is None:
                choice.finish = Finish(index, FinishReason.DEADLINE, self._cursors.get(index, 0))
                yield choice.finish

    def _tells_of_the_start(self, response: pb.GenerateResponse) -> bool:
        """Whether the message has new data of the start; a resumed stream repeats the data of the prompt."""
        started = self.completion.started
        if started is None:
            return bool(response.request_id) or response.HasField("prompt")
        return response.HasField("prompt") and not (started.prompt_token_ids or started.prompt_logprobs)

    def _start(self, response: pb.GenerateResponse) -> Started:
        completion = self.completion
        completion.request_id = response.request_id or completion.request_id
        prompt = response.prompt
        started = Started(completion.request_id, tuple(prompt.token_ids), token_logprobs(prompt.logprobs))
        completion.started = started
        return started

    def _delta(self, delta: pb.Delta) -> Delta:
        expected = self._cursors.get(delta.index, 0)
        if delta.first_index != expected:
            raise StreamGapError(delta.index, expected, delta.first_index)
        event = Delta(
            delta.index, delta.first_index, tuple(delta.token_ids), delta.text, token_logprobs(delta.logprobs)
        )
        self._cursors[delta.index] = delta.first_index + len(delta.token_ids)
        choice = self._choice(delta.index)
        choice.text += delta.text
        choice.token_ids += event.token_ids
        choice.logprobs += event.logprobs
        return event

    def _choice(self, index: int) -> Choice:
        choices = self.completion.choices
        while len(choices) <= index:
            choices.append(Choice(len(choices)))
        return choices[index]


class AssembledStream:
    """Properties of a request's stream, common to all clients."""

    def __init__(self, assembler: Assembler) -> None:
        self._assembler = assembler

    @property
    def request_id(self) -> str:
        """The request's id; "" before the first event."""
        return self._assembler.completion.request_id

    @property
    def received(self) -> list[int]:
        """Number of tokens received of each choice, with which `attach` resumes the stream."""
        return self._assembler.received


def token_logprobs(logprobs: pb.Logprobs) -> tuple[TokenLogprobs, ...]:
    """Unpacks arrays to one `TokenLogprobs` per token."""
    k = logprobs.top
    ids, values = logprobs.top_token_ids, logprobs.top_logprobs
    return tuple(
        TokenLogprobs(sampled, tuple(zip(ids[i * k : (i + 1) * k], values[i * k : (i + 1) * k], strict=True)))
        for i, sampled in enumerate(logprobs.sampled)
    )


def usage_of(usage: pb.Usage) -> Usage:
    """Returns the usage of a request, from its message."""
    return Usage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        usage.drafted_tokens,
        usage.accepted_tokens,
        usage.numerics,
    )


def finish_of(finish: pb.Finish) -> Finish:
    """Returns the finish of a choice, from its message."""
    matched = finish.WhichOneof("matched")
    return Finish(
        finish.index,
        FinishReason(finish.reason),
        finish.num_tokens,
        finish.stop_string if matched == "stop_string" else None,
        finish.stop_token_id if matched == "stop_token_id" else None,
        finish.message,
    )
