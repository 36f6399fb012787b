"""A real model on two ranks: answers have the same bits after each rank was killed, with drafts and a host pool.

The ranks that survive keep their processes, and what their drafters and pools had seen reaches no answer.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from roster_client.client import RosterClient
from roster_client.client.events import Delta
from tests.support.deterministic_cpu import skip_where_refused
from tests.support.processes import RosterProcesses
from tests.support.rank_log import RankLog
from tests.support.thoroughness import choice, count
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

START_S = 240.0
TOKENS = count(60, in_ci=40)
PROMPTS = count(8, in_ci=4)


@pytest.mark.parametrize("draft", choice(["ngram", "model", ""], in_ci=["ngram"]))
@pytest.mark.timeout(600)
async def test_answers_do_not_change_when_ranks_are_killed(draft: str, tmp_path: Path) -> None:
    skip_where_refused()
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder = make_tiny_model("llama", tmp_path / "tiny", seed)
    runner = {
        "device": "cpu", "model": str(folder), "draft": f"model:{folder}" if draft == "model" else draft,
        "deterministic": True, "tensor_parallel": 2, "threads": 1, "slots": 4, "kv_tokens": 512,
        "host_kv_tokens": 1024, "silence_s": 1.0, "rank_timeout_s": 30,
    }  # fmt: skip
    stem = [rng.randrange(NUM_TOKENS) for _ in range(40)]
    prompts = [stem[: rng.choice((0, 40))] + [rng.randrange(NUM_TOKENS) for _ in range(9)] for _ in range(PROMPTS)]
    scheduler = {"check": True, "no_runner_s": START_S}
    with RosterProcesses(tmp_path, scheduler=scheduler, runner=runner, ready_s=START_S) as roster:
        log = RankLog(tmp_path / "runner.log")
        async with RosterClient(roster.address, reconnect_s=START_S) as client:
            wanted = [await answer(client, prompt, [0]) for prompt in prompts]
            for epoch, lost in ((2, 1), (3, 0)):
                seen, before = [0], log.pids()
                asked = [asyncio.create_task(answer(client, prompt, seen)) for prompt in prompts]
                while seen[0] < PROMPTS * 12:
                    await asyncio.sleep(0.01)
                os.kill(before[lost], signal.SIGKILL)
                assert await asyncio.gather(*asked) == wanted
                log.await_epoch(epoch, START_S)
                after = log.pids()
                assert after[1 - lost] == before[1 - lost] and after[lost] != before[lost]
        assert len(log.lines("measured the steps")) == 1, "the new rank 0 takes what the old one has measured"


async def answer(client: RosterClient, prompt: list[int], seen: list[int]) -> list[int]:
    """Returns the tokens of a request with a seed; counts them in `seen` as they come."""
    stream = client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, temperature=0.9, seed=sum(prompt))
    async for event in stream:
        if isinstance(event, Delta):
            seen[0] += len(event.token_ids)
    return (await stream.completion()).choices[0].token_ids
