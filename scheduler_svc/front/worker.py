"""A front worker: the gRPC servers of one process. Without worker processes, they run in the engine's process.

`roster-scheduler` spawns each worker as a process (see worker_process) and writes its settings to its stdin (see
worker_start). The worker sends WorkerHello to the engine once it listens. It runs until the other end of that pipe is
closed, which also happens when the engine's process dies: its streams then end with UNAVAILABLE and it exits. It
ignores SIGINT and SIGTERM, which reach a whole process group: the engine decides whether to drain.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from typing import TYPE_CHECKING

import grpc
import structlog
import uvloop
from grpc_health.v1 import health_pb2_grpc

from roster_common.logs import configure_logs
from roster_common.setting_sources import FILE_VARIABLE
from roster_common.std_streams import forgive_output
from roster_common.usable_cores import usable_cores
from roster_protos import admin_pb2_grpc, engine_pb2, inference_pb2_grpc
from scheduler_svc.front.auth.server_credentials import ServerCredentials, TokenInterceptor
from scheduler_svc.front.gateway.gateway_service import gateway_is_served
from scheduler_svc.front.request.preparation import Preparer
from scheduler_svc.front.request.tenant import Tenants
from scheduler_svc.front.rpc.admin_service import AdminService
from scheduler_svc.front.rpc.decoding import DecodingInterceptor
from scheduler_svc.front.rpc.health import (
    ADMIN_SERVICE,
    ENGINE,
    HEALTH_SERVICE,
    INFERENCE_SERVICE,
    READINESS,
    RUNNER,
    WorkerHealth,
)
from scheduler_svc.front.rpc.heartbeat import Heartbeat
from scheduler_svc.front.rpc.inference_service import InferenceService
from scheduler_svc.front.rpc.pacing import LONGEST_S, MessagePacer
from scheduler_svc.front.rpc.reflection import add_reflection
from scheduler_svc.front.rpc.wrong_port import ServedElsewhere
from scheduler_svc.front.stream.engine_client import EngineClient
from scheduler_svc.front.text.served_model import ServedModel
from scheduler_svc.front.tracing.tracing import Tracing
from scheduler_svc.front.worker_start import WorkerStart
from scheduler_svc.settings.scheduler_settings import SchedulerSettings

if TYPE_CHECKING:
    from scheduler_svc.front.gateway.service import VllmEngineService

log = structlog.get_logger(__name__)

LAST_MESSAGES_S = 0.1
"""Seconds left for messages that the engine sent just before it exited."""

NICENESS = 5
"""Added to the niceness of a worker process: where cores are scarce, the engine's step precedes text and streams."""

GC_THRESHOLD = 20_000
"""Young objects that trigger a garbage collection: streams leave few cycles, and a collection pauses every stream."""

OTHER_CORES = 3
"""Cores left to other processes (engine, runner, clients) before workers may use one each."""

CLIENT_PINGS_APART_MS = 10_000
"""Shortest interval of client keepalive pings; gRPC's default, 5 minutes, is too long for useful keepalive.

A client that pings more often is disconnected.
"""

STOP_GRACE_S = 2.0
"""Seconds left for the last messages to slow readers."""


def run_front(settings: SchedulerSettings, worker: int, engine_endpoint: str, gone_fd: int) -> None:
    """Serves until `gone_fd` reads end-of-file. Must be called in the main thread of a process.

    `settings.listen` and `settings.admin_listen` must be reserved addresses (see listen_address). Worker 0 also serves
    the admin API. `engine_endpoint`: ZeroMQ address of the engine.
    """
    uvloop.run(FrontWorker(settings, worker, engine_endpoint).run(gone_fd))


