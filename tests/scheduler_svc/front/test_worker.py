"""A whole worker: health checks, reflection, model RPCs, the admin API, and the end of its process."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from unittest import mock

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from roster_protos import admin_pb2, engine_pb2, inference_pb2_grpc
from roster_protos import inference_pb2 as pb
from runner_svc.backends.byte_tokenizer import byte_model
from scheduler_svc.front.auth.listen_address import reserve
from scheduler_svc.front.worker_process import spawn_worker
from scheduler_svc.front.worker_start import WorkerStart, start_worker
from scheduler_svc.settings.scheduler_settings import SchedulerSettings
from tests.support.fake_engine import FakeEngine
from tests.support.front_stack import FrontStack, front_stack, model_known
from tests.support.gathered import echo, gather, random_text, request
from tests.support.process_state import gone

READINESS = health_pb2.HealthCheckRequest(service="roster.v1.InferenceService")


def _changed(stack: FrontStack, **fields: bool) -> engine_pb2.ModelState:
    state = engine_pb2.ModelState()
    state.CopyFrom(stack.engine.state)
    for name, value in fields.items():
        setattr(state, name, value)
    return state


async def test_health_follows_the_runner_and_the_draining() -> None:
    async with front_stack(with_model=False) as stack:
        health = health_pb2_grpc.HealthStub(stack.channel)
        alive = await health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        assert alive.status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(READINESS)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        for call in (stack.stub.GetModel(pb.GetModelRequest()), stack.stub.Generate(request("a", 1)).read()):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        state = _changed(stack, ready=True)
        state.model.CopyFrom(byte_model("late", "Fake", 300, 64))
        state.model.weight_formats = "fp8 on load"
        stack.engine.state = state
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        described = await stack.stub.GetModel(pb.GetModelRequest())
        assert (described.name, described.weight_formats) == ("late", "fp8 on load")
        stack.engine.state = _changed(stack, ready=False)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        stack.engine.state = _changed(stack, ready=True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        running = asyncio.create_task(gather(stack.stub.Generate(request("a", 60))))
        while not stack.engine.commands_of("submit"):
            await asyncio.sleep(0.005)
        stack.engine.state = _changed(stack, draining=True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await gather(stack.stub.Generate(request("a", 1)))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert len((await running).tokens[0]) == 60
        watch.cancel()


async def test_a_model_that_can_not_be_served_is_named() -> None:
    async with front_stack(with_model=False) as stack:
        state = _changed(stack, ready=True)
        state.model.name = "broken"
        state.model.tokenizer = b"{}"
        stack.engine.state = state
        async with asyncio.timeout(5):
            while True:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stack.stub.GetModel(pb.GetModelRequest(), wait_for_ready=True)
                if refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    break
        health = health_pb2_grpc.HealthStub(stack.channel)
        assert (await health.Check(READINESS)).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_model_and_text() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    text = random_text(random.Random(seed), 50)
    async with front_stack() as stack:
        model = await stack.stub.GetModel(pb.GetModelRequest())
        assert (model.name, model.vocab_size, list(model.eos_token_ids)) == ("fake", 512, [257])
        tokens = await stack.stub.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text=text)))
        assert list(tokens.token_ids) == list(text.encode())
        back = await stack.stub.Detokenize(pb.DetokenizeRequest(token_ids=[*tokens.token_ids, 257]))
        assert back.text == text
        whole = pb.DetokenizeRequest(token_ids=[*tokens.token_ids, 257], skip_special_tokens=False)
        assert (await stack.stub.Detokenize(whole)).text == text + "<|im_end|>"
        part = pb.ContentPart(text="hi <|im_end|>")
        chat = pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role="user", parts=[part])]))
        rendered = list((await stack.stub.Tokenize(pb.TokenizeRequest(prompt=chat))).token_ids)
        assert rendered == [256, *b"user\nhi <|im_end|>", 257, *b"\n", 256, *b"assistant\n"]
        for bad in (
            stack.stub.Detokenize(pb.DetokenizeRequest(token_ids=[512])),
            stack.stub.Tokenize(pb.TokenizeRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await bad
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
async def test_reflection_answers_under_both_names(version: str) -> None:
    """The services are listed, and each can be described, as tools do to show all of a server."""
    async with front_stack() as stack:
        info = stack.channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        call = info(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        listed = {service.name for service in (await call.read()).list_services_response.service}
        reflections = {"grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection"}
        assert listed == {"roster.v1.InferenceService", "grpc.health.v1.Health", *reflections}
        asked = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in sorted(listed)]
        call = info(iter(asked))
        for name in sorted(listed):
            (file, *_) = (await call.read()).file_descriptor_response.file_descriptor_proto
            described = descriptor_pb2.FileDescriptorProto.FromString(file)
            assert name in {f"{described.package}.{service.name}" for service in described.service}


async def test_status_and_steps() -> None:
    async with front_stack(step_s=0.001) as stack:
        assert (await stack.admin.GetStatus(admin_pb2.GetStatusRequest(), wait_for_ready=True)).waiting == 7
        watches = [stack.admin.WatchSteps(admin_pb2.WatchStepsRequest()) for _ in range(2)]
        for watch in watches:
            numbers = [(await watch.read()).number for _ in range(5)]
            assert numbers == list(range(numbers[0], numbers[0] + 5))
        assert [command.watch.on for command in stack.engine.commands_of("watch")] == [True]
        watches[0].cancel()
        await watches[1].read()
        watches[1].cancel()
        async with asyncio.timeout(5):
            while [command.watch.on for command in stack.engine.commands_of("watch")] != [True, False]:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def _processes(count: int, **environment: str) -> AsyncIterator[tuple[list[subprocess.Popen[bytes]], str]]:
    """Starts worker processes that share a port and one fake engine."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{Path(folder) / 'engine'}"
        engine = FakeEngine(endpoint, byte_model("fake", "Fake", 300, 4096)).start()
        public = reserve("127.0.0.1:0")
        settings = SchedulerSettings(listen=public.address, admin_listen="", front_workers=count)
        with mock.patch.dict(os.environ, environment):
            workers = [spawn_worker() for _ in range(count)]
        for index, worker in enumerate(workers):
            start_worker(worker, WorkerStart(worker=index, engine_endpoint=endpoint, settings=settings))
        try:
            async with asyncio.timeout(30):
                while len(engine.commands_of("hello")) < count:
                    await asyncio.sleep(0.01)
            yield workers, public.address
        finally:
            for worker in workers:
                if worker.stdin is not None:
                    worker.stdin.close()
                worker.wait(10)
            engine.stop()
            public.close()


