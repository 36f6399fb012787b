"""compose.yaml's CPU profile serves a real model, over gRPC and through the OpenAI gateway.

With ROSTER_COMPOSE=docker (`make test-compose`) in real containers from freshly built images; otherwise the services'
very commands, environment and secrets as local processes, without Prometheus and Grafana.
"""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import openai
import pytest

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.support.docker_stack import DockerStack
from tests.support.local_stack import LocalStack
from tests.support.stack_calls import QUESTION, answers, gateway_client, serving, stream_chat, wait_until

# The first start converts the model's weights.
READY_S = 600.0

pytestmark = pytest.mark.timeout(3000)


@pytest.fixture(scope="module")
def ready(stack: DockerStack | LocalStack) -> Iterator[grpc.Channel]:
    """A channel to the scheduler, which takes requests."""
    with grpc.insecure_channel(stack.address) as channel:

        def up() -> bool:
            assert stack.dead() == [], stack.logs()
            return serving(channel)

        print(f"\nserving after {wait_until(up, READY_S, 'health SERVING', stack.logs):.0f} s")
        yield channel


def test_grpc_answers_without_a_gap(ready: grpc.Channel) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(ready)
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


def test_the_gateway_streams_a_chat(ready: grpc.Channel, stack: DockerStack | LocalStack) -> None:
    with gateway_client(stack.gateway, stack.secrets) as client:
        took = wait_until(lambda: answers(client), 120, "an answer through the gateway", stack.logs)
        texts = list(stream_chat(client))
        print(f"gateway after {took:.0f} s more: {len(texts)} chunks: {''.join(texts)!r}")
        assert len(texts) > 1 and "Paris" in "".join(texts)
        stranger = client.with_options(api_key="somebody else's")
        with pytest.raises(openai.AuthenticationError):
            stranger.chat.completions.create(model=client.models.list().data[0].id, messages=QUESTION, max_tokens=1)
