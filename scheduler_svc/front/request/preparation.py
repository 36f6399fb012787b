"""Validates and tokenizes requests without blocking other streams.

Small requests are prepared on the event loop. A big request is prepared in a thread (`tokenizers` releases the GIL), so
that a 100,000-token prompt does not delay other streams. Every chat is prepared in a thread as well, as rendering its
template waits for another process. The bytes being prepared are bounded; beyond the bound, big requests are refused.
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
"""Requests up to this size are prepared on the event loop: a few milliseconds of tokenizing at most."""

THREADS = 4
"""Threads that prepare big requests and chats."""

MOST_PENDING_BYTES = 64 << 20
"""Maximum number of bytes of all requests that are prepared in threads or wait for a thread."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A valid request, and the text of the model that it was validated against."""

    valid: ValidRequest
    text: ModelText


class Preparer:
    """Prepares the requests of one worker."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._pending_bytes = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")

    def close(self) -> None:
        """Drops the requests that wait for a thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def is_quick(request: Message, prompt: inference_pb2.Prompt | None) -> bool:
        """Returns whether the request can be prepared on the event loop without a noticeable delay."""
        is_rendered = prompt is not None and prompt.WhichOneof("kind") in ("chat", "user_message")
        return request.ByteSize() <= INLINE_BYTES and not is_rendered

    def prepare_now(self, request: inference_pb2.GenerateRequest, remaining_s: float | None) -> PreparedRequest:
        """Prepares a request in the caller's thread. Raises Refusal.

        `remaining_s`: seconds until the deadline of the call, None if it has none.
        """
        text = self._served.text_for_new()
        remaining_ms = None if remaining_s is None else int(remaining_s * 1000)
        state = self._served.state
        return PreparedRequest(validate(request, text, state.pool_tokens, remaining_ms, state.usual_tokens), text)

    async def prepare(self, request: inference_pb2.GenerateRequest, remaining_s: float | None) -> PreparedRequest:
        """Prepares a request as `prepare_now` does, in a thread unless it is quick. Raises Refusal."""
        return await self._run(request, request.prompt, lambda: self.prepare_now(request, remaining_s))

    async def tokenize(self, request: inference_pb2.TokenizeRequest) -> list[int]:
        """Returns the token ids of a prompt. Raises Refusal."""
        text = self._served.text()
        return await self._run(request, request.prompt, lambda: prompt_tokens(request.prompt, text))

    async def detokenize(self, request: inference_pb2.DetokenizeRequest) -> str:
        """Returns the text of token ids. Raises Refusal."""
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
