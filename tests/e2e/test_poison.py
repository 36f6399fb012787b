"""Only the request that ends every runner process which computes it fails; requests beside it are unaffected."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from collections import Counter
from pathlib import Path

import grpc
import pytest

from roster_client.client import RosterClient
from roster_client.client.errors import RosterError
from roster_client.client.events import Completion, Delta, FinishReason
from runner_svc.backends.hash_backend import expected_tokens
from tests.support.chaos import settled
from tests.support.processes import RosterProcesses
from tests.support.thoroughness import count

POISON = 201
NEIGHBOURS = count(9, in_ci=6)
TOKENS = 120
STATUS = {"kill": -signal.SIGKILL, "hang": 3, "broken": 3}
"""Exit status of a process that computes the poison."""
ENDED = "the process that computed it ended"
TOLD = {"kill": ENDED, "hang": f"did not end its step in time|{ENDED}", "broken": "answered with a fault"}
"""Reason in the client's error; for a hang, either the scheduler's or the runner's timeout may be the first."""
EFFECTS = os.environ.get("ROSTER_TEST_POISON", "kill,hang").split(",")

SCHEDULER = {"flush_ms": 5, "check": True, "plan_timeout_s": 2}
RUNNER = {
    "device": "hash", "slots": 8, "kv_tokens": 4096, "silence_s": 0.5, "plan_timeout_s": 2,
}  # fmt: skip


def drawn(rng: random.Random, within: range) -> list[int]:
    """Returns a prompt whose greedy answer first has the poison within these positions, or nowhere if it is empty."""
    while True:
        prompt = [rng.randrange(200) for _ in range(rng.randrange(1, 24))]
        answer = expected_tokens(prompt, TOKENS, eos_probability=0)
        place = answer.index(POISON) if POISON in answer else None
        if (place in within) if within else place is None:
            return prompt


async def revive(roster: RosterProcesses, ended: Counter[int]) -> None:
    """Restarts every process that ends, as an orchestrator does, and counts exit statuses."""
    while True:
        ended.update(status for _, status in roster.revive())
        await asyncio.sleep(0.05)


async def read(client: RosterClient, prompt: list[int]) -> tuple[list[int], Completion | RosterError]:
    """Returns the tokens received, and the completion or error."""
    tokens: list[int] = []
    stream = client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
    try:
        async for event in stream:
            if isinstance(event, Delta):
                tokens += event.token_ids
        return tokens, await stream.completion()
    except RosterError as error:
        return tokens, error


@pytest.mark.parametrize("effect", EFFECTS)
async def test_only_the_request_that_ends_its_runner_is_refused(tmp_path: Path, effect: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    innocent = [drawn(rng, range(0)) for _ in range(NEIGHBOURS)]
    guilty = [[1, POISON, 2], drawn(rng, range(8, TOKENS - 1))]  # at once; after some tokens, which stay valid
    ended: Counter[int] = Counter()
    test_backend = {"step_ms": 5, "eos_probability": 0, "poison_token": POISON, "poison": effect}
    with RosterProcesses(tmp_path, scheduler=SCHEDULER, runner={**RUNNER, "test_backend": test_backend}) as roster:
        reviving = asyncio.create_task(revive(roster, ended))
        async with RosterClient(roster.address) as client:
            async with asyncio.timeout(150):
                neighbours = [asyncio.create_task(read(client, prompt)) for prompt in innocent[: NEIGHBOURS - 3]]
                await asyncio.sleep(0.2)
                poisonous = [asyncio.create_task(read(client, prompt)) for prompt in guilty]
                neighbours += [asyncio.create_task(read(client, prompt)) for prompt in innocent[NEIGHBOURS - 3 :]]
                answers = await asyncio.gather(*neighbours)
                refusals = await asyncio.gather(*poisonous)
        await settled(roster, 1)
        reviving.cancel()
    for prompt, (tokens, end) in zip(innocent, answers, strict=True):
        assert isinstance(end, Completion), end
        assert tokens == expected_tokens(prompt, TOKENS, eos_probability=0)
        finish = end.choices[0].finish
        assert finish is not None and finish.reason is FinishReason.LENGTH
    for prompt, (tokens, end) in zip(guilty, refusals, strict=True):
        assert isinstance(end, RosterError) and end.code is grpc.StatusCode.INTERNAL, end
        assert re.search(TOLD[effect], str(end)), end
        assert tokens == expected_tokens(prompt, TOKENS, eos_probability=0)[: len(tokens)]
    assert len(refusals[1][0]) >= 8, "tokens received before stay valid"
    assert set(ended) == {STATUS[effect]} and ended.total() <= 12, ended
