"""The asyncio client of the admin API, `roster.admin.v1.AdminService`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from roster_client.client.credentials import IN_THE_CLEAR, Credentials
from roster_client.client.errors import from_rpc_error
from roster_protos import admin_pb2, admin_pb2_grpc


class StepStream:
    """Steps as they are sent to the runners; iterate over it, and call `cancel` to end it."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._messages = call.__aiter__()

    def __aiter__(self) -> AsyncIterator[admin_pb2.WatchStepsResponse]:
        return self

    async def __anext__(self) -> admin_pb2.WatchStepsResponse:
        try:
            return await self._messages.__anext__()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def cancel(self) -> None:
        """Ends the watch."""
        self._call.cancel()


class AdminClient:
    """One channel to a scheduler's admin address."""

    def __init__(self, target: str = "127.0.0.1:50062", *, credentials: Credentials = IN_THE_CLEAR) -> None:
        self._metadata = credentials.metadata
        self._channel = credentials.aio_channel(target)
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def get_status(self, *, deadline_s: float | None = None) -> admin_pb2.GetStatusResponse:
        """Returns the current state of the scheduler and its runners."""
        try:
            return await self._stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=deadline_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def list_policies(self, *, deadline_s: float | None = None) -> admin_pb2.ListPoliciesResponse:
        """Returns the installed policies with their parameters, and the current one."""
        try:
            return await self._stub.ListPolicies(
                admin_pb2.ListPoliciesRequest(), timeout=deadline_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def set_policy(
        self,
        name: str,
        parameters: Mapping[str, object] | None = None,
        *,
        retention: bool = False,
        deadline_s: float | None = None,
    ) -> admin_pb2.SetPolicyResponse:
        """Changes the policy without interrupting streams; parameters not given have their defaults.

        `retention`: changes the policy that decides what the prefix cache keeps (`lru` or `session`), instead of the
        scheduling policy.

        Raises NotFoundError if the policy is not installed, InvalidRequestError for parameters that it does not accept.
        """
        request = admin_pb2.SetPolicyRequest(
            name=name, parameters=json.dumps(dict(parameters or {})), retention=retention
        )
        try:
            return await self._stub.SetPolicy(request, timeout=deadline_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def watch_steps(self, *, done: bool = False) -> StepStream:
        """Watches each step's roster; the watch has begun when this returns.

        `done`: reports each step when its result arrives, with its times, instead of when it is sent.
        """
        call = self._stub.WatchSteps(admin_pb2.WatchStepsRequest(done=done), metadata=self._metadata)
        try:
            await call.initial_metadata()
            if call.done():
                # Refused before it began: reading raises the status.
                await call.read()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return StepStream(call)

    async def watch_roster(self, interval_s: float = 0.5) -> AsyncIterator[admin_pb2.WatchRosterResponse]:
        """Yields running sequences, queue and latencies every `interval_s` (at least 0.1) until the server ends."""
        request = admin_pb2.WatchRosterRequest(interval_ms=round(interval_s * 1000))
        try:
            async for answer in self._stub.WatchRoster(request, metadata=self._metadata):
                yield answer
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def drain(self, timeout_s: float | None = None) -> AsyncIterator[admin_pb2.DrainResponse]:
        """Drains and ends the scheduler; yields its progress, with `done` set in the last message.

        `timeout_s`: seconds that running requests get, by default the server's `drain_s`.
        """
        request = admin_pb2.DrainRequest(timeout_ms=None if timeout_s is None else round(timeout_s * 1000))
        try:
            async for answer in self._stub.Drain(request, metadata=self._metadata):
                yield answer
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
