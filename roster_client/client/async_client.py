"""The asyncio client: typed events over `roster.v1.InferenceService`.

    async with RosterClient("127.0.0.1:50061") as client:
        async for event in client.generate("Once upon a time", max_tokens=64):
            ...

`sync_client.py` has the same API for code without an event loop, except sessions. Both raise the exceptions of
`errors.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from roster_client.client.credentials import IN_THE_CLEAR, Credentials
from roster_client.client.errors import RequestCancelledError, RosterError, from_rpc_error
from roster_client.client.events import AssembledStream, Assembler, Completion, Event
from roster_client.client.requests import AnyMessage, Options, Prompt, build_prompt, build_request, call_metadata
from roster_client.client.resumption import RECONNECT_S, Caller, Resumption, Retry, repeatable, response_of
from roster_client.client.session import Session
from roster_client.client.trace_context import metadata_source
from roster_protos import inference_pb2 as pb
from roster_protos import inference_pb2_grpc


class EventStream(AssembledStream):
    """The events of one request, in order: iterate over it, or await `completion()`.

    The stream resumes after a broken connection (see `resumption.py`). `cancel()` or the end of an `async with` closes
    the stream, which cancels an unfinished request on the server unless it was sent with on_disconnect=KEEP.
    """

    def __init__(self, call: Any, assembler: Assembler, resumption: Resumption, caller: Caller) -> None:
        """`caller` makes the call that `resumption` returns after the connection broke."""
        super().__init__(assembler)
        self._call = call
        self._former: Any = None
        self._resumption = resumption
        self._caller = caller
        self._pending: Iterator[Event] = iter(())
        self._messages = call.__aiter__()
        self._cut = False
        self._ended = False

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while True:
            event = next(self._pending, None)
            if event is not None:
                return event
            if self._ended:
                raise StopAsyncIteration
            try:
                message = await self._messages.__anext__()
            except grpc.RpcError as error:
                await self._after(from_rpc_error(error))
                continue
            except asyncio.CancelledError:
                if not self._cut:
                    raise
                # grpc.aio reports the stream's own cancel() as a cancellation of the task.
                raise RequestCancelledError(grpc.StatusCode.CANCELLED, "the stream was closed by cancel()") from None
            if self._resumption.attach_when_accepted:
                self._former = self._call  # it ends when the new call has attached
                await self._resume(self._resumption.accepted())
                continue
            self._resumption.progress()
            self._pending = self._assembler.events(response_of(message))

    async def _after(self, error: RosterError) -> None:
        """Ends the stream if its deadline passed, otherwise resumes it or raises the error."""
        last = self._resumption.cut_by_deadline(error)
        if last is None:
            await self._resume(self._resumption.after(error))
        else:
            self._pending, self._ended = last, True

    async def _resume(self, retry: Retry) -> None:
        await asyncio.sleep(retry.pause_s)
        self._call = self._caller.reopen(retry.call, self._resumption)
        self._messages = self._call.__aiter__()

    async def completion(self) -> Completion:
        """Reads the stream to its end and returns the whole answer."""
        async for _ in self:
            pass
        return self._assembler.completion

    def cancel(self) -> None:
        """Closes the stream; has no effect if it has ended."""
        self._cut = True
        self._call.cancel()
        if self._former is not None:
            self._former.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class RosterClient:
    """One channel to one server, for one tenant. Safe to share between the tasks of one event loop.

    `deadline_s` of a call is in seconds and covers the whole call; None: no deadline. A stream that has begun
    then ends with the partial answer, and its open choices with reason DEADLINE. Other calls raise DeadlineError.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:50061",
        *,
        tenant: str = "",
        credentials: Credentials = IN_THE_CLEAR,
        reconnect_s: float = RECONNECT_S,
        trace: bool = False,
    ) -> None:
        """`tenant` may be empty if the token implies it. `trace`: calls carry OpenTelemetry's current context.

        `reconnect_s`: seconds for which a stream tries to resume after its connection broke; 0: it does not.
        """
        self._reconnect_s = reconnect_s
        self._metadata = metadata_source(call_metadata(tenant) + credentials.metadata, trace)
        self._channel = credentials.aio_channel(target)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._caller = Caller(self._stub, self._metadata)

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel, for other services of the server (health, reflection)."""
        return self._channel

    def generate(
        self, prompt: Prompt, *, raw: bool = False, deadline_s: float | None = None, **options: Unpack[Options]
    ) -> EventStream:
        """Streams the answer to a prompt: text, token ids or messages. Options: those of `requests.Options`.

        Text is a user's message, rendered with the model's chat template if it has one. `raw`: the model continues the
        text instead.
        """
        return self.send(build_request(prompt, options, raw=raw), deadline_s=deadline_s)

    def chat(
        self, messages: Sequence[AnyMessage], *, deadline_s: float | None = None, **options: Unpack[Options]
    ) -> EventStream:
        """Streams the next message of a conversation."""
        return self.generate(messages, deadline_s=deadline_s, **options)

    def send(self, request: pb.GenerateRequest, *, deadline_s: float | None = None) -> EventStream:
        """Streams the answer to a request message."""
        request = repeatable(request)
        call = self._caller.generate(request, deadline_s)
        return self._stream(call, Assembler((len(request.received_token_ids),)), request, deadline_s)

    def attach(self, request_id: str, received: Sequence[int] = (), *, deadline_s: float | None = None) -> EventStream:
        """Resumes a request's stream.

        `received`: how many tokens of each choice the caller already has (`EventStream.received`).
        """
        request = pb.AttachRequest(request_id=request_id, received=received)
        call = self._caller.attach(request, deadline_s)
        return self._stream(call, Assembler(tuple(received)), None, deadline_s)

    def _stream(
        self, call: Any, assembler: Assembler, request: pb.GenerateRequest | None, deadline_s: float | None
    ) -> EventStream:
        resumption = Resumption(assembler, request, deadline_s=deadline_s, patience_s=self._reconnect_s)
        return EventStream(call, assembler, resumption, self._caller)

    def session(self) -> Session:
        """Returns one stream for many requests; use it in an `async with`."""
        return Session(self.session_call, self._reconnect_s)

    def session_call(self, actions: AsyncIterator[pb.SessionRequest]) -> Any:
        """Makes a Session call, for code that reads its messages itself."""
        return self._stub.Session(actions, metadata=self._metadata())

    async def cancel(self, request_id: str, *, deadline_s: float | None = None) -> None:
        """Cancels a request, waiting or running. Raises NotFoundError if the tenant has no such request."""
        await self._unary(self._stub.Cancel, pb.CancelRequest(request_id=request_id), deadline_s)

    async def forget(self, conversation_id: str, *, deadline_s: float | None = None) -> int:
        """Removes what the server's prefix cache keeps of a conversation; returns the number of tokens."""
        request = pb.ForgetConversationRequest(conversation_id=conversation_id)
        return int((await self._unary(self._stub.ForgetConversation, request, deadline_s)).tokens)

    async def get_model(self, *, deadline_s: float | None = None) -> pb.GetModelResponse:
        """Returns the served model. Raises UnavailableError while there is no runner."""
        return await self._unary(self._stub.GetModel, pb.GetModelRequest(), deadline_s)

    async def tokenize(self, prompt: Prompt, *, raw: bool = True, deadline_s: float | None = None) -> list[int]:
        """Returns the prompt's token ids. Text is not rendered, unless `raw` is False, as by default in `generate`."""
        request = pb.TokenizeRequest(prompt=build_prompt(prompt, raw=raw))
        return list((await self._unary(self._stub.Tokenize, request, deadline_s)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None, deadline_s: float | None = None
    ) -> str:
        """Returns the text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return (await self._unary(self._stub.Detokenize, request, deadline_s)).text

    async def close(self) -> None:
        """Closes the channel and its streams."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _unary(self, method: Any, request: Any, deadline_s: float | None) -> Any:
        try:
            return await method(request, timeout=deadline_s, metadata=self._metadata())
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
