"""Stream of one choice of a request: takes tokens by step, gives decided text by message.

Tokens are detokenized when a message is about to be written, many at once: this is cheaper, and costs nothing while a
reader is slow. Only a choice with stop strings is `eager`: its tokens are detokenized as they arrive, so that a match
ends the sequence in the engine within a step.
"""

from __future__ import annotations

from typing import Protocol

from roster_protos import engine_pb2, inference_pb2, plan_pb2
from scheduler_svc.front.stream.logprob_columns import LogprobColumns
from scheduler_svc.front.text.text_stream import ChoiceText, Piece
from scheduler_svc.front.tracing.request_trace import RequestTrace


class ChoiceOwner(Protocol):
    """Interface of the request's stream for its choices."""

    trace: RequestTrace | None

    def cut(self, sequence_id: int, num_tokens: int, stop_string: str) -> None:
        """Ends the sequence after `num_tokens` tokens, which complete a stop string."""

    def touched(self, first: bool) -> None:
        """Reports that a choice has pending output; `first`: its first."""

    def prompt_logprobs(self, row: plan_pb2.RowLogprobs) -> None:
        """Takes log-probabilities of the prompt that arrived with a choice's row."""

    def cursor_missed(self, index: int, cursor: int, num_tokens: int) -> None:
        """Reports that a choice has ended with fewer tokens than its client's cursor."""

    def choice_ended(self) -> None:
        """Reports that a choice has ended."""


_WHOLE = (inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH)
"""Finish reasons of complete choices."""


