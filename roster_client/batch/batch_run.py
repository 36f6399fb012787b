"""Answers the lines of an input file that the output file does not have yet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from roster_client.batch.answers import REASONS, answer_body
from roster_client.batch.bodies import Asked, asked
from roster_client.batch.fields import BadField
from roster_client.batch.input_file import BrokenLine, Line, read_lines
from roster_client.batch.output_file import OutputFile
from roster_client.batch.records import (
    BAD_REQUEST,
    NOT_FOUND,
    SERVER_ERROR,
    TIMEOUT,
    Record,
    answered,
    error_message,
    refused,
)
from roster_client.batch.token_texts import TokenTexts
from roster_client.client.async_client import RosterClient
from roster_client.client.errors import (
    DeadlineError,
    InvalidRequestError,
    NotSupportedError,
    OverloadedError,
    RosterError,
    UnavailableError,
)
from roster_client.client.events import FinishReason
from roster_client.offline.bulk_client import BulkClient
from roster_client.offline.progress import BulkProgress

UPDATE_S = 0.25

FIELDS = {
    "chat": "messages",
    "constraint": "response_format",
    "json_schema": "response_format",
    "grammar": "ebnf",
    "messages": "messages",
    "prompt": "prompt",
    "strings": "stop",
    "text": "prompt",
    "token_ids": "prompt",
}
"""OpenAI's names of fields of `roster.v1`, where they differ."""


@dataclass(slots=True)
class Tally:
    """What a run has done so far."""

    answered: int = 0
    failed: int = 0
    first_error: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def written(self) -> int:
        """Number of records written."""
        return self.answered + self.failed

    def note(self, record: Record) -> None:
        """Counts a record that was written."""
        message = error_message(record)
        if message is None:
            self.answered += 1
            usage = record["response"]["body"]["usage"]
            self.prompt_tokens += usage["prompt_tokens"]
            self.output_tokens += usage["completion_tokens"]
        else:
            self.failed += 1
            self.first_error = self.first_error or message


class BatchRun:
    """One run over a file, against one server. A line's record is written when it is complete, in any order."""

    def __init__(
        self,
        client: RosterClient,
        output: OutputFile,
        tally: Tally,
        names: Sequence[str],
        any_model: bool,
        concurrency: int,
    ) -> None:
        """`names`: of the served model; the first is that of the answers. `any_model`: lines may name others."""
        self._tally = tally
        self._client = client
        self._output = output
        self._names = names
        self._any_model = any_model
        self._concurrency = concurrency
        self._texts = TokenTexts(client)

    async def run(self, path: Path, total: int, left: int) -> None:
        """Answers every line that has no record yet: `left` of the file's `total`.

        Raises UnavailableError if the server is gone for long, and OSError if the output can't be written.
        """
        before = total - left
        lines = (line for line in read_lines(path) if not self._output.has(line))
        async with BulkClient(self._client, most=self._concurrency) as bulk:
            with BulkProgress(total, before) as progress:
                count = min(self._concurrency, left)
                workers = [asyncio.create_task(self._work(lines, bulk)) for _ in range(count)]
                try:
                    await self._watch(workers, bulk, progress, before)
                finally:
                    for worker in workers:
                        worker.cancel()
                    await asyncio.gather(*workers, return_exceptions=True)

    async def _watch(
        self, workers: list[asyncio.Task[None]], bulk: BulkClient, progress: BulkProgress, before: int
    ) -> None:
        """Waits for all workers, and raises the first exception of one."""
        pending = set(workers)
        while pending:
            done, pending = await asyncio.wait(pending, timeout=UPDATE_S, return_when=asyncio.FIRST_EXCEPTION)
            for worker in done:
                worker.result()
            progress.update(before + self._tally.written, bulk.tokens_received)

    async def _work(self, lines: Iterator[Line | BrokenLine], bulk: BulkClient) -> None:
        for line in lines:
            record = line.record if isinstance(line, BrokenLine) else await self._record(line, bulk)
            self._output.write(record)
            self._tally.note(record)

    async def _record(self, line: Line, bulk: BulkClient) -> Record:
        """Returns the record of a request. Raises RosterError for a failure that is not the request's."""
        try:
            question = asked(line.url, line.body)
        except BadField as error:
            return refused(line.custom_id, BAD_REQUEST, str(error), error.param)
        if question.model is not None and question.model not in self._names and not self._any_model:
            message = f"the model {question.model!r} does not exist; this server has {self._names[0]!r}"
            return refused(line.custom_id, NOT_FOUND, message, "model", "model_not_found")
        try:
            completions = await bulk.ask_all(question.requests)
        except (UnavailableError, OverloadedError):
            raise
        except RosterError as error:
            return _refusal(line.custom_id, error, question)
        for completion in completions:
            for choice in completion.choices:
                if choice.finish is None or choice.finish.reason not in REASONS:
                    reason = choice.finish.reason if choice.finish is not None else FinishReason.ERROR
                    message = choice.finish.message if choice.finish is not None else ""
                    status = TIMEOUT if reason is FinishReason.DEADLINE else SERVER_ERROR
                    return refused(line.custom_id, status, message or f"ended: {reason.name.lower()}")
        body = await answer_body(line.url, self._names[0], question, completions, self._texts)
        return answered(line.custom_id, completions[0].request_id, body)


def _refusal(custom_id: str, error: RosterError, question: Asked) -> Record:
    if isinstance(error, DeadlineError):
        status = TIMEOUT
    else:
        status = BAD_REQUEST if isinstance(error, InvalidRequestError | NotSupportedError) else SERVER_ERROR
    param = None
    if error.violations:
        name = error.violations[0].field.partition("[")[0].rpartition(".")[2]
        fields = {**FIELDS, "max_tokens": question.tokens_field, "include_stop_string": "include_stop_str_in_output"}
        param = fields.get(name, name)
    return refused(custom_id, status, str(error), param)
