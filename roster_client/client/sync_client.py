"""The blocking client, with the methods of `async_client.py` except sessions.

    with SyncRosterClient("127.0.0.1:50061") as client:
        for event in client.generate("Once upon a time", max_tokens=64):
            ...

Both clients share the requests, events and errors of this package.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from roster_client.client.credentials import IN_THE_CLEAR, Credentials
from roster_client.client.errors import RosterError, from_rpc_error
from roster_client.client.events import AssembledStream, Assembler, Completion, Event
from roster_client.client.requests import AnyMessage, Options, Prompt, build_prompt, build_request, call_metadata
from roster_client.client.resumption import RECONNECT_S, Caller, Resumption, Retry, repeatable, response_of
from roster_client.client.trace_context import metadata_source
from roster_protos import inference_pb2 as pb
from roster_protos import inference_pb2_grpc


class SyncEventStream(AssembledStream):
    """The events of one request, in order: iterate over it, or call `completion()`. As `async_client.EventStream`."""

    def __init__(self, call: Any, assembler: Assembler, resumption: Resumption, caller: Caller) -> None:
        super().__init__(assembler)
        self._call = call
        self._former: Any = None
        self._cut = False
        self._ended = False
        self._resumption = resumption
        self._caller = caller
        self._pending: Iterator[Event] = iter(())

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        while True:
            event = next(self._pending, None)
            if event is not None:
                return event
            if self._ended:
                raise StopIteration
            try:
                message = next(self._call)
            except grpc.RpcError as error:
                if self._cut:
                    raise from_rpc_error(error) from None
                self._after(from_rpc_error(error))
                continue
            if self._resumption.attach_when_accepted:
                self._former = self._call  # it ends when the new call has attached
                self._resume(self._resumption.accepted())
                continue
            self._resumption.progress()
            self._pending = self._assembler.events(response_of(message))

    def _after(self, error: RosterError) -> None:
        """Ends the stream if its deadline passed, otherwise resumes it or raises the error."""
        last = self._resumption.cut_by_deadline(error)
        if last is None:
            self._resume(self._resumption.after(error))
        else:
            self._pending, self._ended = last, True

    def _resume(self, retry: Retry) -> None:
        time.sleep(retry.pause_s)
        self._call = self._caller.reopen(retry.call, self._resumption)

    def completion(self) -> Completion:
        """Reads the stream to its end and returns the whole answer."""
        for _ in self:
            pass
        return self._assembler.completion

    def cancel(self) -> None:
        """Closes the stream; has no effect if it has ended."""
        self._cut = True
        self._call.cancel()
        if self._former is not None:
            self._former.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class SyncRosterClient:
    """One channel to one server, for one tenant. Safe to share between threads.

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
        """`tenant` may be empty if the token implies it. `reconnect_s` and `trace` as those of `RosterClient`."""
        self._reconnect_s = reconnect_s
        self._metadata = metadata_source(call_metadata(tenant) + credentials.metadata, trace)
        self._channel = credentials.channel(target)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._caller = Caller(self._stub, self._metadata)

    @property
    def channel(self) -> grpc.Channel:
        """The channel, for other services of the server (health, reflection)."""
        return self._channel

    def generate(
        self, prompt: Prompt, *, raw: bool = False, deadline_s: float | None = None, **options: Unpack[Options]
    ) -> SyncEventStream:
        """Streams the answer to a prompt: text, token ids or messages. Options: those of `requests.Options`.

        Text is a user's message, rendered with the model's chat template if it has one. `raw`: the model continues the
        text instead.
        """
        return self.send(build_request(prompt, options, raw=raw), deadline_s=deadline_s)

    def chat(
        self, messages: Sequence[AnyMessage], *, deadline_s: float | None = None, **options: Unpack[Options]
    ) -> SyncEventStream:
        """Streams the next message of a conversation."""
        return self.generate(messages, deadline_s=deadline_s, **options)

    def send(self, request: pb.GenerateRequest, *, deadline_s: float | None = None) -> SyncEventStream:
        """Streams the answer to a request message."""
        request = repeatable(request)
        call = self._caller.generate(request, deadline_s)
        return self._stream(call, Assembler((len(request.received_token_ids),)), request, deadline_s)

    def attach(
        self, request_id: str, received: Sequence[int] = (), *, deadline_s: float | None = None
    ) -> SyncEventStream:
        """Resumes a request's stream.

        `received`: how many tokens of each choice the caller already has (`SyncEventStream.received`).
        """
        request = pb.AttachRequest(request_id=request_id, received=received)
        call = self._caller.attach(request, deadline_s)
        return self._stream(call, Assembler(tuple(received)), None, deadline_s)

    def _stream(
        self, call: Any, assembler: Assembler, request: pb.GenerateRequest | None, deadline_s: float | None
    ) -> SyncEventStream:
        resumption = Resumption(assembler, request, deadline_s=deadline_s, patience_s=self._reconnect_s)
        return SyncEventStream(call, assembler, resumption, self._caller)

    def cancel(self, request_id: str, *, deadline_s: float | None = None) -> None:
        """Cancels a request, waiting or running. Raises NotFoundError if the tenant has no such request."""
        self._unary(self._stub.Cancel, pb.CancelRequest(request_id=request_id), deadline_s)

    def forget(self, conversation_id: str, *, deadline_s: float | None = None) -> int:
        """Removes what the server's prefix cache keeps of a conversation; returns the number of tokens."""
        request = pb.ForgetConversationRequest(conversation_id=conversation_id)
        return int((self._unary(self._stub.ForgetConversation, request, deadline_s)).tokens)

    def get_model(self, *, deadline_s: float | None = None) -> pb.GetModelResponse:
        """Returns the served model. Raises UnavailableError while there is no runner."""
        return self._unary(self._stub.GetModel, pb.GetModelRequest(), deadline_s)

    def tokenize(self, prompt: Prompt, *, raw: bool = True, deadline_s: float | None = None) -> list[int]:
        """Returns the prompt's token ids. Text is not rendered, unless `raw` is False, as by default in `generate`."""
        request = pb.TokenizeRequest(prompt=build_prompt(prompt, raw=raw))
        return list(self._unary(self._stub.Tokenize, request, deadline_s).token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None, deadline_s: float | None = None
    ) -> str:
        """Returns the text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return self._unary(self._stub.Detokenize, request, deadline_s).text

    def close(self) -> None:
        """Closes the channel and its streams."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unary(self, method: Any, request: Any, deadline_s: float | None) -> Any:
        try:
            return method(request, timeout=deadline_s, metadata=self._metadata())
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
