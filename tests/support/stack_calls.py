"""Calls to a whole stack, in containers or as local processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import openai
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai.types.chat import ChatCompletionMessageParam

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str, told: Callable[[], str]) -> float:
    """Polls until the condition is true and returns the seconds that it took; a failure shows `told()`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"not within {timeout_s:g} s: {what}\n{told()}"
        time.sleep(0.5)
    return time.monotonic() - started


def serving(channel: grpc.Channel) -> bool:
    """Whether the service is ready for requests."""
    try:
        request = health_pb2.HealthCheckRequest(service="roster.v1.InferenceService")
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def gateway_client(url: str, secrets: Path) -> openai.OpenAI:
    """Returns a client of the gateway at this base URL, with the key from the secrets."""
    key = (secrets / "gateway_key").read_text().strip()
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=600)


def answers(client: openai.OpenAI) -> bool:
    """Whether the gateway lists a model and completes a token with it."""
    try:
        model = client.models.list().data[0].id
        client.chat.completions.create(model=model, messages=QUESTION, max_tokens=1)
    except (openai.APIError, IndexError):
        return False
    return True


def stream_chat(client: openai.OpenAI, max_tokens: int = 32) -> Iterator[str]:
    """Yields the texts of a greedy answer to the question as they arrive."""
    model = client.models.list().data[0].id
    chunks = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=max_tokens, stream=True
    )
    for chunk in chunks:
        if chunk.choices and chunk.choices[0].delta.content:
            yield chunk.choices[0].delta.content
