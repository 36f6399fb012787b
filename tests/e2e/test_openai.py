"""The official `openai` client through the real gateway: an application's view of Roster over HTTP.

The hash backend's tokens are arbitrary bytes, so texts are compared with each other and not with a known one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator

import grpc
import jsonschema
import pytest

pytest.importorskip("openai")
pytest.importorskip("smg_grpc_proto")

import openai
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam
from openai.types.responses import ResponseTextConfigParam
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc

from tests.support.gateway import openai_client
from tests.support.idle import wait_idle_at
from tests.support.pieces import in_pieces
from tests.support.processes import RosterProcesses

MODEL = "hash"
SLOTS = 4
WAITING = 2
CITY: dict[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    processes = RosterProcesses(
        tmp_path_factory.mktemp("openai"),
        scheduler={"max_waiting_requests": WAITING},
        runner={"device": "hash", "slots": SLOTS, "test_backend": {"eos_probability": 0, "step_ms": 5}},
    )
    with processes:
        yield processes


@pytest.fixture(scope="module")
def client(roster: RosterProcesses, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("gateway")
    with openai_client(folder, roster.address) as opened:
        yield opened


def user(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def chat(client: openai.OpenAI, text: str = "Hi", **options: object) -> ChatCompletion:
    """Returns a greedy answer."""
    return client.chat.completions.create(model=MODEL, messages=user(text), temperature=0, **options)  # type: ignore[call-overload]


def contents(chunks: list[ChatCompletionChunk]) -> list[str]:
    """Returns the texts of the chunks that have one."""
    return [text for chunk in chunks if chunk.choices and (text := chunk.choices[0].delta.content)]


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

    def streamed() -> list[ChatCompletionChunk]:
        return list(
            client.chat.completions.create(
                model=MODEL,
                messages=user("Hi"),
                temperature=0,
                max_tokens=24,
                stream=True,
                stream_options={"include_usage": True},
            )
        )

    chunks = in_pieces(streamed, contents)
    assert "".join(contents(chunks)) == choice.message.content
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
        # The gateway withholds bytes that end within a character, with their log-probabilities.
        assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
        assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    assert answer.usage is not None and answer.usage.completion_tokens == 24


def test_an_answer_is_an_instance_of_its_schema(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    choice = chat(client, max_tokens=200, response_format=form).choices[0]
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content or ""), CITY)
    chunks = client.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL, messages=user("Hi"), seed=4, max_tokens=200, response_format=form, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    jsonschema.validate(json.loads(text), CITY)
    whatever = chat(client, max_tokens=8, response_format={"type": "json_object"}).choices[0]
    assert (whatever.message.content or "").startswith("{") and whatever.finish_reason == "length"
    text = chat(client, max_tokens=9, extra_body={"regex": "[ab]{5}"}).choices[0].message.content or ""
    assert re.fullmatch("[ab]{5}", text)
    answer = client.completions.create(model=MODEL, prompt="x", max_tokens=9, extra_body={"ebnf": 'root ::= "a" | "b"'})
    assert answer.choices[0].text in ("a", "b")


def test_log_probabilities_are_of_allowed_tokens(client: openai.OpenAI) -> None:
    """Excluded tokens have the number that OpenAI uses for impossible ones."""
    constrained = chat(client, max_tokens=2, extra_body={"regex": "ab"}, logprobs=True, top_logprobs=2)
    logprobs = constrained.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [token.token for token in logprobs.content] == ["a", "b"]
    assert all(len(token.top_logprobs) == 2 for token in logprobs.content)


def test_tools_are_called_as_they_are_described(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
    named: dict[str, object] = {"type": "function", "function": {"name": "weather"}}
    answer = chat(client, max_tokens=300, tools=tools, tool_choice=named).choices[0]
    (call,) = answer.message.tool_calls or []
    assert (answer.finish_reason, call.function.name) == ("tool_calls", "weather")  # type: ignore[union-attr]
    jsonschema.validate(json.loads(call.function.arguments), CITY)  # type: ignore[union-attr]
    free = chat(client, max_tokens=8, tools=tools, tool_choice="auto").choices[0]
    assert free.message.content and not free.message.tool_calls
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL, messages=user("Hi"), seed=1, max_tokens=300, tools=tools, tool_choice=named, stream=True
    )
    deltas = [call for chunk in stream if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].function.name == "weather"
    jsonschema.validate(json.loads("".join(delta.function.arguments or "" for delta in deltas)), CITY)


def test_arguments_of_a_tool_without_parameters_are_an_object(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    named: dict[str, object] = {"type": "function", "function": {"name": "now"}}
    (call,) = chat(client, max_tokens=9, tools=tools, tool_choice=named).choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {}  # type: ignore[union-attr]
    untyped = [{"type": "function", "function": {"name": "now", "parameters": {"maxProperties": 0}}}]
    (call,) = chat(client, max_tokens=9, tools=untyped, tool_choice=named).choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {}  # type: ignore[union-attr]
    listed = chat(client, max_tokens=34, tools=tools, tool_choice="required").choices[0].message
    assert listed.tool_calls or (listed.content or "").startswith('[{"name": "now", "parameters": {}}')


def test_an_assistant_that_only_calls_tools_has_no_content(client: openai.OpenAI) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    answers = []
    for content in ({"content": ""}, {"content": None}, {}):
        said = {"role": "assistant", "tool_calls": [call], **content}
        messages = [*user("Hi"), said, {"role": "tool", "tool_call_id": "a", "content": "7"}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=9)  # type: ignore[call-overload]
        answers.append((answer.choices[0].message.content, answer.usage.prompt_tokens))
    assert answers[0] == answers[1] == answers[2]


def test_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="Hi", max_output_tokens=8, temperature=0)
    assert first.output_text and first.status == "incomplete"
    assert first.usage is not None and first.usage.output_tokens == 8
    second = client.responses.create(
        model=MODEL, input="and", previous_response_id=first.id, max_output_tokens=4, temperature=0
    )
    assert second.usage is not None and second.usage.input_tokens > first.usage.input_tokens + 8
    events = list(client.responses.create(model=MODEL, input="Hi", max_output_tokens=8, temperature=0, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == first.output_text
    form: ResponseTextConfigParam = {"format": {"type": "json_schema", "name": "city", "schema": CITY}}
    shaped = client.responses.create(model=MODEL, input="Hi", max_output_tokens=200, text=form)
    jsonschema.validate(json.loads(shaped.output_text), CITY)


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


def test_a_client_that_leaves_before_a_whole_answer_frees_its_slot(
    client: openai.OpenAI, roster: RosterProcesses
) -> None:
    with pytest.raises(openai.APITimeoutError):
        chat(client.with_options(timeout=1.0), max_tokens=7000)
    asyncio.run(wait_idle_at(roster.admin_address))


def test_a_full_queue_is_429(client: openai.OpenAI, roster: RosterProcesses) -> None:
    with contextlib.ExitStack() as streams:
        for _ in range(SLOTS):
            stream = client.chat.completions.create(model=MODEL, messages=user("Hi"), max_tokens=7000, stream=True)
            next(streams.enter_context(contextlib.closing(stream)))
        asyncio.run(_refused(client))
    asyncio.run(wait_idle_at(roster.admin_address))


async def _refused(client: openai.OpenAI) -> None:
    """With every slot taken, sends more requests than may wait: one is refused, and the others wait."""
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
    """Must be the last test: it ends the server behind the gateway."""
    assert roster.end("scheduler") == 0
    with pytest.raises(openai.InternalServerError) as failed:
        chat(client, max_tokens=2)
    assert failed.value.status_code == 503
