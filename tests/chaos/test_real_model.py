"""A real forward pass under chaos: services die or drain and the policy changes, and every answer is its solo answer.

    ROSTER_CHAOS_MODEL=smollm2 ROSTER_TEST_REQUESTS=60 ROSTER_CHAOS_KILLS=8 ROSTER_CHAOS_RESULT=FILE pytest ...

uses a real model. The default is a tiny random one, whose tokens are also compared with transformers'. The runner's
pool is so small that answers are preempted. Greedy answers are compared exactly, up to ties of logits (see
tests/support/ties.py). ROSTER_TEST_DEVICE=cuda serves from a GPU.

On a CPU the runner is deterministic and drafts: then no tie is excused, log-probabilities are compared bit for bit, and
every other answer is drawn at temperature 1. ROSTER_CHAOS_DETERMINISTIC=0 compares without the promise, and 1 makes it
on a GPU, where the tiny model's numbers are those of tests/gpu/test_determinism.py, not transformers'.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.common.provenance import provenance, write_results
from roster_client.client import RosterClient
from roster_client.client.admin import AdminClient
from roster_client.client.errors import RosterError, UnavailableError
from roster_client.client.events import Choice, Delta, FinishReason
from tests.support.chaos import settled
from tests.support.deterministic_cpu import refusal
from tests.support.processes import RosterProcesses
from tests.support.rank_log import RankLog
from tests.support.tested_device import NEEDS_DEVICE, PROCESS_DEVICE, PROCESS_DTYPE
from tests.support.thoroughness import choice, count
from tests.support.ties import BFLOAT16_TIE_GAP, FLOAT16_TIE_GAP, TIE_GAP, Parting, parting

MODEL = os.environ.get("ROSTER_CHAOS_MODEL")
NUM_REQUESTS = int(os.environ.get("ROSTER_TEST_REQUESTS", count(12, in_ci=5)))
RUNNER_KILLS = int(os.environ.get("ROSTER_CHAOS_KILLS", "1"))
RANKS = [int(ranks) for ranks in os.environ.get("ROSTER_CHAOS_RANKS", "1,2").split(",")]
"""Numbers of ranks of the runner; with several, one of them is killed as often as the whole runner ends."""
SCHEDULER_ENDS = max(1, RUNNER_KILLS // 3)
RESULT = os.environ.get("ROSTER_CHAOS_RESULT")
MAX_TOKENS = int(os.environ.get("ROSTER_CHAOS_TOKENS", "48" if MODEL else count(160, in_ci=96)))
GAP = TIE_GAP if PROCESS_DEVICE == "cpu" else BFLOAT16_TIE_GAP if MODEL else FLOAT16_TIE_GAP
ON_CPU = PROCESS_DEVICE == "cpu"
DETERMINISTIC = os.environ.get("ROSTER_CHAOS_DETERMINISTIC", "1" if ON_CPU else "0") != "0"
"""Unless the CPU can not be."""
KV_TOKENS = -(-(5 * MAX_TOKENS // 2 + (20 if MODEL else 80)) // 32) * 32
"""Room for two or three of the four slots' whole texts; prompts are longer in bytes than in tokens of a real model."""
DTYPE = "bfloat16" if DETERMINISTIC and not ON_CPU else "auto" if MODEL else PROCESS_DTYPE
RUNNER = {
    "device": PROCESS_DEVICE, "dtype": DTYPE, "slots": 4, "threads": 1,
    "kv_tokens": KV_TOKENS, "max_step_tokens": 512, "silence_s": 1.0,
}  # fmt: skip
SCHEDULER = {"flush_ms": 0, "drain_s": 2}
POLICIES = ("fcfs", "fair", "sjf", "orca", "auto")
CONCURRENCY = 8
READY_S = 240.0
WORDS = ["the", "of", "river", "stone", "lamp", "seven", "green", "never", "under", "writes", "gives", "king", "salt"]

