"""Tokens and log-probabilities through the whole engine equal those of a request that ran alone, bit for bit.

No near tie is excused. Requests are crowded into a pool so small that they are preempted, drafted for with lies, hit
prefixes of each other, have several choices, are swapped to host pools and loaded from them, and go on when the
scheduler restarts and when a runner is lost. So they do with a fixed number of ranks.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roster_protos import engine_pb2, plan_pb2
from runner_svc.backends.torch_backend import TorchBackend
from scheduler_svc.link.runner_events import Loss
from tests.support.drafters import let_draft
from tests.support.host_backend import no_progress
from tests.support.in_process import Stack, Stream
from tests.support.ranked_backend import RankedBackend
from tests.support.scripted_drafts import RandomDrafts
from tests.support.tested_backend import poison
from tests.support.thoroughness import choice, count
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

pytestmark = pytest.mark.usefixtures("deterministic_cpu")

MAX_TOKENS, TOP = 24, 3


class ScoredStack(Stack):
    """Keeps the log-probabilities of each token of a stream, as bytes: its own and the likeliest with theirs."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.scores_of_hashes = False
        self.scores: dict[int, dict[int, tuple[bytes, ...]]] = defaultdict(dict)
        """By the stream's id() and the token's index."""
        self.rescored_otherwise = 0
        """Tokens that a scheduler's successor sent again with other scores."""

    def _take_step(self, step: engine_pb2.Step) -> None:
        rows = {row.row: row for row in step.logprobs}
        ids, tokens = np.frombuffer(step.sequence_ids, "<u8").tolist(), np.frombuffer(step.tokens, "<i4").tolist()
        for index, (sequence_id, token) in enumerate(zip(ids, tokens, strict=True)):
            stream, row = self.streams[sequence_id], rows[index]
            score = (row.values, row.top_ids, row.top_values)
            self.rescored_otherwise += self.scores[id(stream)].setdefault(stream.at, score) != score
            stream.take(token)
        for end in step.ends:
            self.streams[end.sequence_id].finish(end)

    def answer(self, stream: Stream) -> list[tuple[int, tuple[bytes, ...] | None]]:
        """Returns the tokens of a stream with their scores; None for those whose scores an old scheduler had."""
        scores = self.scores[id(stream)]
        return [(token, scores.get(index)) for index, token in enumerate(stream.tokens)]


@dataclass(frozen=True)
class Loading:
    """A model, and how many ranks compute it, each with its part."""

    folder: Path
    ranks: int

    def load(self, pool_tokens: int, *, deterministic: bool = True) -> TorchBackend | RankedBackend:
        sizes = {"num_blocks": pool_tokens // 8, "block_size": 8, "num_slots": 6, "max_step_tokens": 128}
        loaded: TorchBackend | RankedBackend
        if self.ranks == 1:
            unused = self.folder / "unused"
            loaded = TorchBackend.load(
                str(self.folder), cache_folder=unused, progress=no_progress, deterministic=deterministic, **sizes
            )
        else:
            loaded = RankedBackend.load(self.folder, self.ranks, deterministic=deterministic, **sizes)
        poison(loaded.cache.data)
        return loaded


def random_request(rng: random.Random, stem: list[int]) -> dict[str, Any]:
    own = [rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 12))]
    sampling = plan_pb2.Sampling(
        temperature=rng.choice((0.0, 0.8, 1.5)),
        top_p=rng.choice((1.0, 0.9)),
        top_k=rng.choice((0, 40)),
        repetition_penalty=rng.choice((1.0, 1.2)),
        logprobs=TOP,
    )
    return {
        "prompt": stem[: rng.choice((0, 9, 20))] + own,
        "max_tokens": rng.randint(4, MAX_TOKENS),
        "sampling": sampling,
        "seed": rng.randrange(2**32),
        "n": rng.choice((1, 1, 1, 3)),
    }


def crowd(
    loading: Loading, rng: random.Random, requests: list[dict[str, Any]], *, deterministic: bool
) -> tuple[list[Any], int]:
    """Returns the answers of requests that run together, in trouble; and the tokens scored twice, and differently."""
    backends = [loading.load(64, deterministic=deterministic) for _ in range(2)]
    let_draft(backends[0], rng, max_drafts=7)
    stack = ScoredStack(depth=rng.randint(1, 3), policy_parameters={"step_tokens": rng.choice((9, 24, 128))})
    stack.drafts = RandomDrafts(rng)
    host_blocks = rng.choice((0, 6, 32))
    session = stack.add_runner(backends[0], host_blocks, random.Random(rng.random()))
    submitted = []
    for request in requests:
        submitted.append(stack.submit(**request))
        for _ in range(rng.randrange(5)):
            stack.turn(rng)
    for _ in range(40):
        stack.turn(rng)
    scheduler = stack.engine.pool.schedulers[session]
    print(f"{scheduler.preemptions} preemptions, {scheduler.swaps} swaps, {host_blocks} host blocks")
    stack.restart_scheduler()
    for _ in range(rng.randrange(10, 40)):
        stack.turn(rng)
    stack.runners.kill(next(iter(stack.runners.runners)), Loss.LEFT)
    stack.add_runner(backends[1], host_blocks, random.Random(rng.random()))
    stack.run(rng)
    stack.assert_clean()
    return [[stack.answer(stream) for stream in request.streams] for request in submitted], stack.rescored_otherwise


def alone(loading: Loading, requests: list[dict[str, Any]], *, deterministic: bool) -> list[Any]:
    """Returns the answers of requests, each alone in a stack of its own without a former one's cache."""
    backend, answers = loading.load(400, deterministic=deterministic), []
    for request in requests:
        poison(backend.cache.data)
        stack = ScoredStack(depth=1, prefix_sharing=False)
        stack.add_runner(backend)
        submitted = stack.submit(**request)
        stack.run(random.Random(0))
        answers.append([stack.answer(stream) for stream in submitted.streams])
    return answers


def differences(crowded: list[Any], solo: list[Any]) -> int:
    """Returns the number of tokens that differ, in themselves or in a bit of their log-probabilities."""
    found = 0
    for request, own in zip(crowded, solo, strict=True):
        for stream, expected in zip(request, own, strict=True):
            found += abs(len(stream) - len(expected))
            for (token, score), (wanted, wanted_score) in zip(stream, expected, strict=False):
                found += token != wanted or (score is not None and score != wanted_score)
    return found


CASES = [(family, 1) for family in ("llama", "gemma3", "qwen3-moe", "llama-longrope")] + [("olmo2", 2), ("cohere", 4)]


@pytest.mark.parametrize(("family", "ranks"), choice(CASES, in_ci=[("qwen3-moe", 1), ("olmo2", 2)]))
def test_crowded_requests_equal_those_that_ran_alone(family: str, ranks: int, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    loading = Loading(make_tiny_model(family, tmp_path / family, seed % 1000), ranks)
    stem = [rng.randrange(NUM_TOKENS) for _ in range(20)]
    requests = [random_request(rng, stem) for _ in range(count(120, in_ci=7))]

    def found(requests: list[dict[str, Any]], *, deterministic: bool) -> int:
        solo = alone(loading, requests, deterministic=deterministic)
        crowded, twice = crowd(loading, rng, requests, deterministic=deterministic)
        return differences(crowded, solo) + twice

    assert found(requests, deterministic=True) == 0
    few = requests[: count(120, in_ci=3)]
    assert any(found(few, deterministic=False) for _ in range(5)), "the same test finds differences with the mode off"
