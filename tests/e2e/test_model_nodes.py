"""A model whose ranks are on two nodes gives the tokens of one process, also after a rank of the other node died."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from roster_client.client import RosterClient
from roster_client.serve.free_ports import free_ports
from tests.support.processes import RosterProcesses
from tests.support.rank_log import RankLog
from tests.support.thoroughness import FULL
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

START_S = 240.0
TOKENS = 40


async def answers(roster: RosterProcesses, prompts: list[list[int]]) -> list[list[int]]:
    async with RosterClient(roster.address, reconnect_s=START_S) as client:
        streams = [client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, temperature=0.0) for prompt in prompts]
        completions = await asyncio.gather(*[stream.completion() for stream in streams])
    return [completion.choices[0].token_ids for completion in completions]


@pytest.mark.skipif(not FULL, reason="starts several processes: ROSTER_TEST_FULL=1 runs it")
@pytest.mark.timeout(900)
async def test_ranks_on_two_nodes_give_the_tokens_of_one_process(tmp_path: Path) -> None:
    rng = random.Random(26)
    (port,) = free_ports(1)
    model = make_tiny_model("llama", tmp_path / "tiny", 26)
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(rng.randrange(1, 30))] for _ in range(8)]
    alone = {
        "device": "cpu", "model": str(model), "threads": 1, "slots": 4, "kv_tokens": 512,
        "silence_s": 1.0, "rank_timeout_s": 30, "cache_dir": tmp_path / "cache-0",
    }  # fmt: skip
    folders = [tmp_path / "alone", tmp_path / "nodes"]
    for folder in folders:
        folder.mkdir()
    with RosterProcesses(folders[0], runner=alone, ready_s=START_S) as roster:
        wanted = await answers(roster, prompts)
    ranks = {**alone, "tensor_parallel": 2, "nnodes": 2, "rdzv_endpoint": f"127.0.0.1:{port}"}
    roster = RosterProcesses(
        folders[1], scheduler={"check": True, "no_runner_s": START_S}, runner=ranks, runners=2, ready_s=START_S
    )
    roster.change("runner-2", node_rank=1, cache_dir=tmp_path / "cache-1")
    with roster:
        assert await answers(roster, prompts) == wanted
        others = RankLog(folders[1] / "runner-2.log")
        os.kill(others.pids()[1], signal.SIGKILL)
        RankLog(folders[1] / "runner.log").await_epoch(2, START_S)
        assert await answers(roster, prompts) == wanted
