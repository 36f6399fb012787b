"""A real forward pass under chaos: runners die and the scheduler restarts, and every answer is still its solo answer.

    ROSTER_CHAOS_MODEL=smollm2 ROSTER_TEST_REQUESTS=60 ROSTER_CHAOS_KILLS=8 ROSTER_CHAOS_RESULT=FILE pytest ...

uses a real model. The default is a tiny random one, whose tokens are also compared with transformers'. Greedy answers
are compared exactly, up to ties of logits (see tests/support/ties.py). ROSTER_TEST_DEVICE=cuda serves from a GPU.

On a CPU the runner is deterministic and drafts: then no tie is excused, log-probabilities are compared bit for bit, and
every other answer is drawn at temperature 1. ROSTER_CHAOS_DETERMINISTIC=0 compares without the promise.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.common.provenance import provenance, write_results
from roster_client.client import RosterClient
from roster_client.client.errors import UnavailableError
from roster_client.client.events import Choice, Delta
from tests.support.chaos import settled
from tests.support.deterministic_cpu import TRIED_CPU
from tests.support.processes import RosterProcesses
from tests.support.tested_device import NEEDS_DEVICE, PROCESS_DEVICE, PROCESS_DTYPE
from tests.support.thoroughness import count
from tests.support.ties import BFLOAT16_TIE_GAP, FLOAT16_TIE_GAP, TIE_GAP, Parting, parting

MODEL = os.environ.get("ROSTER_CHAOS_MODEL")
NUM_REQUESTS = int(os.environ.get("ROSTER_TEST_REQUESTS", count(12, in_ci=5)))
RUNNER_KILLS = int(os.environ.get("ROSTER_CHAOS_KILLS", "1"))
RESULT = os.environ.get("ROSTER_CHAOS_RESULT")
MAX_TOKENS = int(os.environ.get("ROSTER_CHAOS_TOKENS", "48" if MODEL else "160"))
GAP = TIE_GAP if PROCESS_DEVICE == "cpu" else BFLOAT16_TIE_GAP if MODEL else FLOAT16_TIE_GAP
DETERMINISTIC = PROCESS_DEVICE == "cpu" and TRIED_CPU and os.environ.get("ROSTER_CHAOS_DETERMINISTIC", "1") != "0"
RUNNER = {
    "device": PROCESS_DEVICE, "dtype": "auto" if MODEL else PROCESS_DTYPE, "slots": 4, "threads": 1, "kv_tokens": 4096,
    "max_step_tokens": 512, "silence_s": 1.0,
    **({"deterministic": True, "draft": "ngram"} if DETERMINISTIC else {}),
}  # fmt: skip
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

    return str(TESTED.make_model("llama", tmp_path_factory.mktemp("model") / "tiny"))


@dataclass
class Trouble:
    """Kills at given numbers of received tokens: thresholds in order, each with the service to kill."""

    roster: RosterProcesses
    plan: list[tuple[int, str]]
    tokens: int = 0
    done: list[str] = field(default_factory=list)
    _killing: set[asyncio.Task[None]] = field(default_factory=set)

    def count(self, tokens: int) -> None:
        """Counts received tokens, and kills the next service at its threshold."""
        self.tokens += tokens
        if self.plan and self.tokens >= self.plan[0][0]:
            _, name = self.plan.pop(0)
            self.done.append(name)
            task = asyncio.create_task(asyncio.to_thread(self._restart, name))
            self._killing.add(task)

    def _restart(self, name: str) -> None:
        self.roster.end(name, signal.SIGKILL)
        self.roster.start_one(name)

    async def over(self) -> None:
        """Returns once all killed services have been restarted."""
        await asyncio.gather(*self._killing)


def trouble(roster: RosterProcesses, total: int) -> Trouble:
    """Returns evenly spread kills of the runner, with one of the scheduler in the middle."""
    names = ["runner"] * RUNNER_KILLS
    names.insert(len(names) // 2, "scheduler")
    return Trouble(roster, [(total * (place + 1) // (len(names) + 1), name) for place, name in enumerate(names)])


def is_drawn(index: int) -> bool:
    """Returns whether the answer to a prompt is drawn at temperature 1; others are greedy."""
    return DETERMINISTIC and index % 2 == 1


async def answer(client: RosterClient, index: int, prompt: str, watch: Trouble | None = None) -> Choice:
    """Returns the answer to a prompt, with the two likeliest tokens at each position where they are compared."""
    more: dict[str, float] = {"logprobs": 2} if watch is None or DETERMINISTIC else {}
    more |= {"temperature": 1.0, "seed": index} if is_drawn(index) else {"temperature": 0.0}
    stream = client.generate(prompt, raw=True, max_tokens=MAX_TOKENS, ignore_eos=True, **more)  # type: ignore[arg-type]
    async for event in stream:
        if watch is not None and isinstance(event, Delta):
            watch.count(len(event.token_ids))
    return (await stream.completion()).choices[0]


@pytest.mark.timeout(3600)
async def test_every_answer_is_its_solo_answer_up_to_ties(tmp_path: Path, model: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompts = [" ".join(rng.choices(WORDS, k=rng.randrange(2, 14))) for _ in range(NUM_REQUESTS)]
    runner = {"model": model, **RUNNER}
    with RosterProcesses(tmp_path, scheduler={"flush_ms": 0}, runner=runner, ready_s=READY_S) as roster:
        async with RosterClient(roster.address, reconnect_s=READY_S) as client:
            tokenized = [await client.tokenize(prompt) for prompt in prompts]
            solo = [await answer(client, index, prompt) for index, prompt in enumerate(prompts)]
            watch = trouble(roster, NUM_REQUESTS * MAX_TOKENS)
            gate = asyncio.Semaphore(CONCURRENCY)

            async def one(index: int, prompt: str) -> Choice:
                async with gate:
                    while True:
                        try:
                            return await answer(client, index, prompt, watch)
                        except UnavailableError:  # it had not begun, so the caller must send it again
                            await asyncio.sleep(0.2)

            answers = await asyncio.gather(*(one(*each) for each in enumerate(prompts)))
            await watch.over()
        await settled(roster, 1, within_s=READY_S)
    assert len(watch.done) == RUNNER_KILLS + 1, "the load ended before all kills"
    partings = []
    for prompt, alone, other in zip(prompts, solo, answers, strict=True):
        parted = parting(alone.token_ids, alone.logprobs, other.token_ids)
        if parted is None:
            assert alone.text == other.text, prompt
            assert not DETERMINISTIC or alone.logprobs == other.logprobs, prompt
        else:
            assert not DETERMINISTIC and parted.is_tie(GAP), (prompt, parted)
            partings.append(parted)
    report(partings)
    if not MODEL:
        greedy = [index for index in range(NUM_REQUESTS) if not is_drawn(index)]
        texts = [answers[index].token_ids for index in greedy]
        compare_with_transformers(Path(model), [tokenized[index] for index in greedy], texts)


def compare_with_transformers(folder: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
    from tests.support.parity import Parity
    from tests.support.tested_backend import TESTED, reference

    parity = Parity(reference(folder, TESTED.tiny), TESTED.tiny)
    parity.check([list(prompt) for prompt in prompts], [list(answer) for answer in answers], MAX_TOKENS)
    parity.assert_few_ties()


def report(partings: list[Parting]) -> None:
    result = {
        "model": MODEL or "tiny random llama",
        "device": PROCESS_DEVICE,
        "deterministic": DETERMINISTIC,
        "requests": NUM_REQUESTS,
        "tokens_each": MAX_TOKENS,
        "runner_kills": RUNNER_KILLS,
        "scheduler_restarts": 1,
        "equal_to_solo": NUM_REQUESTS - len(partings),
        "parted_at_a_tie": len(partings),
        "largest_gap": max((parted.gap for parted in partings), default=0.0),
        "gap_that_is_a_tie": GAP,
    }
    print(json.dumps(result, indent=1))
    if RESULT:
        source = provenance("pytest", ("torch", "grpcio", "pyzmq", "numpy"))
        write_results(Path(RESULT), source, result)