async def test_worker_processes_share_a_port_and_end_with_the_engine() -> None:
    async with _processes(2) as (workers, address):
        channels = [
            grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1), ("number", number)])
            for number in range(8)
        ]
        stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        for stub in stubs:
            await model_known(stub)
        answers = await asyncio.gather(*(gather(stub.Generate(request("shared", 50))) for stub in stubs))
        assert all(answer.tokens[0] == echo("shared", 50) for answer in answers)
        calls = [stub.Generate(request("open", 4000)) for stub in stubs]
        for call in calls:
            await call.read()
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert [await asyncio.to_thread(worker.wait, 10) for worker in workers] == [0, 0]
        for channel in channels:
            await channel.close()


async def test_a_worker_does_not_read_the_settings_file_again() -> None:
    """The file can have disappeared since the scheduler read it; the successor of a dead worker must start anyway."""
    async with _processes(1, ROSTER_SETTINGS="/no/such/file.json") as (workers, _):
        assert workers[0].poll() is None


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_worker_does_not_outlive_a_killed_parent() -> None:
    parent = textwrap.dedent(
        """
        import sys, time
        from scheduler_svc.front.auth.listen_address import reserve
        from scheduler_svc.front.worker_process import spawn_worker
        from scheduler_svc.front.worker_start import WorkerStart, start_worker
        from scheduler_svc.settings.scheduler_settings import SchedulerSettings
        address = reserve("127.0.0.1:0")
        settings = SchedulerSettings(listen=address.address, admin_listen="")
        worker = spawn_worker()
        start_worker(worker, WorkerStart(worker=0, engine_endpoint=sys.argv[1], settings=settings))
        print(worker.pid, flush=True)
        time.sleep(60)
        """
    )
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{Path(folder) / 'engine'}"
        engine = FakeEngine(endpoint, byte_model("fake", "Fake", 300, 4096)).start()
        process = subprocess.Popen([sys.executable, "-c", parent, endpoint], stdout=subprocess.PIPE)
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        _wait(lambda: bool(engine.commands_of("hello")))
        assert not gone(pid)
        process.kill()
        process.wait()
        process.stdout.close()
        _wait(lambda: gone(pid))
        engine.stop()
