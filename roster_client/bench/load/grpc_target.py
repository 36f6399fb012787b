"""Roster's gRPC API under load: many requests over a set of Session streams per tenant, or one call per request."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Iterator
from contextlib import AsyncExitStack
from enum import Enum
from types import TracebackType
from typing import Self

from roster_client.bench.load.target import Answer, RequestFailed, Take, status_of
from roster_client.bench.load.token_session import ENDINGS, TokenSession, answer_of
from roster_client.bench.load.workload import LoadRequest
from roster_client.client.async_client import EventStream, RosterClient
from roster_client.client.credentials import IN_THE_CLEAR, Credentials
from roster_client.client.errors import RosterError
from roster_client.client.events import Delta, Finish, Usage
from roster_client.client.requests import call_metadata
from roster_protos import inference_pb2 as pb
from roster_protos import inference_pb2_grpc


class Calls(Enum):
    """The calls that carry requests."""

    SESSION = "session"
    """Many requests per stream, read with little work per token."""
    GENERATE = "generate"
    """One call per request through the typed client, which measures what its users see."""


class GrpcTarget:
    """A Roster server. Broken connections are not resumed but counted as failures."""

    def __init__(
        self,
        address: str,
        *,
        calls: Calls = Calls.SESSION,
        sessions: int = 1,
        ignore_eos: bool = True,
        speculate: bool | None = None,
        credentials: Credentials = IN_THE_CLEAR,
    ) -> None:
        """`sessions`: number of streams per tenant, used in turn by new requests. `speculate`: whether the server may
        draft tokens; None: its default."""
        self._address = address
        self._calls = calls
        self._num_sessions = sessions
        self._ignore_eos = ignore_eos
        self._speculate = speculate
        self._credentials = credentials
        self._clients: dict[str, RosterClient] = {}
        self._sessions: dict[str, Iterator[TokenSession]] = {}
        self._open = AsyncExitStack()

    @property
    def url(self) -> str:
        """Address and kind of calls."""
        return f"grpc://{self._address} ({self._calls.value})"

    async def model(self) -> pb.GetModelResponse:
        """Returns the served model. Raises UnavailableError if there is none."""
        return await (await self._client("")).get_model(deadline_s=30)

    def prepare(self, request: LoadRequest) -> tuple[str, pb.GenerateRequest]:
        """Returns (tenant, message): greedy, of exactly the wanted length unless the model may stop."""
        message = pb.GenerateRequest(request_id=request.request_id, priority=request.priority)
        if isinstance(request.prompt, str):
            message.prompt.text = request.prompt
        else:
            message.prompt.token_ids.ids.extend(request.prompt.tolist())
        message.sampling.temperature = 0.0
        message.stop.max_tokens = request.output_tokens
        message.stop.ignore_eos = self._ignore_eos
        if self._speculate is not None:
            message.speculate = self._speculate
        if request.ttft_target_s is not None:
            message.ttft_target_ms = round(request.ttft_target_s * 1000)
        if request.itl_target_s is not None:
            message.itl_target_ms = round(request.itl_target_s * 1000)
        return request.tenant, message

    async def serve(self, prepared: tuple[str, pb.GenerateRequest], take: Take) -> Answer:
        """Sends the message and reads its stream to the end. Raises RequestFailed."""
        tenant, message = prepared
        if self._calls is Calls.SESSION:
            return await next(await self._tenant_sessions(tenant)).serve(message, take)
        stream = (await self._client(tenant)).send(message)
        try:
            return await _read(stream, take)
        except RosterError as error:
            raise RequestFailed(status_of(error), str(error)) from None
        except asyncio.CancelledError:
            stream.cancel()  # abandoned: the server must not continue
            raise

    async def _tenant_sessions(self, tenant: str) -> Iterator[TokenSession]:
        if tenant not in self._sessions:
            stub = inference_pb2_grpc.InferenceServiceStub((await self._client(tenant)).channel)  # type: ignore[no-untyped-call]
            metadata = call_metadata(tenant) + self._credentials.metadata
            call = functools.partial(stub.Session, metadata=metadata)
            opened = [await self._open.enter_async_context(TokenSession(call)) for _ in range(self._num_sessions)]
            self._sessions[tenant] = itertools.cycle(opened)
        return self._sessions[tenant]

    async def _client(self, tenant: str) -> RosterClient:
        if tenant not in self._clients:
            client = RosterClient(self._address, tenant=tenant, credentials=self._credentials, reconnect_s=0)
            self._clients[tenant] = await self._open.enter_async_context(client)
        return self._clients[tenant]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()
        self._clients.clear()
        self._sessions.clear()


async def _read(stream: EventStream, take: Take) -> Answer:
    answer = Answer(0, 0)
    async for event in stream:
        if isinstance(event, Delta):
            take(len(event.token_ids))
        elif isinstance(event, Finish) and event.reason in ENDINGS:
            raise RequestFailed(ENDINGS[event.reason], event.message or f"ended: {event.reason.name.lower()}")
        elif isinstance(event, Usage):
            answer = answer_of(event)
    return answer
