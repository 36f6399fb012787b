"""compose.yaml's CPU profile serves a real model, over gRPC and through the OpenAI gateway.

With ROSTER_COMPOSE=docker (`make test-compose`) it runs in containers from freshly built images; otherwise the same
commands, environment and secrets run as local processes, without Prometheus and Grafana.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator

import grpc
import pytest

pytest.importorskip("openai")

import openai

from roster_protos import inference_pb2 as pb
from roster_protos import inference_pb2_grpc
from tests.support.docker_stack import DockerStack
from tests.support.documented_commands import documented_commands
from tests.support.local_stack import PATH, LocalStack
from tests.support.pieces import in_pieces
from tests.support.stack_calls import QUESTION, answers, gateway_client, serving, stream_chat, wait_until

# The first start converts the model's weights.
READY_S = 600.0

pytestmark = pytest.mark.timeout(3000)


@pytest.fixture(scope="module")
def ready(stack: DockerStack | LocalStack) -> Iterator[grpc.Channel]:
    """Yields a channel to the scheduler, which accepts requests."""
    with grpc.insecure_channel(stack.address) as channel:

        def up() -> bool:
            assert stack.dead() == [], stack.logs()
            return serving(channel)

        print(f"\nserving after {wait_until(up, READY_S, 'health SERVING', stack.logs):.0f} s")
        yield channel


def test_grpc_answers_without_a_gap(ready: grpc.Channel, stack: DockerStack | LocalStack) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(ready)
    question = pb.ChatMessage(role="user", parts=[pb.ContentPart(text="What is the capital of France?")])
    request = pb.GenerateRequest(
        prompt=pb.Prompt(chat=pb.Chat(messages=[question])),
        sampling=pb.SamplingParameters(temperature=0),
        stop=pb.StopConditions(max_tokens=32),
    )
    with pytest.raises(grpc.RpcError) as refused:
        next(stub.Generate(request, timeout=120))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    token = (stack.secrets / "tokens").read_text().split()[1]

    def answer() -> tuple[list[pb.Delta], list[pb.Finish]]:
        responses = list(stub.Generate(request, timeout=120, metadata=[("authorization", f"Bearer {token}")]))
        return [d for response in responses for d in response.deltas], [f for r in responses for f in r.finishes]

    deltas, finishes = in_pieces(answer, lambda answer: answer[0])
    received = 0
    for delta in deltas:
        assert delta.first_index == received
        received += len(delta.token_ids)
    text = "".join(delta.text for delta in deltas)
    print(f"{received} tokens in {len(deltas)} deltas: {text!r}")
    assert "Paris" in text
    assert [(finish.index, finish.num_tokens) for finish in finishes] == [(0, received)]


def test_the_commands_of_the_operators_page_work_on_the_stack(
    ready: grpc.Channel, stack: DockerStack | LocalStack
) -> None:
    """The commands as on the page, except for ports, the folder of the secrets, and fewer tokens."""
    page = [command.text for command in documented_commands() if command.page == "docs/operators.md"]
    commands = [text for text in page if re.match(r"curl -s|ROSTER_TOKEN=", text)]
    assert len(commands) == 3
    environment = os.environ | {"PATH": PATH, "ROSTER_SERVER": stack.address, "ROSTER_ADMIN": stack.admin_address}
    with gateway_client(stack.gateway, stack.secrets) as client:
        wait_until(lambda: answers(client), 120, "an answer through the gateway", stack.logs)
    for text in commands:
        for old, new in (
            ("http://127.0.0.1:30000", stack.gateway),
            ("deploy/secrets", str(stack.secrets)),
            ('"stream"', '"max_tokens": 8, "stream"'),
            ("roster generate", "roster generate --max-tokens 8"),
        ):
            text = text.replace(old, new)
        done = subprocess.run(["bash", "-euc", text], env=environment, capture_output=True, text=True, timeout=120)
        print(f"{text}\n{done.stdout}")
        assert done.returncode == 0 and done.stdout.strip(), done.stderr
        assert "curl" not in text or done.stdout.rstrip().endswith("data: [DONE]")


def test_the_gateway_streams_a_chat(ready: grpc.Channel, stack: DockerStack | LocalStack) -> None:
    with gateway_client(stack.gateway, stack.secrets) as client:
        took = wait_until(lambda: answers(client), 120, "an answer through the gateway", stack.logs)
        texts = in_pieces(lambda: list(stream_chat(client)), lambda texts: texts)
        print(f"gateway after {took:.0f} s more: {len(texts)} chunks: {''.join(texts)!r}")
        assert "Paris" in "".join(texts)
        stranger = client.with_options(api_key="somebody else's")
        with pytest.raises(openai.AuthenticationError):
            stranger.chat.completions.create(model=client.models.list().data[0].id, messages=QUESTION, max_tokens=1)
