"""A random rank of a two-layer model is killed or stopped, again and again: every answer has the bits of the solo one.

    ROSTER_TEST_REQUESTS=5000 ROSTER_TEST_EVENTS=200 ROSTER_CHAOS_RESULT=FILE pytest ...

runs the full count. Each event comes at a random time within two seconds after the group has formed again. Requests
repeat a smaller number of them, each of which is computed alone first, by ranks that nothing happens to. The runner is
deterministic and drafts, and its pool is so small that answers are preempted.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from roster_client.client import RosterClient
from roster_client.client.errors import RosterError
from roster_client.client.events import Choice, Delta
from tests.support.chaos import settled
from tests.support.deterministic_cpu import skip_where_refused
from tests.support.processes import RosterProcesses
from tests.support.rank_log import RankLog
from tests.support.rank_losses import START_S, RankLosses, pauses, percentiles
from tests.support.thoroughness import FULL
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

NUM_REQUESTS = int(os.environ.get("ROSTER_TEST_REQUESTS", 500))
NUM_EVENTS = int(os.environ.get("ROSTER_TEST_EVENTS", 20))
RESULT = os.environ.get("ROSTER_CHAOS_RESULT")
RANKS = int(os.environ.get("ROSTER_CHAOS_RANKS", "2"))
MAX_TOKENS = int(os.environ.get("ROSTER_CHAOS_TOKENS", "64"))
SEED = int(os.environ.get("ROSTER_CHAOS_SEED", random.randrange(1 << 32)))
NUM_DISTINCT, CONCURRENCY = 100, 12
RUNNER = {
    "device": "cpu", "deterministic": True, "draft": "ngram", "tensor_parallel": RANKS, "threads": 1, "slots": 12,
    "kv_tokens": 640, "max_step_tokens": 128, "silence_s": 1.0, "rank_timeout_s": 2.5,
}  # fmt: skip
SCHEDULER = {"flush_ms": 5, "runner_timeout_s": 10, "no_runner_s": 120, "check": True}

pytestmark = pytest.mark.skipif(
    not FULL and RESULT is None, reason="several minutes: test_ranks and test_real_model lose ranks in CI"
)


@dataclass(frozen=True, slots=True)
class Request:
    """One of the requests that are sent again and again."""

    prompt: list[int]
    temperature: float
    seed: int

    async def answer(self, client: RosterClient, gaps: list[tuple[float, float]]) -> Choice:
        """Returns the answer, with the two likeliest tokens at each position; notes its deltas' times in `gaps`."""
        stream = client.generate(
            self.prompt,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            logprobs=2,
            temperature=self.temperature,
            seed=self.seed,
        )
        heard_s: float | None = None
        async for event in stream:
            if isinstance(event, Delta):
                now_s = time.monotonic()
                if heard_s is not None:
                    gaps.append((heard_s, now_s))
                heard_s = now_s
        return (await stream.completion()).choices[0]


def requests(rng: random.Random) -> list[Request]:
    """Returns requests of which half are greedy, and half begin alike."""
    stem = [rng.randrange(NUM_TOKENS) for _ in range(32)]
    return [
        Request(
            stem[: rng.choice((0, 32))] + [rng.randrange(NUM_TOKENS) for _ in range(rng.randrange(1, 16))],
            rng.choice((0.0, 1.0)),
            seed,
        )
        for seed in range(NUM_DISTINCT)
    ]


@pytest.mark.timeout(7200)
async def test_every_answer_has_the_bits_of_the_solo_one(tmp_path: Path) -> None:
    skip_where_refused()
    print(f"seed {SEED}")
    rng, begin = random.Random(SEED), time.monotonic()
    model = make_tiny_model("llama", tmp_path / "tiny", SEED % 1000, num_hidden_layers=2)
    with RosterProcesses(
        tmp_path, scheduler=SCHEDULER, runner={**RUNNER, "model": str(model)}, ready_s=START_S
    ) as roster:
        trouble = RankLosses(RankLog(tmp_path / "runner.log"), RANKS, NUM_EVENTS, rng)
        distinct = requests(rng)
        async with RosterClient(roster.address, reconnect_s=START_S) as client:
            solo = [await request.answer(client, []) for request in distinct]
            solo_s = time.monotonic() - begin
            load = Load(client, distinct, solo, trouble)
            async with asyncio.TaskGroup() as group:
                for _ in range(CONCURRENCY):
                    group.create_task(load.work())
                group.create_task(trouble.run())
        status = await settled(roster, 1)
    assert load.equal + len(load.refused) == NUM_REQUESTS and len(load.refused) <= max(1, NUM_REQUESTS // 1000)
    losses, waited = trouble.losses, pauses(trouble.losses, load.gaps)
    killed = {index: streams for index, streams in waited.items() if losses[index].is_kill}
    result = {
        "ranks": RANKS,
        "requests": NUM_REQUESTS,
        "tokens_each": MAX_TOKENS,
        "equal_to_solo": load.equal,
        "refused_as_poison": len(load.refused),
        "kills": sum(loss.is_kill for loss in losses),
        "stops": sum(not loss.is_kill for loss in losses),
        "losses_that_interrupted_streams": len(waited),
        "interrupted_streams": sum(map(len, waited.values())),
        "pause_after_a_kill_s": percentiles([min(streams) for streams in killed.values()]),
        "formed_again_after_a_kill_s": percentiles([loss.formed_s - loss.at_s for loss in losses if loss.is_kill]),
        "preemptions": status.totals.preemptions,
        "seconds": round(time.monotonic() - begin, 1),
        "seconds_alone": round(solo_s, 1),
        "load": os.getloadavg(),
    }
    print(json.dumps(result, indent=1))
    if RESULT:
        Path(RESULT).write_text(json.dumps(result, indent=1) + "\n")
    assert len(losses) == NUM_EVENTS and waited and status.totals.preemptions


class Load:
    """Sends NUM_REQUESTS requests, as many with each event, and compares the answers."""

    def __init__(
        self, client: RosterClient, distinct: Sequence[Request], solo: Sequence[Choice], trouble: RankLosses
    ) -> None:
        self._client, self._distinct, self._solo, self._trouble = client, distinct, solo, trouble
        self._next = 0
        self.equal = 0
        self.refused: list[str] = []
        self.gaps: list[tuple[float, float]] = []

    async def work(self) -> None:
        """Sends one request after the other. Raises AssertionError at the first wrong answer."""
        while self._next < NUM_REQUESTS:
            number = self._next
            self._next += 1
            while number * NUM_EVENTS >= (len(self._trouble.losses) + 1) * NUM_REQUESTS:
                await asyncio.sleep(0.02)
            index = number * 37 % NUM_DISTINCT
            try:
                answer = await self._distinct[index].answer(self._client, self.gaps)
            except RosterError as error:
                if error.code is not grpc.StatusCode.INTERNAL:
                    raise
                self.refused.append(str(error))
                continue
            alone = self._solo[index]
            assert (answer.token_ids, answer.text, answer.logprobs) == (alone.token_ids, alone.text, alone.logprobs)
            self.equal += 1
