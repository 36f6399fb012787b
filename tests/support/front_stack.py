"""A front worker on a free port with a fake engine behind it, in the test's own event loop."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from roster_protos import admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from runner_svc.backends.byte_tokenizer import byte_model
from scheduler_svc.front.auth.listen_address import reserve
from scheduler_svc.front.worker import FrontWorker
from scheduler_svc.settings.scheduler_settings import SchedulerSettings
from tests.support.fake_engine import FakeEngine

CONTEXT_LENGTH = 4096
VOCAB_SIZE = 512


@dataclass
class FrontStack:
    """The front worker, its engine and the stubs of its services."""

    engine: FakeEngine
    worker: FrontWorker
    channel: grpc.aio.Channel
    stub: inference_pb2_grpc.InferenceServiceStub
    admin: admin_pb2_grpc.AdminServiceStub
    address: str
    gateway_address: str
    """Address of the gateway's service."""


async def model_known(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    """Returns once the worker behind `stub` knows its model."""
    while True:
        try:
            await stub.GetModel(inference_pb2.GetModelRequest(), wait_for_ready=True)
            return
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await asyncio.sleep(0.01)


@asynccontextmanager
async def front_stack(
    step_s: float = 0.002,
    flush_ms: float = 30.0,
    with_model: bool = True,
    otlp_endpoint: str = "",
    gateway_apart: bool = False,
) -> AsyncIterator[FrontStack]:
    """Starts worker and engine, and ends both on exit. `gateway_apart`: the gateway's service has its own address."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{Path(folder) / 'engine'}"
        model = byte_model("fake", "Fake", VOCAB_SIZE, CONTEXT_LENGTH)
        engine = FakeEngine(endpoint, model, step_s)
        if not with_model:
            engine.state.ClearField("model")
            engine.state.ready = False
        engine.start()
        public, admin, apart = (reserve("127.0.0.1:0") for _ in range(3))
        settings = SchedulerSettings(
            listen=public.address,
            admin_listen=admin.address,
            gateway_listen=apart.address if gateway_apart else "",
            flush_ms=flush_ms,
            front_workers=0,
            otlp_endpoint=otlp_endpoint,
        )
        gone, alive = os.pipe()
        worker = FrontWorker(settings, 0, endpoint)
        serving = asyncio.create_task(worker.run(gone))
        channel = grpc.aio.insecure_channel(public.address)
        admin_channel = grpc.aio.insecure_channel(admin.address)
        stack = FrontStack(
            engine,
            worker,
            channel,
            inference_pb2_grpc.InferenceServiceStub(channel),
            admin_pb2_grpc.AdminServiceStub(admin_channel),
            public.address,
            apart.address if gateway_apart else public.address,
        )
        try:
            if with_model:
                await model_known(stack.stub)
            yield stack
        finally:
            os.close(alive)
            await channel.close()
            await admin_channel.close()
            await serving
            os.close(gone)
            for reserved in (public, admin, apart):
                reserved.close()
            engine.stop()
