"""Six cases of `tests/support/pair_table.py` with real processes: deaths and Attach change no answer.

Each answer is compared with that of the same request, undisturbed: tokens, text, log-probabilities, the prompt's
log-probabilities, and the finish.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from roster_client.client import RosterClient
from roster_client.client.events import Completion, Delta
from roster_client.client.requests import OnDisconnect, Options
from tests.support.chaos import settled
from tests.support.processes import RosterProcesses

PROMPT = [number % 26 + 97 for number in range(60)]
TOKENS = 130

CASES: dict[str, Options] = {
    "structured, logprobs": {"regex": "([a-d]{3}-){30}", "logprobs": 2, "temperature": 0.0},
    "prompt_logprobs, choices": {"prompt_logprobs": 1, "n": 2, "temperature": 1.0, "seed": 5, "ignore_eos": True},
    "stop, logprobs": {"logprobs": 0, "temperature": 1.0, "seed": 11, "ignore_eos": True},
    "structured, prompt_logprobs, choices": {
        "regex": "([a-d]{3}-){30}", "prompt_logprobs": 0, "n": 2, "temperature": 1.0, "seed": 3, "logprobs": 1,
    },
    "min_tokens, logprobs": {"min_tokens": 110, "logprobs": 1, "temperature": 1.0, "seed": 8},
    "prompt_logprobs, logprobs": {
        "prompt_logprobs": 1, "logprobs": 1, "n": 2, "temperature": 1.0, "seed": 4, "ignore_eos": True,
    },
}  # fmt: skip
EVENTS = {
    "scheduler": ["structured, logprobs", "prompt_logprobs, choices", "stop, logprobs"],
    "runner": ["structured, prompt_logprobs, choices", "min_tokens, logprobs"],
    "attach": ["prompt_logprobs, logprobs"],
}


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    runner = {"device": "hash", "slots": 4, "test_backend": {"step_ms": 8}, "silence_s": 1.0, "max_step_tokens": 32}
    scheduler = {"check": True, "flush_ms": 0}
    folder = tmp_path_factory.mktemp("pairs")
    with RosterProcesses(folder, scheduler=scheduler, runner=runner, runners=2) as processes:
        yield processes


def answer(completion: Completion) -> dict[str, Any]:
    """Returns everything that must not depend on events."""
    assert completion.started is not None
    started = (completion.started.prompt_token_ids, completion.started.prompt_logprobs)
    return {"prompt": started, "choices": completion.choices}


async def undisturbed(client: RosterClient) -> dict[str, Completion]:
    """Returns the cases' answers; the stop string is taken from the text generated without it."""
    plain = await client.generate(PROMPT, max_tokens=TOKENS, **CASES["stop, logprobs"]).completion()
    CASES["stop, logprobs"]["stop"] = [plain.text[len(plain.text) * 3 // 4 :][:6]]
    streams = [client.generate(PROMPT, max_tokens=TOKENS, **options).completion() for options in CASES.values()]
    answers = dict(zip(CASES, await asyncio.gather(*streams), strict=True))
    finish = answers["stop, logprobs"].choices[0].finish
    assert finish is not None and finish.stop_string is not None
    for name, completion in answers.items():
        for choice in completion.choices:
            assert len(choice.logprobs) == ("logprobs" in CASES[name]) * len(choice.token_ids)
            assert len(choice.token_ids) > 60
        if "prompt_logprobs" in CASES[name]:
            assert completion.started is not None and len(completion.started.prompt_logprobs) == len(PROMPT) - 1
    return answers


async def attached_on_the_way(roster: RosterProcesses, options: Options, request_id: str) -> Completion:
    """Cuts the stream and attaches from its cursors."""
    kept: dict[str, Any] = {"request_id": request_id, "on_disconnect": OnDisconnect.KEEP, **options}
    async with RosterClient(roster.address) as client:
        stream = client.generate(PROMPT, max_tokens=TOKENS, **kept)
        async for event in stream:
            if isinstance(event, Delta) and min([*stream.received, *[0] * (2 - len(stream.received))]) > 40:
                break
        begin = stream._assembler.completion
        stream.cancel()
    async with RosterClient(roster.address) as client:
        rest = await client.attach(request_id, stream.received).completion()
    assert rest.started is not None and begin.started is not None
    assert rest.started.prompt_logprobs == begin.started.prompt_logprobs
    for first, second in zip(begin.choices, rest.choices, strict=True):
        first.token_ids += second.token_ids
        first.logprobs += second.logprobs
        first.text += second.text
        first.finish = second.finish
    return begin


async def test_six_cases(roster: RosterProcesses) -> None:
    async with RosterClient(roster.address) as client:
        expected = await undisturbed(client)
        for event in ("scheduler", "runner"):
            streams = {name: client.generate(PROMPT, max_tokens=TOKENS, **CASES[name]) for name in EVENTS[event]}
            reading = [asyncio.create_task(stream.completion()) for stream in streams.values()]
            while not all(stream.received and max(stream.received) > 30 for stream in streams.values()):
                assert not all(task.done() for task in reading), "all requests ended before the event"
                await asyncio.sleep(0.01)
            await asyncio.to_thread(roster.end, event, signal.SIGKILL)
            roster.start_one(event)
            for name, completion in zip(streams, await asyncio.gather(*reading), strict=True):
                assert answer(completion) == answer(expected[name]), (event, name)
            await asyncio.to_thread(roster.wait_ready)
    for name in EVENTS["attach"]:
        completion = await attached_on_the_way(roster, CASES[name], "attached")
        assert answer(completion) == answer(expected[name]), name
    await settled(roster, runners=2)
