"""Collects the columns of one SessionResponse in plain lists, which become a message once per flush."""

from __future__ import annotations

from roster_protos import inference_pb2
from scheduler_svc.front.stream.choice_stream import ChoiceStream
from scheduler_svc.front.text.text_stream import Piece


class SessionColumns:
    """Rows and events of one flush."""

    __slots__ = (
        "_counts",
        "_first_indexes",
        "_indexes",
        "_response",
        "_texts",
        "_token_ids",
        "events",
        "tags",
    )

    def __init__(self) -> None:
        self._response = inference_pb2.SessionResponse()
        self.events = self._response.events
        self.tags: list[int] = []
        self._indexes: list[int] = []
        self._first_indexes: list[int] = []
        self._counts: list[int] = []
        self._token_ids: list[int] = []
        self._texts: list[str] = []

    def add(self, tag: int, choice: ChoiceStream, piece: Piece) -> None:
        """Adds a row of consecutive tokens of one choice."""
        if choice.logprobs is not None:
            logprobs = choice.logprobs.take_rows(len(piece.tokens))
            self._response.logprobs.add(row=len(self.tags), logprobs=logprobs)
        self.tags.append(tag)
        self._indexes.append(choice.index)
        self._first_indexes.append(piece.first_index)
        self._counts.append(len(piece.tokens))
        self._token_ids += piece.tokens
        self._texts.append(piece.text)

    def response(self) -> inference_pb2.SessionResponse | None:
        """Returns the message, or None if there are neither rows nor events."""
        rows = len(self.tags)
        if not rows and not self.events:
            return None
        response = self._response
        response.tags.extend(self.tags)
        response.first_indexes.extend(self._first_indexes)
        response.token_ids.extend(self._token_ids)
        text = "".join(self._texts)
        if text.isascii():
            response.text_lengths.extend(map(len, self._texts))
        else:
            response.text_lengths.extend(len(part.encode()) for part in self._texts)
        response.text = text.encode()
        if any(self._indexes):
            response.indexes.extend(self._indexes)
        if len(self._token_ids) != rows:
            response.token_counts.extend(self._counts)
        return response
