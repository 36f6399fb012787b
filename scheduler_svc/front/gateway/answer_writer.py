"""Writes a request's answer in the gateway's protocol: chunks of token ids and exactly one `complete` per choice.

| `stream` | chunks                               | each `complete`                   |
|----------|--------------------------------------|-----------------------------------|
| true     | a choice's tokens since the last one | no ids: they are in the chunks    |
| false    | none                                 | all ids and log-probabilities     |

The gateway detokenizes the ids. Detokenization here only finds stop strings, and holds back ids whose text is not
decided. A choice that fails (deadline, error, server shutdown) ends the call with a status, which the gateway turns
into an HTTP status. The gateway would pass on any other `finish_reason` unchanged, and OpenAI clients know only `stop`
and `length`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from roster_protos import inference_pb2
from scheduler_svc.front.base.refusal import Refusal

Write = Callable[[vllm.GenerateResponse], Awaitable[None]]

LEAST_LOGPROB = -9999.0
"""Log-probability that OpenAI's API uses for an impossible token, as JSON has no infinity."""

_REASONS = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_CANCELLED: "abort",
}
_FAILURES = {
    inference_pb2.FINISH_REASON_DEADLINE: (grpc.StatusCode.DEADLINE_EXCEEDED, "the request exceeded its deadline"),
    inference_pb2.FINISH_REASON_UNAVAILABLE: (
        grpc.StatusCode.UNAVAILABLE,
        "the server became unavailable; send the request again",
    ),
}


@dataclass(slots=True)
class _Choice:
    """Output of one choice that is not written yet."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: vllm.OutputLogProbs = field(default_factory=vllm.OutputLogProbs)
    num_tokens: int = 0
    finish: inference_pb2.Finish | None = None


class AnswerWriter:
    """Converts the messages of `write_responses` for one request into the gateway's messages.

    The `complete` messages are written when the usage arrives, as they carry the number of cached prompt tokens.
    """

    def __init__(self, prompt: list[int], n: int, stream: bool, write: Write) -> None:
        """`prompt`: token ids. `n`: number of choices. `stream`: write chunks as tokens arrive."""
        self._prompt = prompt
        self._stream = stream
        self._write = write
        self._choices = [_Choice() for _ in range(n)]
        self._input_logprobs: vllm.InputLogProbs | None = None

    async def write(self, response: inference_pb2.GenerateResponse) -> None:
        """Converts and writes one message. Raises Refusal if a choice has failed."""
        if response.HasField("prompt") and response.prompt.HasField("logprobs"):
            self._input_logprobs = self._input(response.prompt.logprobs)
        for delta in response.deltas:
            await self._take(delta)
        for finish in response.finishes:
            self._choices[finish.index].finish = _checked(finish)
        if response.HasField("usage"):
            for index, choice in enumerate(self._choices):
                complete = self._complete(index, choice, response.usage.cached_tokens)
                if index == 0:  # they are counted for all choices together
                    complete.spec_draft_tokens = response.usage.drafted_tokens
                    complete.spec_accepted_tokens = response.usage.accepted_tokens
                await self._write(vllm.GenerateResponse(complete=complete))

    async def _take(self, delta: inference_pb2.Delta) -> None:
        choice = self._choices[delta.index]
        choice.num_tokens += len(delta.token_ids)
        logprobs = _output(delta)
        if not self._stream:
            choice.token_ids.extend(delta.token_ids)
            choice.logprobs.MergeFrom(logprobs)
            return
        chunk = vllm.GenerateStreamChunk(
            index=delta.index,
            token_ids=delta.token_ids,
            prompt_tokens=len(self._prompt),
            completion_tokens=choice.num_tokens,
        )
        if delta.HasField("logprobs"):
            chunk.output_logprobs.CopyFrom(logprobs)
        if self._input_logprobs is not None:
            chunk.input_logprobs.CopyFrom(self._input_logprobs)
            self._input_logprobs = None
        await self._write(vllm.GenerateResponse(chunk=chunk))

    def _complete(self, index: int, choice: _Choice, cached_tokens: int) -> vllm.GenerateComplete:
        finish = choice.finish
        if finish is None:
            raise RuntimeError(f"the usage arrived before the finish of choice {index}")
        complete = vllm.GenerateComplete(
            index=index,
            output_ids=choice.token_ids,
            finish_reason=_REASONS[finish.reason],
            prompt_tokens=len(self._prompt),
            completion_tokens=finish.num_tokens,
            cached_tokens=cached_tokens,
        )
        if choice.logprobs.token_logprobs:
            complete.output_logprobs.CopyFrom(choice.logprobs)
        if self._input_logprobs is not None:
            complete.input_logprobs.CopyFrom(self._input_logprobs)
        if finish.HasField("stop_string"):
            complete.matched_stop_str = finish.stop_string
        elif finish.HasField("stop_token_id"):
            complete.matched_token_id = finish.stop_token_id
        return complete

    def _input(self, logprobs: inference_pb2.Logprobs) -> vllm.InputLogProbs:
        """Returns the prompt's log-probabilities; the first token has an empty entry."""
        known = len(logprobs.sampled)
        answer = vllm.InputLogProbs(token_ids=self._prompt[: known + 1])
        answer.token_logprobs.add()
        answer.top_logprobs.add()
        for value, top in zip(logprobs.sampled, _top(logprobs), strict=True):
            answer.token_logprobs.add(value=value)
            answer.top_logprobs.append(top)
        return answer


def _output(delta: inference_pb2.Delta) -> vllm.OutputLogProbs:
    if not delta.HasField("logprobs"):
        return vllm.OutputLogProbs()
    return vllm.OutputLogProbs(
        token_logprobs=delta.logprobs.sampled, token_ids=delta.token_ids, top_logprobs=list(_top(delta.logprobs))
    )


def _top(logprobs: inference_pb2.Logprobs) -> Iterator[vllm.TopLogProbs]:
    """Yields the alternatives of each token."""
    for index in range(len(logprobs.sampled)):
        row = slice(index * logprobs.top, (index + 1) * logprobs.top)
        values = [max(value, LEAST_LOGPROB) for value in logprobs.top_logprobs[row]]
        yield vllm.TopLogProbs(values=values, token_ids=logprobs.top_token_ids[row])


def _checked(finish: inference_pb2.Finish) -> inference_pb2.Finish:
    """Returns the finish of a choice. Raises Refusal if the choice has failed."""
    if finish.reason in _REASONS:
        return finish
    code, message = _FAILURES.get(finish.reason, (grpc.StatusCode.INTERNAL, "the request failed"))
    raise Refusal(code, finish.message or message)
