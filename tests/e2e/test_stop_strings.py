"""Stop strings through the whole service: every substring of a known output, alone and in sets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from roster_client.client import RosterClient
from roster_client.client.events import Completion, FinishReason
from tests.support.processes import RosterProcesses, roster_processes

TOKENS = 30


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    # The null backend outputs a pangram, one token per character: every position of every stop is known.
    with roster_processes(tmp_path_factory.mktemp("stop"), runner={"device": "null", "slots": 32}) as processes:
        yield processes


def first_match(text: str, stops: list[str]) -> tuple[int, str]:
    """Returns the end of the match that completes first, and the longest stop that ends there."""
    ends = {stop: text.find(stop) + len(stop) for stop in stops if stop in text}
    end = min(ends.values())
    return end, max((stop for stop, at in ends.items() if at == end), key=len)


async def ask(client: RosterClient, stops: list[str], include: bool) -> Completion:
    stream = client.generate([1, 2, 3], max_tokens=TOKENS, stop=stops, include_stop_string=include)
    return await stream.completion()


def check(completion: Completion, text: str, stops: list[str], include: bool) -> None:
    end, stop = first_match(text, stops)
    (choice,) = completion.choices
    assert choice.finish is not None
    assert (choice.finish.reason, choice.finish.stop_string) == (FinishReason.STOP, stop), stops
    assert choice.text == (text[:end] if include else text[: end - len(stop)]), stops
    assert choice.finish.num_tokens == len(choice.token_ids) == end, stops


async def test_every_substring_of_a_known_output(roster: RosterProcesses) -> None:
    async with RosterClient(roster.address) as client:
        text = (await client.generate([1, 2, 3], max_tokens=TOKENS).completion()).text
        assert len(text) == TOKENS and text.isascii()
        substrings = sorted({text[i:j] for i in range(TOKENS) for j in range(i + 1, TOKENS + 1)})
        for include in (False, True):
            completions = await asyncio.gather(*[ask(client, [stop], include) for stop in substrings])
            for stop, completion in zip(substrings, completions, strict=True):
                check(completion, text, [stop], include)


async def test_the_earliest_of_a_set_wins(roster: RosterProcesses) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with RosterClient(roster.address) as client:
        text = (await client.generate([1, 2, 3], max_tokens=TOKENS).completion()).text
        sets = []
        for _ in range(60):
            starts = [rng.randrange(TOKENS) for _ in range(rng.randrange(2, 9))]
            stops = [text[start : start + rng.randrange(1, 12)] for start in starts]
            # Near misses hold text back, which must be sent later.
            sets.append([*stops, *[stop + "~" for stop in stops], "~" + stops[0]])
        completions = await asyncio.gather(*[ask(client, stops, False) for stops in sets])
        for stops, completion in zip(sets, completions, strict=True):
            check(completion, text, stops, False)


async def test_a_stop_string_counts_from_the_token_after_min_tokens_on(roster: RosterProcesses) -> None:
    async with RosterClient(roster.address) as client:
        text = (await client.generate([1, 2, 3], max_tokens=TOKENS).completion()).text
        stop = text[4:6]
        assert text.count(stop) == 1
        for min_tokens, reason in ((5, FinishReason.STOP), (6, FinishReason.LENGTH)):
            stream = client.generate([1, 2, 3], max_tokens=TOKENS, stop=[stop], min_tokens=min_tokens)
            (choice,) = (await stream.completion()).choices
            assert choice.finish is not None and choice.finish.reason is reason
            assert choice.text == (text[:4] if reason is FinishReason.STOP else text)


async def test_held_back_text_comes_when_no_stop_does(roster: RosterProcesses) -> None:
    async with RosterClient(roster.address) as client:
        text = (await client.generate([1, 2, 3], max_tokens=TOKENS).completion()).text
        stops = [text[i:] + "~" for i in range(TOKENS)]
        completion = await ask(client, stops, False)
        assert completion.text == text
        assert completion.choices[0].finish is not None
        assert completion.choices[0].finish.reason is FinishReason.LENGTH