class FrontWorker:
    """One front worker: builds its services, starts its servers and stops them."""

    def __init__(self, settings: SchedulerSettings, worker: int, engine_endpoint: str) -> None:
        self._settings = settings
        self._worker = worker
        self._doors = ServerCredentials.open(settings)
        self._health = WorkerHealth()
        self._served = ServedModel(self._tell_health)
        self._preparer = Preparer(self._served)
        self._client = EngineClient(engine_endpoint, worker, self._announce)
        self._tracing = Tracing.open(settings)
        self._admin = AdminService(self._client)
        self._client.on_step_report = self._admin.publish
        self._client.on_step_done = self._admin.publish_done
        self._client.on_drained = self._admin.drained
        self._heartbeat = Heartbeat(self._client, settings.stall_s, self._tell_health)
        self._client.on_pong = self._heartbeat.answered
        self._pacer = _pacer(settings)
        self._gateway_service = self._make_gateway_service() if gateway_is_served() else None

    @property
    def num_requests(self) -> int:
        """Number of requests that this worker follows, including those whose client may reattach."""
        return self._client.num_requests

    async def run(self, gone_fd: int) -> None:
        """Serves until `gone_fd` reads end-of-file."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(gone_fd, gone.set)
        servers = await self._start_servers()
        self._client.open()
        heartbeat = loop.create_task(self._heartbeat.run())
        log.info("a front worker listens", worker=self._worker, address=self._settings.listen)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(gone_fd)
            heartbeat.cancel()
            await self._stop(servers)

    async def _start_servers(self) -> list[grpc.aio.Server]:
        servers = [await self._start_public()]
        if self._settings.gateway_listen:
            servers.append(await self._start_gateway())
        if self._worker == 0 and self._settings.admin_listen:
            servers.append(await self._start_admin())
        return servers

    async def _start_public(self) -> grpc.aio.Server:
        server = _server(self._settings, "listen", self._doors.tenants)
        service = InferenceService(
            self._client, self._served, self._preparer, self._pacer, self._doors.tenants, self._tracing
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if not self._settings.gateway_listen:
            self._add_gateway_service(server)
        add_reflection((INFERENCE_SERVICE, HEALTH_SERVICE), server)
        self._doors.listen(server, self._settings.listen)
        await server.start()
        return server

    def _make_gateway_service(self) -> VllmEngineService:
        """Returns the service for OpenAI gateways. Its stubs are an optional dependency, hence the local import."""
        from scheduler_svc.front.gateway.service import VllmEngineService

        tenants = Tenants() if self._settings.gateway_listen else self._doors.tenants
        return VllmEngineService(
            self._client, self._served, self._preparer, self._pacer, tenants, lambda: self._ready, self._tracing
        )

    def _add_gateway_service(self, server: grpc.aio.Server) -> None:
        if self._gateway_service is not None:
            from smg_grpc_proto.generated import vllm_engine_pb2_grpc

            vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self._gateway_service, server)

    async def _start_gateway(self) -> grpc.aio.Server:
        server = _server(self._settings, "gateway_listen", Tenants())
        self._add_gateway_service(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        server.add_insecure_port(self._settings.gateway_listen)
        await server.start()
        return server

    async def _start_admin(self) -> grpc.aio.Server:
        server = _server(self._settings, "admin_listen", self._doors.admins)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self._admin, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        add_reflection((ADMIN_SERVICE, HEALTH_SERVICE), server)
        self._doors.listen(server, self._settings.admin_listen)
        await server.start()
        return server

    async def _stop(self, servers: list[grpc.aio.Server]) -> None:
        self._health.tell({READINESS: False, ENGINE: False, RUNNER: False})
        await asyncio.sleep(LAST_MESSAGES_S)
        self._client.lose()
        self._admin.lose()
        if self._gateway_service is not None:
            self._gateway_service.lose()
        await asyncio.gather(*(server.stop(STOP_GRACE_S) for server in servers))
        self._client.close()
        self._preparer.close()
        await asyncio.to_thread(self._tracing.close)

    @property
    def _ready(self) -> bool:
        beat = self._heartbeat
        return self._served.ready and beat.engine_turns and beat.runners_progress

    def _announce(self, state: engine_pb2.ModelState) -> None:
        """Takes the engine's new model state: a runner has connected, left or been held back."""
        self._served.announce(state)
        self._heartbeat.ask()

    def _tell_health(self) -> None:
        beat = self._heartbeat
        self._health.tell({READINESS: self._ready, ENGINE: beat.engine_turns, RUNNER: beat.runners_progress})


def _pacer(settings: SchedulerSettings) -> MessagePacer:
    """Returns the worker's pacer. Its rate follows the load only if workers have processes and cores of their own."""
    workers = settings.front_workers
    if settings.flush_ms is not None:
        return MessagePacer(settings.flush_ms / 1000, workers)
    has_core = workers > 0 and usable_cores() >= workers + OTHER_CORES
    return MessagePacer(LONGEST_S, workers, settings.tuned.front_load if has_core else None)


def _server(settings: SchedulerSettings, listener: str, tenants: Tenants) -> grpc.aio.Server:
    elsewhere = ServedElsewhere(listener, settings, gateway_is_served())
    tokens = [TokenInterceptor(tenants, elsewhere.services)] if tenants.need_tokens else []
    server = grpc.aio.server(
        maximum_concurrent_rpcs=settings.max_calls,
        interceptors=[*tokens, DecodingInterceptor()],
        options=(
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", settings.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", int(settings.keepalive_s * 1000)),
            ("grpc.keepalive_timeout_ms", int(settings.keepalive_s * 1000)),
            # While data flows, this timeout applies instead of the one above; its default is a minute.
            ("grpc.http2.ping_timeout_ms", int(settings.keepalive_s * 1000)),
            ("grpc.http2.min_ping_interval_without_data_ms", CLIENT_PINGS_APART_MS),
        ),
    )
    server.add_generic_rpc_handlers((elsewhere,))
    return server


def main() -> None:
    """Runs a worker process. The first line of stdin holds its settings; end-of-file means that the engine is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked by `spawn_worker` until here
    forgive_output()
    stdin = sys.stdin.fileno()
    with os.fdopen(os.dup(stdin), "rb", buffering=0) as pipe:
        told = pipe.readline()
        if not told:
            return  # the worker is not needed
        os.environ.pop(FILE_VARIABLE, None)  # the line has all settings, and the file may have changed since
        start = WorkerStart.model_validate_json(told)
    configure_logs(start.settings.log_format, start.settings.log_level)
    os.nice(NICENESS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    run_front(start.settings, start.worker, start.engine_endpoint, stdin)


if __name__ == "__main__":
    main()
