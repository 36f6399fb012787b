"""compose.yaml's CPU profile serves a real model: up, a streamed answer, down.

With ROSTER_COMPOSE=docker (`make test-compose`) in real containers from freshly built images; otherwise the services'
very commands and environment run as local processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.support.docker_stack import DockerStack
from tests.support.local_stack import LocalStack

DOCKER = os.environ.get("ROSTER_COMPOSE") == "docker"
# The first start converts the model's weights.
READY_S = 600.0
PROFILE = "cpu"

pytestmark = pytest.mark.timeout(3000 if DOCKER else 700)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerStack | LocalStack]:
    """The stack, started; whatever happens, it is gone afterwards."""
    stack: DockerStack | LocalStack
    if DOCKER:
        stack = DockerStack(PROFILE)
        started = time.monotonic()
        stack.build()
        print(f"\nimages built in {time.monotonic() - started:.0f} s")
    else:
        stack = LocalStack(tmp_path_factory.mktemp("compose"), PROFILE)
    try:
        stack.start()
        yield stack
    finally:
        print(stack.logs())
        stack.remove()


def wait_until(condition: Callable[[], bool], stack: DockerStack | LocalStack, timeout_s: float, what: str) -> float:
    """Polls until the condition holds, and returns the seconds that took. Fails when a service ends meanwhile."""
    started = time.monotonic()
    while not condition():
        assert stack.dead() == [], stack.logs()
        assert time.monotonic() - started < timeout_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.5)
    return time.monotonic() - started


def test_serves(stack: DockerStack | LocalStack) -> None:
    """One after another, since each part needs what the one before it left."""
    with grpc.insecure_channel(stack.address) as channel:

        def serving() -> bool:
            try:
                request = health_pb2.HealthCheckRequest(service="roster.v1.InferenceService")
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        print(f"serving after {wait_until(serving, stack, READY_S, 'health SERVING'):.0f} s")
        check_answer(inference_pb2_grpc.InferenceServiceStub(channel))
    if isinstance(stack, DockerStack):
        check_containers(stack)
    assert set(stack.stop().values()) == {0}, stack.logs()


def check_answer(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    """A greedy answer to a chat message comes in several deltas that join without a gap."""
    question = pb.ChatMessage(role="user", parts=[pb.ContentPart(text="What is the capital of France?")])
    request = pb.GenerateRequest(
        prompt=pb.Prompt(chat=pb.Chat(messages=[question])),
        sampling=pb.SamplingParameters(temperature=0),
        stop=pb.StopConditions(max_tokens=32),
    )
    deltas: list[pb.Delta] = []
    finishes: list[pb.Finish] = []
    for response in stub.Generate(request, timeout=120):
        deltas += response.deltas
        finishes += response.finishes
    received = 0
    for delta in deltas:
        assert delta.first_index == received
        received += len(delta.token_ids)
    text = "".join(delta.text for delta in deltas)
    print(f"{received} tokens in {len(deltas)} deltas: {text!r}")
    assert len(deltas) > 1
    assert "Paris" in text
    assert [(finish.index, finish.num_tokens) for finish in finishes] == [(0, received)]


def check_containers(stack: DockerStack) -> None:
    """Healthy, nobody is root, and the scheduler's image has no torch."""
    wait_until(lambda: stack.health("scheduler") == "healthy", stack, 60, "the scheduler's health check")
    for service in ("scheduler", "runner-cpu"):
        assert stack.execute(service, "id", "-u").stdout.strip() == "10001"
    for module in ("torch", "transformers"):
        assert "ModuleNotFoundError" in stack.execute("scheduler", "python", "-c", f"import {module}").stderr
    for image in stack.images():
        print(f"image {image.name}: {image.size / 1e6:.0f} MB")


def test_local_hosts_and_ports(tmp_path: Path) -> None:
    """Without Docker, nothing but hosts and ports of the environment changes."""
    stack = LocalStack(tmp_path, PROFILE)
    assert stack._localize("fcfs") == "fcfs"
    assert stack._localize("tcp://scheduler:50063").startswith("tcp://127.0.0.1:")
    assert stack._localize("0.0.0.0:50061") == stack.address