pytestmark = NEEDS_DEVICE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Model that the runner serves."""
    if MODEL:
        return MODEL
    from tests.support.tested_backend import TESTED

    folder = tmp_path_factory.mktemp("model") / "tiny"
    if DTYPE == "bfloat16":
        import torch

        from tests.support.tiny_models import make_tiny_model

        return str(make_tiny_model("llama", folder, 0, torch.bfloat16, hidden_size=256, intermediate_size=128))
    return str(TESTED.make_model("llama", folder))


@dataclass
class Trouble:
    """Failures at given numbers of received tokens: thresholds in order, each with what happens."""

    roster: RosterProcesses
    plan: list[tuple[int, str]]
    log: RankLog
    rng: random.Random
    tokens: int = 0
    done: list[str] = field(default_factory=list)
    cut_short: int = 0
    """Answers that a scheduler's drain ended; each request was sent once more."""
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    def count(self, tokens: int) -> None:
        """Counts received tokens, and causes the next failure at its threshold."""
        self.tokens += tokens
        if self.plan and self.tokens >= self.plan[0][0]:
            _, what = self.plan.pop(0)
            self.done.append(what)
            self._running.add(asyncio.create_task(self._cause(what)))

    async def _cause(self, what: str) -> None:
        name, _, event = what.partition(" ")
        if name == "rank":
            await asyncio.to_thread(self._kill_rank)
        elif name == "policy":
            await self._set_policy(POLICIES[len(self.done) % len(POLICIES)])
        else:
            await asyncio.to_thread(self._restart, name, signal.SIGKILL if event == "killed" else signal.SIGTERM)

    def _restart(self, name: str, number: signal.Signals) -> None:
        self.roster.end(name, number)
        self.roster.start_one(name)

    def _kill_rank(self) -> None:
        """Kills a rank once its group has formed; the launcher starts it again."""
        self.log.await_epoch(1, READY_S)
        os.kill(self.rng.choice(list(self.log.pids().values())), signal.SIGKILL)

    async def _set_policy(self, policy: str) -> None:
        async with AdminClient(self.roster.admin_address) as admin:
            while True:
                try:
                    await admin.set_policy(policy, deadline_s=2)
                    return
                except RosterError:  # the scheduler starts
                    await asyncio.sleep(0.1)

    async def over(self) -> None:
        """Returns once all services have been restarted."""
        await asyncio.gather(*self._running)


