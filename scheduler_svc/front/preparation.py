"""Validates and tokenizes requests where it disturbs nobody.

Small requests are prepared on the event loop; a big prompt goes to a thread (`tokenizers` releases the GIL), so that a
100,000-token prompt does not hold up anybody's stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import Message

from protos import inference_pb2
from scheduler_svc.front.prompt_tokens import check_ids, prompt_tokens
from scheduler_svc.front.served_model import ServedModel
from scheduler_svc.front.tokenizer import ModelText
from scheduler_svc.front.validation import ValidRequest, validate

INLINE_BYTES = 8192
"""Requests up to this size are prepared on the event loop: some milliseconds of tokenizing at most."""

THREADS = 2
"""Threads that prepare big requests."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that may go to the engine, and the text side of the model that it was validated against."""

    valid: ValidRequest
    text: ModelText


class Preparer:
    """Prepares the requests of one worker."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")

    def close(self) -> None:
        """Drops what waits for a thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def is_small(request: Message) -> bool:
        """Whether preparing it on the event loop is hardly noticeable."""
        return request.ByteSize() <= INLINE_BYTES

    def prepare_now(self, request: inference_pb2.GenerateRequest, remaining_s: float | None) -> PreparedRequest:
        """`remaining_s`: seconds until the call's own deadline, None without one. Raises Refusal."""
        text = self._served.text_for_new()
        remaining_ms = None if remaining_s is None else int(remaining_s * 1000)
        return PreparedRequest(validate(request, text, self._served.state.pool_tokens, remaining_ms), text)

    async def prepare(self, request: inference_pb2.GenerateRequest, remaining_s: float | None) -> PreparedRequest:
        """The same, in a thread when the request is big."""
        return await self._run(request, lambda: self.prepare_now(request, remaining_s))

    async def tokenize(self, request: inference_pb2.TokenizeRequest) -> list[int]:
        """Token ids of a prompt. Raises Refusal."""
        text = self._served.text()
        return await self._run(request, lambda: prompt_tokens(request.prompt, text))

    async def detokenize(self, request: inference_pb2.DetokenizeRequest) -> str:
        """Text of token ids. Raises Refusal."""
        text = self._served.text()
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True

        def decode() -> str:
            check_ids(request.token_ids, "token_ids", text.vocab_size)
            return text.decode(request.token_ids, skip)

        return await self._run(request, decode)

    async def _run(self, request: Message, prepare: Callable[[], T]) -> T:
        if self.is_small(request):
            return prepare()
        return await asyncio.get_running_loop().run_in_executor(self._threads, prepare)
