"""One request as this worker follows it, from its submission to the engine to the last message to its client.

| state    | entered by                           | what the client gets                                   |
|----------|--------------------------------------|--------------------------------------------------------|
| OPENING  | Submit or Attach sent                | nothing yet                                            |
| OPEN     | Accepted or Attached                 | its id, deltas, finishes, usage                        |
| FAILED   | Refused, Detached, loss of the engine| a status                                               |
| ORPHANED | the client went and keep_ms > 0      | nothing; stop strings are still looked for             |
| CLOSED   | usage taken, or Disconnect sent      | nothing more                                           |
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Protocol

from roster_protos import engine_pb2, inference_pb2, plan_pb2
from scheduler_svc.front.base.little_endian import int32_list
from scheduler_svc.front.base.refusal import Refusal
from scheduler_svc.front.base.service_refusals import attached_elsewhere, cursor_past_end
from scheduler_svc.front.request.validation import ValidRequest
from scheduler_svc.front.stream.choice_stream import ChoiceStream
from scheduler_svc.front.stream.logprob_columns import LogprobColumns
from scheduler_svc.front.text.tokenizer import ModelText
from scheduler_svc.front.tracing.request_trace import RequestTrace


class EngineChannel(Protocol):
    """The worker's line to the engine, as its streams know it."""

    def new_handle(self) -> int:
        """A name for a request between this worker and the engine."""

    def send(self, command: engine_pb2.Command) -> None:
        """A command to the engine."""

    def follow(self, stream: RequestStream) -> None:
        """What the engine says of the request goes to this stream."""

    def follow_choices(self, choices: list[ChoiceStream]) -> None:
        """Tokens of these choices go to them."""

    def forget(self, stream: RequestStream) -> None:
        """Nothing goes to this stream any more."""


class StreamState(enum.Enum):
    """Where a request is in its life on this worker."""

    OPENING = enum.auto()
    OPEN = enum.auto()
    FAILED = enum.auto()
    ORPHANED = enum.auto()
    CLOSED = enum.auto()


