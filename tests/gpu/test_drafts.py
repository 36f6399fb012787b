"""Drafts on a GPU: streams against those of a backend without drafts."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch

from roster_protos import plan_pb2
from runner_svc.execution.runner import LaunchedPlan, Runner
from tests.support.plans import SAMPLE, admission, ints, plan, sampling
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from bench.common.told_drafts import ToldDrafts
from runner_svc.gpu.backend import CudaBackend
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.drafting_backend import DraftingCudaBackend
from runner_svc.interface.draft_launchers import DraftLaunchers
from tests.support.gpu_backends import BLOCK_SIZE, FAMILIES, NUM_SLOTS, load  # imports CuPy

LENGTH = 48  # tokens of each answer
# Largest gap between the likeliest tokens that counts as a near tie, as a share of the log-probabilities' deviation.
TIE = 0.15


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


class Drafted:
    """Sequences that decode in all slots, two plans in flight."""

    def __init__(self, backend: CudaBackend, prompts: list[list[int]], temperature: float) -> None:
        self.runner = Runner(backend)
        self.runner.reset()
        self.backend, self.prompts = backend, prompts
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.drafted = self.accepted = 0
        self._known = [len(prompt) for prompt in prompts]  # upper bounds
        self._pending: deque[tuple[LaunchedPlan, list[int]]] = deque()
        blocks = -(-(max(self._known) + LENGTH + 32) // BLOCK_SIZE)
        admissions = [
            admission(
                slot,
                prompt,
                range(1 + slot * blocks, 1 + (slot + 1) * blocks),
                seed=slot,
                sampling=sampling(temperature=temperature, logprobs=2),
            )
            for slot, prompt in enumerate(prompts)
        ]
        extents = [(slot, 0, len(prompt), SAMPLE) for slot, prompt in enumerate(prompts)]
        result = self.runner.execute(1, plan(admissions=admissions, extents=extents))
        self.gaps: list[list[float]] = [[] for _ in prompts]
        self._take(result, [0] * len(prompts))
        self._known = [known + 1 for known in self._known]

    def run(self, rng: random.Random, most: int) -> None:
        """Decodes until every answer has LENGTH tokens, each row with up to `most` drafts."""
        number = 2
        while min(map(len, self.tokens)) < LENGTH:
            drafts = [rng.randint(0, most) for _ in self.prompts]
            room = [len(prompt) + LENGTH + 30 for prompt in self.prompts]
            drafts = [min(k, max(0, r - known)) for k, r, known in zip(drafts, room, self._known, strict=True)]
            extents = [(slot, -1 if most else self._known[slot] - 1, 1 + k, SAMPLE) for slot, k in enumerate(drafts)]
            launched = self.runner.launch(number, plan(extents=extents, drafts=drafts if most else ()))
            self._pending.append((launched, drafts))
            self._known = [known + 1 + k for known, k in zip(self._known, drafts, strict=True)]
            if len(self._pending) == 2:
                self._answer()
            number += 1
        while self._pending:
            self._answer()

    def _answer(self) -> None:
        launched, drafts = self._pending.popleft()
        result = launched.wait()
        self._take(result, drafts)
        for slot, (k, count) in enumerate(zip(drafts, result.token_counts, strict=True)):
            self._known[slot] -= 1 + k - count

    def _take(self, result: plan_pb2.Result, drafts: list[int]) -> None:
        assert not any(result.statuses)
        tokens = ints(result.tokens)
        for entry in result.logprobs:
            tops = np.frombuffer(entry.top_values, np.float32).reshape(-1, 2)
            assert len(tops) == result.token_counts[entry.row]
            self.gaps[entry.row] += (tops[:, 0] - tops[:, 1]).tolist()
        for slot, count in enumerate(result.token_counts):
            self.tokens[slot] += tokens[:count]
            tokens = tokens[count:]
        self.drafted += sum(result.drafted)
        self.accepted += sum(result.token_counts) - len(drafts) if result.drafted else 0


def near_ties(drafted: Drafted, plain: Drafted, temperature: float) -> int:
    """Returns the number of answers that differ from those without drafts; each first difference is a near tie."""
    ties = 0
    for mine, wanted, gaps in zip(drafted.tokens, plain.tokens, plain.gaps, strict=True):
        if mine[:LENGTH] != wanted[:LENGTH]:
            first = next(i for i, (a, b) in enumerate(zip(mine, wanted, strict=False)) if a != b)
            print(f"token {first} is {mine[first]}, not {wanted[first]}; gap {gaps[first]:.4f}")
            ties += 1
            assert temperature > 0 or gaps[first] < TIE * np.std(np.array(gaps)) + 0.05
    return ties


def told(folder: Path, fp8_cache: bool) -> tuple[DraftingCudaBackend, ToldDrafts]:
    """Returns a backend and its drafter, whose texts are still empty."""
    made: list[ToldDrafts] = []

    def make(kernels: DraftLaunchers, slots: object) -> ToldDrafts:
        made.append(ToldDrafts(kernels, slots))  # type: ignore[arg-type]
        return made[-1]

    backend = load(folder, fp8_cache=fp8_cache, num_slots=8, drafts=DraftOptions("told", 7, make))
    assert isinstance(backend, DraftingCudaBackend)
    return backend, made[-1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("family", "fp8_cache"), [("llama", False), ("qwen3", True), ("gemma3", False)])
def test_streams_are_those_without_drafts_up_to_near_ties(
    family: str, fp8_cache: bool, temperature: float, tmp_path: Path, rng: random.Random
) -> None:
    """Two plans in flight; the drafter knows the texts and errs three times in ten. After a tie texts may differ."""
    folder = make_tiny_model(family, tmp_path / "tiny", rng.randrange(1000), torch.bfloat16, **FAMILIES[family])
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 15))] for _ in range(8)]
    plain = Drafted(load(folder, fp8_cache=fp8_cache, num_slots=8), prompts, temperature)
    plain.run(rng, 0)
    backend, drafter = told(folder, fp8_cache)
    for slot, (prompt, tokens) in enumerate(zip(prompts, plain.tokens, strict=True)):
        text = torch.tensor(prompt + [t if rng.random() < 0.7 else rng.randrange(NUM_TOKENS) for t in tokens])
        drafter.texts[slot, : len(text)] = text.int()
    drafted = Drafted(backend, prompts, temperature)
    drafted.run(rng, 7)
    assert drafted.drafted > 100 and drafted.accepted > 20, "hardly any draft was tried"
    ties = near_ties(drafted, plain, temperature)
    print(f"{family}: ties {ties} of 8, drafted {drafted.drafted}, accepted {drafted.accepted}")
    assert ties <= 4
    assert len(backend.verify_graphs.captured) > 0


def test_the_ngram_drafter_changes_no_text(tmp_path: Path, rng: random.Random) -> None:
    folder = make_tiny_model("llama", tmp_path / "tiny", rng.randrange(1000), torch.bfloat16, **FAMILIES["llama"])
    pattern = [rng.randrange(NUM_TOKENS) for _ in range(5)]
    prompts = [(pattern * 4)[: rng.randint(8, 15)] for _ in range(8)]
    plain = Drafted(load(folder, num_slots=8), prompts, 0.0)
    plain.run(rng, 0)
    drafted = Drafted(load(folder, num_slots=8, drafts=DraftOptions()), prompts, 0.0)
    drafted.run(rng, 5)
    equal = sum(mine[:LENGTH] == wanted[:LENGTH] for mine, wanted in zip(drafted.tokens, plain.tokens, strict=True))
    print(f"drafted {drafted.drafted}, accepted {drafted.accepted}, {equal} of 8 texts equal")
    assert drafted.drafted > 50 and equal >= 4


def test_memory_for_logits_is_left_by_the_pool(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "tiny", 1, torch.bfloat16, **FAMILIES["llama"])
    backend = load(folder, num_blocks=None, num_slots=NUM_SLOTS, drafts=DraftOptions())
    assert isinstance(backend, DraftingCudaBackend)
    assert backend.max_sampled == NUM_SLOTS * 8 == len(backend._steps.logits)
    assert backend.num_blocks > 100
