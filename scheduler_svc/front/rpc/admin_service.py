"""The operators' API: the engine's status, policies and steps, and drain."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

import grpc

from roster_protos import admin_pb2, admin_pb2_grpc, engine_pb2
from scheduler_svc.front.base.refusal import Refusal, abort, invalid
from scheduler_svc.front.base.service_refusals import engine_lost
from scheduler_svc.front.rpc.roster_looks import LEAST_APART_S, RosterLooks
from scheduler_svc.front.stream.engine_client import EngineClient
from scheduler_svc.reports.completed_steps import CompletedSteps

DRAIN_POLL_S = 0.5
"""Interval between two progress messages of a drain."""

DEFAULT_INTERVAL_MS = 500
"""Default interval between two messages of WatchRoster."""

STEPS_KEPT = 1024
"""Maximum number of steps that are queued for a slow reader; then the oldest are dropped."""


class _Watcher:
    """Steps that one WatchSteps call has not sent yet. `done`: it gets steps when they are done, with their times."""

    def __init__(self, done: bool) -> None:
        self.done = done
        self.steps: deque[admin_pb2.WatchStepsResponse] = deque(maxlen=STEPS_KEPT)
        self.filled = asyncio.Event()


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Implements `roster.admin.v1.AdminService` with the engine's answers."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._watchers: set[_Watcher] = set()
        self._completed = CompletedSteps()
        self._looks = RosterLooks(client)
        self._lost = False
        self._gone = asyncio.Event()
        self._drained: engine_pb2.Drained | None = None

    def publish(self, report: admin_pb2.WatchStepsResponse) -> None:
        """Passes a step that was sent to the watchers."""
        self._completed.sent(report)
        self._tell(report, done=False)

    def publish_done(self, step: engine_pb2.StepDone) -> None:
        """Passes a step whose result has arrived to the watchers of done steps."""
        report = self._completed.done(step)
        if report is not None:
            self._tell(report, done=True)

    def _tell(self, report: admin_pb2.WatchStepsResponse, *, done: bool) -> None:
        for watcher in self._watchers:
            if watcher.done is done:
                watcher.steps.append(report)
                watcher.filled.set()

    def lose(self) -> None:
        """Ends every watch with UNAVAILABLE, as the engine is gone."""
        self._lost = True
        self._gone.set()
        for watcher in self._watchers:
            watcher.filled.set()

    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.GetStatusResponse:
        """Returns the current state of the engine."""
        handle = self._client.new_handle()
        command = engine_pb2.Command(status_query=engine_pb2.StatusQuery(handle=handle))
        return (await self._ask(handle, command, context)).status_reply.status

    async def ListPolicies(
        self, request: admin_pb2.ListPoliciesRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListPoliciesResponse:
        """Returns the policies that the engine can apply."""
        handle = self._client.new_handle()
        command = engine_pb2.Command(policies_query=engine_pb2.PoliciesQuery(handle=handle))
        return (await self._ask(handle, command, context)).policies_reply.policies

    async def SetPolicy(
        self, request: admin_pb2.SetPolicyRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.SetPolicyResponse:
        """Changes the policy and returns once it is in force."""
        handle = self._client.new_handle()
        command = engine_pb2.Command(policy_change=engine_pb2.PolicyChange(handle=handle, policy=request))
        return (await self._ask(handle, command, context)).policy_changed.change

    async def _ask(
        self, handle: int, command: engine_pb2.Command, context: grpc.aio.ServicerContext
    ) -> engine_pb2.FromEngine:
        """Returns the engine's answer to `command`, which carries `handle`. Aborts the call on a refusal."""
        try:
            return await self._client.call(handle, command)
        except Refusal as refusal:
            await abort(context, refusal)

    async def WatchSteps(self, request: admin_pb2.WatchStepsRequest, context: grpc.aio.ServicerContext) -> None:
        """Streams steps from now on. The engine reports steps only while there is a watcher."""
        watcher = _Watcher(request.done)
        self._watchers.add(watcher)
        if len(self._watchers) == 1:
            self._watch(True)
        try:
            await context.send_initial_metadata(())  # shows the client that the watch has begun
            while not self._lost:
                await watcher.filled.wait()
                watcher.filled.clear()
                while watcher.steps:
                    await context.write(watcher.steps.popleft())
            await abort(context, engine_lost())
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._watch(False)

    async def WatchRoster(self, request: admin_pb2.WatchRosterRequest, context: grpc.aio.ServicerContext) -> None:
        """Streams the roster at an interval until the client disconnects or the engine exits."""
        interval_s = (request.interval_ms or DEFAULT_INTERVAL_MS) / 1000
        if interval_s < LEAST_APART_S:
            await abort(context, invalid("interval_ms", f"it is {request.interval_ms}; set it to at least 100"))
        try:
            while not self._gone.is_set():
                await context.write(await self._looks.look())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._gone.wait(), interval_s)
        except Refusal as refusal:
            await abort(context, refusal)
        await abort(context, engine_lost())

    def drained(self, message: engine_pb2.Drained) -> None:
        """Takes the engine's last message, which ends every Drain call."""
        self._drained = message
        self._gone.set()

    async def Drain(self, request: admin_pb2.DrainRequest, context: grpc.aio.ServicerContext) -> None:
        """Begins a drain or shortens one, and streams its progress until the engine exits."""
        timeout_ms = request.timeout_ms if request.HasField("timeout_ms") else None
        try:
            while not self._gone.is_set():
                await context.write(await self._drain(timeout_ms))
                timeout_ms = None
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._gone.wait(), DRAIN_POLL_S)
        except Refusal as refusal:
            if not self._gone.is_set():
                await abort(context, refusal)
        if self._drained is None:
            await abort(context, engine_lost())
        await context.write(admin_pb2.DrainResponse(done=True, ended_early=self._drained.ended_early))

    async def _drain(self, timeout_ms: int | None) -> admin_pb2.DrainResponse:
        handle = self._client.new_handle()
        drain = engine_pb2.Drain(handle=handle, timeout_ms=timeout_ms)
        answer = await self._client.call(handle, engine_pb2.Command(drain=drain))
        return answer.drain_progress.progress

    def _watch(self, on: bool) -> None:
        self._client.send(engine_pb2.Command(watch=engine_pb2.Watch(on=on)))
