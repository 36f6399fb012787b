"""The client without an event loop: the twin of `client.py`, method for method.

    with SyncRosterClient("127.0.0.1:50061") as client:
        for event in client.generate("Once upon a time", max_tokens=64):
            ...

Both share the requests, events and errors of the modules beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc

from .credentials import IN_THE_CLEAR, Credentials
from .errors import from_rpc_error
from .events import AssembledStream, Assembler, Completion, Event
from .requests import Message, Options, Prompt, build_prompt, build_request, call_metadata


class SyncEventStream(AssembledStream):
    """The events of one request, in order: iterate, or call `completion()`. See `client.EventStream`."""

    def __init__(self, call: Any, assembler: Assembler) -> None:
        super().__init__(assembler)
        self._call = call
        self._pending: Iterator[Event] = iter(())

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        while True:
            event = next(self._pending, None)
            if event is not None:
                return event
            try:
                message = next(self._call)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None
            response = message.response if isinstance(message, pb.AttachResponse) else message
            self._pending = self._assembler.events(response)

    def completion(self) -> Completion:
        """Reads to the end and returns the whole answer."""
        for _ in self:
            pass
        return self._assembler.completion

    def cancel(self) -> None:
        """Cuts the stream; harmless when it has ended."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class SyncRosterClient:
    """One channel to one server, for one tenant. Safe to share between threads.

    `deadline_s` of a call is in seconds and covers it whole; None means no deadline.
    """

    def __init__(
        self, target: str = "127.0.0.1:50061", *, tenant: str = "", credentials: Credentials = IN_THE_CLEAR
    ) -> None:
        """`tenant` may stay empty where a token says it."""
        self._metadata = call_metadata(tenant) + credentials.metadata
        self._channel = credentials.channel(target)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]

    @property
    def channel(self) -> grpc.Channel:
        """The channel, for services beside this one (health, reflection)."""
        return self._channel

    def generate(
        self, prompt: Prompt, *, deadline_s: float | None = None, **options: Unpack[Options]
    ) -> SyncEventStream:
        """Streams the answer to a prompt: text, token ids or messages. Options: see `requests.Options`."""
        return self.send(build_request(prompt, options), deadline_s=deadline_s)

    def chat(
        self, messages: Sequence[Message], *, deadline_s: float | None = None, **options: Unpack[Options]
    ) -> SyncEventStream:
        """Streams the next message of a conversation."""
        return self.generate(messages, deadline_s=deadline_s, **options)

    def send(self, request: pb.GenerateRequest, *, deadline_s: float | None = None) -> SyncEventStream:
        """Streams the answer to a request that is built already."""
        call = self._stub.Generate(request, timeout=deadline_s, metadata=self._metadata)
        return SyncEventStream(call, Assembler((len(request.received_token_ids),)))

    def attach(
        self, request_id: str, received: Sequence[int] = (), *, deadline_s: float | None = None
    ) -> SyncEventStream:
        """Resumes a request's stream after the tokens received of each choice (`SyncEventStream.received`)."""
        request = pb.AttachRequest(request_id=request_id, received=received)
        call = self._stub.Attach(request, timeout=deadline_s, metadata=self._metadata)
        return SyncEventStream(call, Assembler(tuple(received)))

    def cancel(self, request_id: str, *, deadline_s: float | None = None) -> None:
        """Ends a request wherever it is. Raises NotFoundError if the tenant has no such request."""
        self._unary(self._stub.Cancel, pb.CancelRequest(request_id=request_id), deadline_s)

    def get_model(self, *, deadline_s: float | None = None) -> pb.GetModelResponse:
        """The model that is served. Raises UnavailableError until a runner is there."""
        return self._unary(self._stub.GetModel, pb.GetModelRequest(), deadline_s)

    def tokenize(self, prompt: Prompt, *, deadline_s: float | None = None) -> list[int]:
        """The prompt's token ids, exactly as generate would use them."""
        request = pb.TokenizeRequest(prompt=build_prompt(prompt))
        return list(self._unary(self._stub.Tokenize, request, deadline_s).token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None, deadline_s: float | None = None
    ) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return self._unary(self._stub.Detokenize, request, deadline_s).text

    def close(self) -> None:
        """Closes the channel and cuts its streams."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unary(self, method: Any, request: Any, deadline_s: float | None) -> Any:
        try:
            return method(request, timeout=deadline_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