class ChoiceStream:
    """State of one choice. `incoming` is always the same list and holds tokens that are not detokenized yet: the engine
    client appends to it, and calls `arrived` if it was empty."""

    __slots__ = (
        "_cursor",
        "_finish",
        "_started",
        "_stream",
        "_text",
        "_waiting",
        "accepted_tokens",
        "cached_tokens",
        "drafted_tokens",
        "eager",
        "finish_pending",
        "has_ended",
        "incoming",
        "index",
        "logprobs",
        "num_tokens",
        "sequence_id",
    )

    def __init__(
        self, stream: ChoiceOwner, index: int, sequence_id: int, text: ChoiceText, eager: bool, top: int | None
    ) -> None:
        """`eager`: the request has stop strings. `top`: alternatives per token; None: no log-probabilities."""
        self._stream = stream
        self._text = text
        self._started = False
        self._cursor = 0
        self._waiting: list[int] | None = None  # tokens so far, while fewer than the client's cursor
        self._finish: inference_pb2.Finish | None = None
        self.finish_pending = False
        """Whether `take_finish` may be called."""
        self.index = index
        self.sequence_id = sequence_id
        self.incoming: list[int] = []
        self.eager = eager
        self.logprobs = None if top is None else LogprobColumns(top)
        self.has_ended = False
        self.num_tokens = 0
        self.cached_tokens = self.drafted_tokens = self.accepted_tokens = 0

    def accepted(self) -> None:
        """Starts the choice of a new request. Its last received token may complete a stop string."""
        if self._match_stop():
            self._stream.cut(self.sequence_id, self.num_tokens, self._text.stop or "")

    def arrived(self) -> None:
        """Called when tokens are added to an empty `incoming`: detokenizes them if eager, and notifies the stream.

        The first tokens of a choice are urgent.
        """
        if self._stream.trace is not None:
            self._stream.trace.token()
        if self.eager:
            self._push()
            if self._match_stop():
                self._stream.cut(self.sequence_id, self.num_tokens, self._text.stop or "")
        self._stream.touched(not self._started)

    def prompt_logprobs(self, row: plan_pb2.RowLogprobs) -> None:
        """Takes log-probabilities of some prompt tokens, which this choice was the first to compute."""
        self._stream.prompt_logprobs(row)

    def ended(self, end: engine_pb2.End) -> None:
        """Takes the engine's end of the sequence, which may repeat a stop string that was found here."""
        self._push()
        if self._waiting is not None:
            if end.reason in _WHOLE:
                self._stream.cursor_missed(self.index, self._cursor, len(self._waiting))
                return
            self._cut_short(end, self._waiting)
        self._match_stop()
        self._end(end)
        if self._stream.trace is not None:
            self._stream.trace.choice_ended(end, self.num_tokens)
        self._stream.choice_ended()

    def replay(self, record: engine_pb2.ChoiceRecord, tokens: list[int], cursor: int) -> None:
        """Resumes a sequence from its `tokens` without received ones; the client has the first `cursor` of them.

        If there are fewer than `cursor` (a new engine computes them again), the choice delivers nothing until it
        reaches the cursor; if it ends early, that end is passed on. Raises ValueError if a complete choice has fewer.
        """
        if self.logprobs is not None:
            self.logprobs.leave_out = cursor
            self.logprobs.extend(record.logprobs)
        if len(tokens) < cursor and record.end.reason not in _WHOLE:
            self._cursor, self._waiting = cursor, tokens
            if record.HasField("end"):
                self._cut_short(record.end, tokens)
                self._end(record.end)
            return
        self._text.resume(tokens, cursor)
        if self._match_stop() and not record.HasField("end"):
            self._stream.cut(self.sequence_id, self.num_tokens, self._text.stop or "")
        if record.HasField("end"):
            self._end(record.end)

    def _cut_short(self, end: engine_pb2.End, tokens: list[int]) -> None:
        """Adjusts the end of a choice that ended with these `tokens`, before it reached the client's cursor."""
        end.num_tokens += self._cursor - len(tokens)
        self._waiting = None

    def take_piece(self) -> Piece | None:
        """Removes and returns the decided tokens that are not delivered yet, None if there are none."""
        if self.incoming:
            self._push()
        piece = self._text.take_piece()
        if piece is not None:
            self._started = True
        return piece

    def take_finish(self) -> inference_pb2.Finish:
        """Returns the finish. Call it once, while `finish_pending`, after `take_piece`."""
        if self._finish is None:
            raise RuntimeError("the choice has not finished")
        self.finish_pending = False
        return self._finish

    def _push(self) -> None:
        if self._waiting is not None:
            self._waiting += self.incoming
            if len(self._waiting) >= self._cursor:
                self._text.resume(self._waiting, self._cursor)
                self._waiting = None
            self.incoming.clear()
        elif self.incoming:
            if self._finish is None:
                self._text.push(self.incoming)
            self.incoming.clear()

    def _match_stop(self) -> bool:
        """Returns whether a stop string was found since the last call; the choice is then finished."""
        if self._text.stop is None or self._finish is not None:
            return False
        finish = inference_pb2.Finish(reason=inference_pb2.FINISH_REASON_STOP, stop_string=self._text.stop)
        self._finished(finish, self._text.num_tokens)
        return True

    def _end(self, end: engine_pb2.End) -> None:
        self.has_ended = True
        self.cached_tokens, self.drafted_tokens = end.cached_tokens, end.drafted_tokens
        if self._finish is None:
            self._text.finish()
            self._finished(_finish_of(end), end.num_tokens)
        # A stop string that was found here may have cut some of those that the engine counts.
        self.accepted_tokens = min(end.accepted_tokens, self.num_tokens)

    def _finished(self, finish: inference_pb2.Finish, num_tokens: int) -> None:
        finish.index = self.index
        finish.num_tokens = num_tokens
        self.num_tokens = num_tokens
        self._finish = finish
        self.finish_pending = True


def _finish_of(end: engine_pb2.End) -> inference_pb2.Finish:
    finish = inference_pb2.Finish(reason=end.reason, message=end.message)  # type: ignore[arg-type]
    if end.stop_string:
        finish.stop_string = end.stop_string
    elif end.HasField("stop_token_id"):
        finish.stop_token_id = end.stop_token_id
    return finish
