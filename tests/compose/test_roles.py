"""compose.yaml's profile `roles`: one runner computes prompts and another one their tokens, with a real model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from roster_protos import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from roster_protos import inference_pb2 as pb
from tests.compose.conftest import DOCKER
from tests.support.docker_stack import DockerStack
from tests.support.local_stack import LocalStack
from tests.support.stack_calls import serving, wait_until
from tests.support.thoroughness import FULL

READY_S = 600.0
COUNTRIES = {"France": "Paris", "Japan": "Tokyo"}

pytestmark = [
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not (DOCKER or FULL), reason="loads two models: tests/e2e/test_moves.py has roles without one"),
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerStack | LocalStack]:
    """The stack of the profile, without a gateway's client."""
    folder = tmp_path_factory.mktemp("roles")
    stack: DockerStack | LocalStack = DockerStack(folder, "roles") if DOCKER else LocalStack(folder, "roles")
    try:
        if isinstance(stack, DockerStack):
            stack.build()
        stack.start()
        yield stack
        statuses = stack.stop()
        assert {statuses["scheduler"], statuses["runner-prefill"], statuses["runner-decode"]} == {0}, stack.logs()
    finally:
        print(stack.logs())
        stack.remove()


def status(stack: DockerStack | LocalStack) -> admin_pb2.GetStatusResponse:
    token = (stack.secrets / "admin_tokens").read_text().split()[-1]
    with grpc.insecure_channel(stack.admin_address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        metadata = [("authorization", f"Bearer {token}")]
        return stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=20, metadata=metadata)


def test_prompts_and_tokens_are_computed_by_runners_of_their_own(stack: DockerStack | LocalStack) -> None:
    with grpc.insecure_channel(stack.address) as channel:
        wait_until(lambda: serving(channel), READY_S, "health SERVING", stack.logs)
        wait_until(lambda: len(status(stack).runners) == 2, READY_S, "both runners", stack.logs)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        token = (stack.secrets / "tokens").read_text().split()[1]

        def ask(country: str) -> str:
            text = f"What is the capital of {country}?"
            question = pb.ChatMessage(role="user", parts=[pb.ContentPart(text=text)])
            request = pb.GenerateRequest(
                prompt=pb.Prompt(chat=pb.Chat(messages=[question])),
                sampling=pb.SamplingParameters(temperature=0),
                stop=pb.StopConditions(max_tokens=32),
            )
            responses = stub.Generate(request, timeout=120, metadata=[("authorization", f"Bearer {token}")])
            return "".join(delta.text for response in responses for delta in response.deltas)

        with ThreadPoolExecutor(len(COUNTRIES)) as threads:
            answers = dict(zip(COUNTRIES, threads.map(ask, COUNTRIES), strict=True))
    for country, capital in COUNTRIES.items():
        assert capital in answers[country], answers
    found = status(stack)
    assert {runner.id: runner.role for runner in found.runners} == {"prefill": "prefill", "decode": "decode"}
    assert found.moves.by_use["role"] >= 1 and not found.moves.failed, found.moves
    assert found.moves.bytes["tcp"] > 0