class RequestStream:
    """Collects what the engine says of one request until its writer takes it."""

    __slots__ = (
        "_client",
        "_cursors",
        "_prompt_ids",
        "_prompt_logprobs",
        "_prompt_wanted",
        "_text",
        "choices",
        "failure",
        "handle",
        "num_prompt_tokens",
        "open_choices",
        "request",
        "request_id",
        "state",
        "touched",
        "trace",
    )

    def __init__(
        self,
        client: EngineChannel,
        text: ModelText,
        request_id: str,
        cursors: Sequence[int],
        on_touched: Callable[[bool], None],
    ) -> None:
        """`cursors`: tokens that the client has, one per choice, used when the engine answers Attached.

        `on_touched(urgent)` is called whenever there is something to take, so once per token at worst: make it cheap.
        """
        self._client = client
        self._text = text
        self._cursors = cursors
        self._prompt_ids: list[int] = []
        self._prompt_logprobs: LogprobColumns | None = None
        self._prompt_wanted = False
        self.touched = on_touched
        self.trace: RequestTrace | None = None
        """Notes when things happen, if the request is traced."""
        self.handle = client.new_handle()
        self.request_id = request_id
        self.request = inference_pb2.GenerateRequest()
        self.choices: list[ChoiceStream] = []
        self.failure: Refusal | None = None
        self.num_prompt_tokens = 0
        self.open_choices = 0
        """Choices on which the engine has not said its last word, once the request is open."""
        self.state = StreamState.OPENING

    # What the front says.

    def submit(self, valid: ValidRequest, tenant: str, trace: RequestTrace | None = None) -> None:
        """Sends a request to the engine. Raises Refusal when the engine is gone."""
        self.trace = trace
        self._client.follow(self)
        self._describe(valid.body, valid.prompt)
        self._client.send(engine_pb2.Command(submit=valid.to_submit(self.handle, tenant)))

    def attach(self, tenant: str) -> None:
        """Asks the engine for a request that exists. Raises Refusal when the engine is gone."""
        self._client.follow(self)
        attach = engine_pb2.Attach(handle=self.handle, tenant=tenant, request_id=self.request_id)
        self._client.send(engine_pb2.Command(attach=attach))

    def cancel(self) -> None:
        """The client wants the request to end; the engine answers with its Ends."""
        self._client.send(engine_pb2.Command(cancel=engine_pb2.Cancel(handle=self.handle)))

    def disconnect(self) -> None:
        """The client is gone. Harmless after the end."""
        self._leave()
        if self.state is StreamState.CLOSED:
            self._release()

    def _leave(self) -> None:
        if self.state not in (StreamState.OPENING, StreamState.OPEN):
            return
        if self.trace is not None:
            self.trace.disconnected()
        if self.choices and not self.open_choices:
            self._close()
            return
        self._client.send(engine_pb2.Command(disconnect=engine_pb2.Disconnect(handle=self.handle)))
        kept = self.request.on_disconnect == inference_pb2.ON_DISCONNECT_KEEP
        if kept and any(choice.eager and not choice.has_ended for choice in self.choices):
            self.state = StreamState.ORPHANED
            self.touched = self._drop
        else:
            self._close()

    # What the engine says.

    def accepted(self, message: engine_pb2.Accepted) -> None:
        """The request is the engine's, and its sequences have ids."""
        for index in range(self.request.n if self.request.HasField("n") else 1):
            self.choices.append(self._choice(index, message.first_sequence_id + index))
        self.open_choices = len(self.choices)
        self._client.follow_choices(self.choices)
        self.state = StreamState.OPEN
        for choice in self.choices:
            choice.accepted()
        self.touched(True)

    def attached(self, message: engine_pb2.Attached) -> None:
        """The request existed: its text is made again from its tokens, up to each cursor without being delivered."""
        request = inference_pb2.GenerateRequest.FromString(message.body)
        self._describe(request, int32_list(message.prompt))
        if message.HasField("prompt_logprobs"):
            self.prompt_logprobs(message.prompt_logprobs)
        self.state = StreamState.OPEN
        for index, record in enumerate(message.choices):
            choice = self._choice(index, record.sequence_id)
            num_received = message.num_received if index == 0 else 0
            tokens = int32_list(record.tokens)[num_received:]
            given = self._cursors[index] if index < len(self._cursors) else 0
            try:
                choice.replay(record, tokens, max(0, given - num_received))
            except ValueError:
                self._leave()
                self.fail(cursor_past_end(index, given, num_received + len(tokens)))
                return
            self.choices.append(choice)
        open_choices = [choice for choice in self.choices if not choice.has_ended]
        self.open_choices = len(open_choices)
        self._client.follow_choices(open_choices)
        self.touched(True)

    def detached(self, message: engine_pb2.Detached) -> None:
        """Another call follows the request now."""
        self._client.forget(self)
        if self.state is StreamState.ORPHANED:
            self.state = StreamState.CLOSED
            self._release()
        else:
            self.fail(attached_elsewhere(self.request_id))

    def fail(self, refusal: Refusal) -> None:
        """Ends the stream with a status."""
        self.failure = refusal
        if self.trace is not None:
            self.trace.refused(refusal)
        self.state = StreamState.FAILED
        self.touched(True)
        self._release()

    def raise_failure(self) -> None:
        """Raises what the stream failed with, if it has. It is kept nowhere then: its traceback leads to the stream."""
        failure, self.failure = self.failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure

    def prompt_logprobs(self, row: plan_pb2.RowLogprobs) -> None:
        """Log-probabilities of consecutive prompt positions; those that a recomputation repeats are skipped."""
        columns = self._prompt_logprobs
        if columns is not None:
            expected = len(columns) + 1
            columns.extend(row, skip=max(0, expected - row.first_position))

    # What the choices say.

    def cut(self, sequence_id: int, num_tokens: int, stop_string: str) -> None:
        """A stop string matched: tells the engine, which may have sampled further."""
        cut = engine_pb2.Cut(sequence_id=sequence_id, num_tokens=num_tokens, stop_string=stop_string)
        self._client.send(engine_pb2.Command(cut=cut))

    def cursor_missed(self, index: int, cursor: int, num_tokens: int) -> None:
        """A choice ended before it came to the client's cursor."""
        num_received = len(self.request.received_token_ids) if index == 0 else 0
        self._leave()
        self.fail(cursor_past_end(index, num_received + cursor, num_received + num_tokens))

    def choice_ended(self) -> None:
        """The engine said its last word on a choice."""
        self.open_choices -= 1
        if not self.open_choices:
            self._client.forget(self)
            if self.trace is not None:
                self.trace.finish()
            if self.state is StreamState.ORPHANED:
                self.state = StreamState.CLOSED
                self._release()
                return
        self.touched(False)

    def _drop(self, urgent: bool) -> None:
        """Nobody reads what an orphan has to say."""
        for choice in self.choices:
            choice.take_piece()

    # What the writer takes.

    @property
    def prompt_pending(self) -> bool:
        """The prompt's log-probabilities were asked for and are not complete."""
        columns = self._prompt_logprobs
        return self._prompt_wanted and columns is not None and len(columns) < self.num_prompt_tokens - 1

    def take_prompt(self, force: bool) -> inference_pb2.PromptInfo | None:
        """What was asked of the prompt, once and when it is complete; `force` takes it as it is."""
        if not self._prompt_wanted or (self.prompt_pending and not force):
            return None
        self._prompt_wanted = False
        info = inference_pb2.PromptInfo(token_ids=self._prompt_ids)
        if self._prompt_logprobs is not None:
            info.logprobs.CopyFrom(self._prompt_logprobs.take_rows(len(self._prompt_logprobs)))
        return info

    def take_usage(self) -> inference_pb2.Usage | None:
        """The usage, once all choices have ended; nothing is left to take after it."""
        if self.open_choices or self.state is not StreamState.OPEN:
            return None
        usage = inference_pb2.Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            cached_tokens=self.choices[0].cached_tokens,
        )
        self._close()
        self._release()
        return usage

    def _close(self) -> None:
        self.state = StreamState.CLOSED
        self._client.forget(self)

    def _release(self) -> None:
        """Ends the circles of references, so that memory comes back now and not with some garbage collection."""
        self.choices = []
        self.touched = _nobody

    def _describe(self, request: inference_pb2.GenerateRequest, prompt: list[int]) -> None:
        self.request = request
        self.num_prompt_tokens = len(prompt)
        if request.output.prompt_token_ids:
            self._prompt_ids = prompt
        if request.output.HasField("prompt_logprobs"):
            self._prompt_logprobs = LogprobColumns(request.output.prompt_logprobs)
        self._prompt_wanted = request.output.prompt_token_ids or self._prompt_logprobs is not None

    def _choice(self, index: int, sequence_id: int) -> ChoiceStream:
        request = self.request
        text = self._text.choice(request, request.received_token_ids if index == 0 else ())
        top = request.output.logprobs if request.output.HasField("logprobs") else None
        return ChoiceStream(self, index, sequence_id, text, bool(request.stop.strings), top)


def _nobody(urgent: bool) -> None:
    """Hears what is said of a stream that is over."""
