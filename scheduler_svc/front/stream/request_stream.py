"""A worker's stream of one request, from its submission to the engine to the last message to its client.

| state    | entered by                           | the client receives                                    |
|----------|--------------------------------------|--------------------------------------------------------|
| OPENING  | Submit or Attach sent                | nothing yet                                            |
| OPEN     | Accepted or Attached                 | its id, deltas, finishes, usage                        |
| FAILED   | Refused, Detached, loss of the engine| a status                                               |
| ORPHANED | disconnect with ON_DISCONNECT_KEEP   | nothing; the worker still looks for stop strings       |
|          | and stop strings                     |                                                        |
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
    """Interface of the worker's connection to the engine for its streams."""

    def new_handle(self) -> int:
        """Returns an identifier for a request between this worker and the engine."""

    def send(self, command: engine_pb2.Command) -> None:
        """Sends a command to the engine."""

    def follow(self, stream: RequestStream) -> None:
        """Passes the engine's messages about the request to this stream."""

    def follow_choices(self, choices: list[ChoiceStream]) -> None:
        """Passes the tokens of these choices to them."""

    def forget(self, stream: RequestStream) -> None:
        """Passes nothing to this stream any more."""


class StreamState(enum.Enum):
    """State of a request on this worker."""

    OPENING = enum.auto()
    OPEN = enum.auto()
    FAILED = enum.auto()
    ORPHANED = enum.auto()
    CLOSED = enum.auto()


class RequestStream:
    """Collects the engine's messages about one request until its writer takes the output."""

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
        """`cursors`: number of tokens that the client has of each choice, used when the engine answers Attached.

        `on_touched(urgent)` is called whenever there is output to take. It must be cheap: at worst, that is once per
        token.
        """
        self._client = client
        self._text = text
        self._cursors = cursors
        self._prompt_ids: list[int] = []
        self._prompt_logprobs: LogprobColumns | None = None
        self._prompt_wanted = False
        self.touched = on_touched
        self.trace: RequestTrace | None = None
        """Records the times of events, if the request is traced."""
        self.handle = client.new_handle()
        self.request_id = request_id
        self.request = inference_pb2.GenerateRequest()
        self.choices: list[ChoiceStream] = []
        self.failure: Refusal | None = None
        self.num_prompt_tokens = 0
        self.open_choices = 0
        """Number of choices that the engine has not ended, once the request is open."""
        self.state = StreamState.OPENING

    # Calls from the front.

    def submit(self, valid: ValidRequest, tenant: str, trace: RequestTrace | None = None) -> None:
        """Sends a request to the engine. Raises Refusal if the engine is gone."""
        self.trace = trace
        self._client.follow(self)
        self._describe(valid.body, valid.prompt)
        self._client.send(engine_pb2.Command(submit=valid.to_submit(self.handle, tenant)))

    def attach(self, tenant: str) -> None:
        """Asks the engine to attach this stream to an existing request. Raises Refusal if the engine is gone."""
        self._client.follow(self)
        attach = engine_pb2.Attach(handle=self.handle, tenant=tenant, request_id=self.request_id)
        self._client.send(engine_pb2.Command(attach=attach))

    def cancel(self) -> None:
        """Cancels the request at the client's wish; the engine answers with its Ends."""
        self._client.send(engine_pb2.Command(cancel=engine_pb2.Cancel(handle=self.handle)))

    def disconnect(self) -> None:
        """Ends the stream after its client has disconnected. No effect after the end."""
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

    # Messages of the engine.

    def accepted(self, message: engine_pb2.Accepted) -> None:
        """Opens the choices of a request that the engine has accepted, with their sequence ids."""
        for index in range(self.request.n if self.request.HasField("n") else 1):
            self.choices.append(self._choice(index, message.first_sequence_id + index))
        self.open_choices = len(self.choices)
        self._client.follow_choices(self.choices)
        self.state = StreamState.OPEN
        for choice in self.choices:
            choice.accepted()
        self.touched(True)

    def attached(self, message: engine_pb2.Attached) -> None:
        """Opens an existing request: rebuilds the text from the tokens, without delivering it up to each cursor."""
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
        """Ends the stream, as another call has attached to the request."""
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
        """Raises the stream's failure, if any, and drops it, since its traceback refers to the stream."""
        failure, self.failure = self.failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure

    def prompt_logprobs(self, row: plan_pb2.RowLogprobs) -> None:
        """Takes log-probabilities of consecutive prompt positions; skips those that a recomputation repeats."""
        columns = self._prompt_logprobs
        if columns is not None:
            expected = len(columns) + 1
            columns.extend(row, skip=max(0, expected - row.first_position))

    # Calls from the choices.

    def cut(self, sequence_id: int, num_tokens: int, stop_string: str) -> None:
        """Reports a matched stop string to the engine, which may have sampled further tokens."""
        cut = engine_pb2.Cut(sequence_id=sequence_id, num_tokens=num_tokens, stop_string=stop_string)
        self._client.send(engine_pb2.Command(cut=cut))

    def cursor_missed(self, index: int, cursor: int, num_tokens: int) -> None:
        """Fails the stream, as a choice ended before it reached the client's cursor."""
        num_received = len(self.request.received_token_ids) if index == 0 else 0
        self._leave()
        self.fail(cursor_past_end(index, num_received + cursor, num_received + num_tokens))

    def choice_ended(self) -> None:
        """Counts a choice that the engine has ended; after the last, no messages follow."""
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
        """Discards the output of an orphaned request."""
        for choice in self.choices:
            choice.take_piece()

    # Calls from the writer.

    @property
    def prompt_pending(self) -> bool:
        """Whether the prompt's log-probabilities were requested and are incomplete."""
        columns = self._prompt_logprobs
        return self._prompt_wanted and columns is not None and len(columns) < self.num_prompt_tokens - 1

    def take_prompt(self, force: bool) -> inference_pb2.PromptInfo | None:
        """Returns the requested prompt information once, when it is complete; `force` returns it as it is."""
        if not self._prompt_wanted or (self.prompt_pending and not force):
            return None
        self._prompt_wanted = False
        info = inference_pb2.PromptInfo(token_ids=self._prompt_ids)
        if self._prompt_logprobs is not None:
            info.logprobs.CopyFrom(self._prompt_logprobs.take_rows(len(self._prompt_logprobs)))
        return info

    def take_usage(self) -> inference_pb2.Usage | None:
        """Returns the usage when all choices have ended, None before; it is the last output to take."""
        if self.open_choices or self.state is not StreamState.OPEN:
            return None
        usage = inference_pb2.Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            cached_tokens=self.choices[0].cached_tokens,
            drafted_tokens=sum(choice.drafted_tokens for choice in self.choices),
            accepted_tokens=sum(choice.accepted_tokens for choice in self.choices),
            numerics=self._text.model.numerics,
        )
        self._close()
        self._release()
        return usage

    def _close(self) -> None:
        self.state = StreamState.CLOSED
        self._client.forget(self)

    def _release(self) -> None:
        """Breaks reference cycles, so that memory is freed now and not by a later garbage collection."""
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
    """Ignores notifications of a stream that has ended."""
