"""The official `openai` client through the real gateway: what an application sees of Roster over HTTP.

The hash backend's tokens are any bytes, so that texts are compared with each other and not with a known one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import grpc
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc

from tests.support.gateway import gateway
from tests.support.idle import wait_idle_at
from tests.support.processes import RosterProcesses

MODEL = "hash"
SLOTS = 4
WAITING = 2


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    processes = RosterProcesses(
        tmp_path_factory.mktemp("openai"),
        scheduler={"max_waiting_requests": WAITING},
        runner={"device": "hash", "slots": SLOTS, "eos_probability": 0, "step_ms": 5},
    )
    with processes:
        yield processes


@pytest.fixture(scope="module")
def client(roster: RosterProcesses, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("gateway")
    with (
        gateway(folder, roster.address) as url,
        openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=60) as opened,
    ):
        yield opened


def user(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def chat(client: openai.OpenAI, text: str = "Hi", **options: object) -> ChatCompletion:
    """A greedy answer."""
    return client.chat.completions.create(model=MODEL, messages=user(text), temperature=0, **options)  # type: ignore[call-overload]


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_chat_streams_what_it_answers_whole(client: openai.OpenAI) -> None:
    whole = chat(client, max_tokens=24)
    (choice,) = whole.choices
    assert choice.finish_reason == "length"
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    num_prompt = len(prompt) - 2 * len("<|im_start|>") - len("<|im_end|>") + 3
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (num_prompt, 24)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=user("Hi"),
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == choice.message.content
    assert sum(map(bool, pieces)) > 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, 24)


def test_completions_stream_what_they_answer_whole(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Hello", temperature=0, max_tokens=24)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 24)
    stream = client.completions.create(model=MODEL, prompt="Hello", temperature=0, max_tokens=24, stream=True)
    chunks = [chunk for chunk in stream if chunk.choices]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    text = chat(client, max_tokens=80).choices[0].message.content or ""
    stop = next(letter for letter in text[10:] if letter.isascii() and letter.isprintable() and letter not in text[:10])
    choice = chat(client, max_tokens=80, stop=[stop]).choices[0]
    assert (choice.message.content, choice.finish_reason) == (text[: text.index(stop)], "stop")


def test_choices_come_with_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=user("Hi"), n=2, max_tokens=12, logprobs=True, top_logprobs=2, seed=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        # The gateway keeps bytes back that end within a character, with their log-probabilities.
        assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
        assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    assert answer.usage is not None and answer.usage.completion_tokens == 24


def test_a_prefix_is_cached_until_it_is_flushed(client: openai.OpenAI, roster: RosterProcesses) -> None:
    def cached() -> int:
        usage = chat(client, "the same long question " * 8, max_tokens=2).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    cached()
    assert cached() >= 100
    with grpc.insecure_channel(roster.address) as channel:
        assert vllm_engine_pb2_grpc.VllmEngineStub(channel).FlushCache(common_pb2.FlushCacheRequest()).success
    assert cached() == 0
    assert cached() >= 100


def test_bad_requests_are_400(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "objct"}}}
    with pytest.raises(openai.BadRequestError, match=r"constraint\.json_schema: Invalid type: objct"):
        chat(client, response_format=schema)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        chat(client, "x" * 10_000)


def test_a_client_that_leaves_frees_its_slot(client: openai.OpenAI, roster: RosterProcesses) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=user("Hi"), max_tokens=7000, stream=True)
    for _ in range(3):
        next(stream)
    stream.close()
    asyncio.run(wait_idle_at(roster.admin_address))


def test_a_full_queue_is_429(client: openai.OpenAI, roster: RosterProcesses) -> None:
    with contextlib.ExitStack() as streams:
        for _ in range(SLOTS):
            stream = client.chat.completions.create(model=MODEL, messages=user("Hi"), max_tokens=7000, stream=True)
            next(streams.enter_context(contextlib.closing(stream)))
        asyncio.run(_refused(client))
    asyncio.run(wait_idle_at(roster.admin_address))


async def _refused(client: openai.OpenAI) -> None:
    """With every slot taken: more requests than may wait, of which one at least is refused, and the others wait."""
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key="unused", max_retries=0, timeout=60) as waiting:
        request = waiting.completions.create(model=MODEL, prompt="x", max_tokens=7000)
        tasks = [asyncio.create_task(request)]
        more = [waiting.completions.create(model=MODEL, prompt="x", max_tokens=7000) for _ in range(WAITING)]
        tasks += [asyncio.create_task(each) for each in more]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        assert [type(task.exception()) for task in done] == [openai.RateLimitError]


def test_no_server_is_503(client: openai.OpenAI, roster: RosterProcesses) -> None:
    """The last test: it ends the server behind the gateway."""
    assert roster.end("scheduler") == 0
    with pytest.raises(openai.InternalServerError) as failed:
        chat(client, max_tokens=2)
    assert failed.value.status_code == 503
