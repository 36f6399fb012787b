"""A Session call that collects whole answers.

Requests that fail because it broke are sent again as a whole (`bulk_client.py`).
"""

from __future__ import annotations

import itertools
import time

from roster_client.client.errors import StreamGapError, from_status
from roster_client.client.events import Choice, Completion, Started, finish_of, token_logprobs, usage_of
from roster_client.client.whole_answers import PendingRequest, SessionCall, WholeAnswers
from roster_protos import inference_pb2 as pb


class _Asked(PendingRequest):
    """A request with what has arrived of its answer."""

    def __init__(self, received: int) -> None:
        """`received`: number of tokens of choice 0 that the request brought along."""
        super().__init__()
        self.completion = Completion()
        self._received = received

    def choice(self, index: int) -> Choice:
        choices = self.completion.choices
        while len(choices) <= index:
            choices.append(Choice(len(choices)))
        return choices[index]

    def expected(self, choice: Choice) -> int:
        """Returns the number of tokens after which the choice's next ones begin."""
        return len(choice.token_ids) + (self._received if choice.index == 0 else 0)


class AnswerSession(WholeAnswers[_Asked]):
    """One Session call, used in an `async with`."""

    def __init__(self, call: SessionCall) -> None:
        """`call`: the stub's method, with its metadata."""
        super().__init__(call)
        self.tokens_received = 0
        """Number of tokens of all answers so far, unfinished ones included."""
        self.moved_at = time.monotonic()
        """Time of the last token."""

    async def ask(self, request: pb.GenerateRequest) -> Completion:
        """Sends a request and returns its whole answer. Raises RosterError."""
        completion: Completion = await self._answer(request, _Asked(len(request.received_token_ids)))
        return completion

    def _dispatch(self, response: pb.SessionResponse) -> None:
        # Acceptances and refusals come before the message's rows, finishes and usages after them.
        for event in response.events:
            if event.WhichOneof("event") in ("accepted", "prompt", "refused"):
                self._take_event(event)
        self._take_rows(response)
        for event in response.events:
            if event.WhichOneof("event") in ("finish", "usage"):
                self._take_event(event)

    def _take_rows(self, response: pb.SessionResponse) -> None:
        rows, ids, text = len(response.tags), response.token_ids, response.text
        indexes = response.indexes or itertools.repeat(0, rows)
        counts = response.token_counts or itertools.repeat(1, rows)
        logprobs = {entry.row: entry.logprobs for entry in response.logprobs}
        token = byte = 0
        columns = zip(response.tags, indexes, response.first_indexes, counts, response.text_lengths, strict=True)
        for row, (tag, index, first_index, count, length) in enumerate(columns):
            if asked := self._pending.get(tag):
                choice = asked.choice(index)
                if first_index != (expected := asked.expected(choice)):
                    asked.fail(StreamGapError(index, expected, first_index))
                choice.token_ids += ids[token : token + count]
                choice.text += text[byte : byte + length].decode()
                if row in logprobs:
                    choice.logprobs += token_logprobs(logprobs[row])
            token += count
            byte += length
        if rows:
            self.tokens_received += token
            self.moved_at = time.monotonic()

    def _take_event(self, event: pb.SessionEvent) -> None:
        asked = self._pending.get(event.tag)
        if asked is None:
            return
        completion = asked.completion
        match event.WhichOneof("event"):
            case "accepted":
                completion.request_id = event.accepted
                completion.started = Started(event.accepted)
            case "prompt":
                prompt = event.prompt
                ids, logprobs = tuple(prompt.token_ids), token_logprobs(prompt.logprobs)
                completion.started = Started(completion.request_id, ids, logprobs)
            case "finish":
                asked.choice(event.finish.index).finish = finish_of(event.finish)
            case "usage":
                completion.usage = usage_of(event.usage)
                asked.end(completion)
            case "refused":
                status = event.refused
                asked.fail(from_status(status.code, status.message, status.details))