def trouble(roster: RosterProcesses, total: int, rng: random.Random, log: RankLog, ranks: int) -> Trouble:
    """Returns evenly spread ends of the runner and of the scheduler, by turns kills and drains, and policy changes."""
    ends = ["killed", "drained"] if rng.random() < 0.5 else ["drained", "killed"]
    events = [f"runner {ends[index % 2]}" for index in range(RUNNER_KILLS)]
    for index in range(SCHEDULER_ENDS):
        events.insert((2 * index + 1) * len(events) // (2 * SCHEDULER_ENDS), f"scheduler {ends[1 - index % 2]}")
    for index in range(SCHEDULER_ENDS):
        events.insert((2 * index + 1) * len(events) // (2 * SCHEDULER_ENDS) + 1, "policy changed")
    for index in range(RUNNER_KILLS if ranks > 1 else 0):
        events.insert(0 if index == 0 else rng.randrange(len(events)), "rank killed")
    plan = [(total * (place + 1) // (len(events) + 1), what) for place, what in enumerate(events)]
    return Trouble(roster, plan, log, rng)


def is_deterministic() -> bool:
    """Returns whether the runner is; see `deterministic_cpu` for why it may not be."""
    return DETERMINISTIC and not (ON_CPU and refusal())


async def answer(
    client: RosterClient, index: int, prompt: str, watch: Trouble | None = None, *, deterministic: bool
) -> Choice:
    """Returns the answer to a prompt, with the two likeliest tokens at each position where they are compared."""
    more: dict[str, float] = {"logprobs": 2} if watch is None or deterministic else {}
    more |= {"temperature": 1.0, "seed": index} if deterministic and index % 2 else {"temperature": 0.0}
    stream = client.generate(prompt, raw=True, max_tokens=MAX_TOKENS, ignore_eos=True, **more)  # type: ignore[arg-type]
    async for event in stream:
        if watch is not None and isinstance(event, Delta):
            watch.count(len(event.token_ids))
    return (await stream.completion()).choices[0]


async def answer_in_trouble(
    client: RosterClient, index: int, prompt: str, watch: Trouble, *, deterministic: bool
) -> Choice:
    """Returns the answer, asked for until no shutdown comes between."""
    while True:
        try:
            choice = await answer(client, index, prompt, watch, deterministic=deterministic)
        except UnavailableError:  # it had not begun, so the caller must send it again
            await asyncio.sleep(0.2)
            continue
        if choice.finish is None or choice.finish.reason is not FinishReason.UNAVAILABLE:
            return choice
        watch.cut_short += 1


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", choice(RANKS, in_ci=RANKS[:1]) if ON_CPU else [1])
async def test_every_answer_is_its_solo_answer_up_to_ties(tmp_path: Path, model: str, ranks: int) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompts = [" ".join(rng.choices(WORDS, k=rng.randrange(2, 14))) for _ in range(NUM_REQUESTS)]
    deterministic = is_deterministic()
    runner = {"model": model, **RUNNER, **({"deterministic": True, "draft": "ngram"} if deterministic else {})}
    runner["tensor_parallel"] = ranks
    with RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=runner, ready_s=READY_S) as roster:
        async with RosterClient(roster.address, reconnect_s=READY_S) as client:
            tokenized = [await client.tokenize(prompt) for prompt in prompts]
            solo = [
                await answer(client, index, prompt, deterministic=deterministic) for index, prompt in enumerate(prompts)
            ]
            watch = trouble(roster, NUM_REQUESTS * MAX_TOKENS, rng, RankLog(tmp_path / "runner.log"), ranks)
            gate = asyncio.Semaphore(CONCURRENCY)

            async def one(index: int, prompt: str) -> Choice:
                async with gate:
                    return await answer_in_trouble(client, index, prompt, watch, deterministic=deterministic)

            answers = await asyncio.gather(*(one(*each) for each in enumerate(prompts)))
            await watch.over()
        status = await settled(roster, 1, within_s=READY_S)
    ends = RUNNER_KILLS * (1 if ranks == 1 else 2)
    assert len(watch.done) == ends + 2 * SCHEDULER_ENDS, "the load ended before all failures"
    partings = []
    for prompt, alone, other in zip(prompts, solo, answers, strict=True):
        parted = parting(alone.token_ids, alone.logprobs, other.token_ids)
        if parted is None:
            assert alone.text == other.text, prompt
            assert not deterministic or alone.logprobs == other.logprobs, prompt
        else:
            assert not deterministic and parted.is_tie(GAP), (prompt, parted)
            partings.append(parted)
    report(partings, watch, status.totals.preemptions, ranks, deterministic=deterministic)
    if not MODEL and DTYPE != "bfloat16":
        greedy = [index for index in range(NUM_REQUESTS) if not (deterministic and index % 2)]
        texts = [answers[index].token_ids for index in greedy]
        compare_with_transformers(Path(model), [tokenized[index] for index in greedy], texts)


def compare_with_transformers(folder: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
    from tests.support.parity import Parity
    from tests.support.tested_backend import TESTED, reference

    parity = Parity(reference(folder, TESTED.tiny), TESTED.tiny)
    parity.check([list(prompt) for prompt in prompts], [list(answer) for answer in answers], MAX_TOKENS)
    parity.assert_few_ties()


def report(partings: list[Parting], watch: Trouble, preemptions: int, ranks: int, *, deterministic: bool) -> None:
    result = {
        "ranks": ranks,
        "model": MODEL or "tiny random llama",
        "device": PROCESS_DEVICE,
        "deterministic": deterministic,
        "requests": NUM_REQUESTS,
        "tokens_each": MAX_TOKENS,
        "troubles": dict(Counter(watch.done)),
        "cut_short_by_a_drain": watch.cut_short,
        "preemptions_since_the_last_scheduler": preemptions,
        "equal_to_solo": NUM_REQUESTS - len(partings),
        "parted_at_a_tie": len(partings),
        "largest_gap": max((parted.gap for parted in partings), default=0.0),
        "gap_that_is_a_tie": GAP,
    }
    print(json.dumps(result, indent=1))
    if RESULT:
        source = provenance("pytest", ("torch", "grpcio", "pyzmq", "numpy"))
        write_results(Path(RESULT), source, result)
