"""Validates and tokenizes requests where it disturbs nobody.

Small requests are prepared on the event loop; a big prompt goes to a thread (`tokenizers` releases the GIL), so that a
100,000-token prompt does not hold up anybody's stream. So does every chat, whose template is rendered by a process that
has to be waited for. What is under way is bounded: beyond that, big requests are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import Message

from roster_protos import inference_pb2
from scheduler_svc.front.base.service_refusals import too_many_big
from scheduler_svc.front.request.prompt_tokens import check_ids, prompt_tokens
from scheduler_svc.front.request.validation import ValidRequest, validate
from scheduler_svc.front.text.served_model import ServedModel
from scheduler_svc.front.text.tokenizer import ModelText

INLINE_BYTES = 8192
"""Requests up to this size are prepared on the event loop: some milliseconds of tokenizing at most."""

THREADS = 4
"""Threads that prepare big requests and chats."""

MOST_PENDING_BYTES = 64 << 20
"""Requests that are prepared in threads, or wait for one, all together."""

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
        self._pending_bytes = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")

    def close(self) -> None:
        """Drops what waits for a thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def is_quick(request: Message, prompt: inference_pb2.Prompt | None) -> bool:
        """Whether preparing it on the event loop is hardly noticeable."""
        return request.ByteSize() <= INLINE_BYTES and (prompt is None or prompt.WhichOneof("kind") != "chat")

    def prepare_now(self, request: inference_pb2.GenerateRequest, remaining_s: float | None) -> PreparedRequest:
        """`remaining_s`: seconds until the call's own deadline, None without one. Raises Refusal."""
        text = self._served.text_for_new()
        remaining_ms = None if remaining_s is None else int(remaining_s * 1000)
        state = self._served.state
        return PreparedRequest(validate(request, text, state.pool_tokens, remaining_ms, state.usual_tokens), text)

    async def prepare(self, request: inference_pb2.GenerateRequest, remaining_s: float | None) -> PreparedRequest:
        """The same, in a thread when it takes a while."""
        return await self._run(request, request.prompt, lambda: self.prepare_now(request, remaining_s))

    async def tokenize(self, request: inference_pb2.TokenizeRequest) -> list[int]:
        """Token ids of a prompt. Raises Refusal."""
        text = self._served.text()
        return await self._run(request, request.prompt, lambda: prompt_tokens(request.prompt, text))

    async def detokenize(self, request: inference_pb2.DetokenizeRequest) -> str:
        """Text of token ids. Raises Refusal."""
        text = self._served.text()
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True

        def decode() -> str:
            check_ids(request.token_ids, "token_ids", text.vocab_size)
            return text.decode(request.token_ids, skip)

        return await self._run(request, None, decode)

    async def _run(self, request: Message, prompt: inference_pb2.Prompt | None, prepare: Callable[[], T]) -> T:
        if self.is_quick(request, prompt):
            return prepare()
        size = request.ByteSize()
        if self._pending_bytes + size > MOST_PENDING_BYTES:
            raise too_many_big()
        self._pending_bytes += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, prepare)
        finally:
            self._pending_bytes -= size
