"""Non-ASCII text: only whole characters are sent, and the text equals that of detokenizing all tokens at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from roster_client.client import RosterClient
from roster_client.client.events import Delta
from roster_client.client.requests import Message
from tests.support.processes import RosterProcesses, roster_processes

PROMPTS = [
    "🙂", "👩‍👩‍👧‍👦 family 🏳️‍🌈", "漢字とかな、そして한국어", "naïve café ÆØÅ", "עברית و عربية", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ∑∫√",
    "a\u0301 combining, \u200b zero width, \ufeff mark", "line\nbreaks\r\nand\ttabs", "<|im_end|> is only text",
]  # fmt: skip


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    with roster_processes(tmp_path_factory.mktemp("texts"), runner={"device": "hash", "slots": 16}) as processes:
        yield processes


@pytest.mark.parametrize("text", PROMPTS)
async def test_prompts_round_trip(roster: RosterProcesses, text: str) -> None:
    async with RosterClient(roster.address) as client:
        tokens = await client.tokenize(text)
        assert tokens == list(text.encode())
        assert await client.detokenize(tokens) == text
        chat = await client.tokenize([Message("user", text)])
        # The template's special tokens are tokens; those in the user's text are not.
        assert sum(token >= 256 for token in chat) == 3
        assert await client.tokenize(text, raw=False) == chat
        for raw, expected in ((True, tokens), (False, chat)):
            completion = await client.generate(text, raw=raw, max_tokens=8, prompt_token_ids=True).completion()
            assert completion.started is not None and list(completion.started.prompt_token_ids) == expected


async def test_streamed_text_is_the_text_of_all_tokens(roster: RosterProcesses) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)

    async def run(client: RosterClient) -> None:
        prompt = [rng.randrange(256) for _ in range(9)]
        text, tokens = "", []
        async for event in client.generate(prompt, seed=rng.randrange(1 << 60), max_tokens=200, ignore_eos=True):
            if isinstance(event, Delta):
                assert event.first_index == len(tokens)
                text += event.text
                tokens += event.token_ids
        assert len(tokens) == 200
        # Random bytes: characters of 2 to 4 bytes among invalid UTF-8.
        assert text == await client.detokenize(tokens)
        assert text == bytes(token for token in tokens if token < 256).decode("utf-8", "replace")

    async with RosterClient(roster.address) as client:
        await asyncio.gather(*[run(client) for _ in range(24)])
