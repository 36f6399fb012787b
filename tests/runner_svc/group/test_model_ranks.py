"""Ranks in processes, over gloo, give the greedy tokens of transformers' whole model, near ties counted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from runner_svc.catalog.source import model_folder
from runner_svc.group.forming import Group, store_in
from runner_svc.hub.packaged import DEFAULT_MODEL
from runner_svc.interface.ranks import Shard
from runner_svc.model.errors import ModelNotFound
from runner_svc.model.rank_exchange import Exchange
from runner_svc.settings.runner_settings import default_cache_folder
from tests.support.deterministic_cpu import skip_where_refused
from tests.support.parity import FLOAT32, Parity
from tests.support.rank_process import Request, tokens_of_ranks
from tests.support.ranks import together
from tests.support.tested_backend import reference
from tests.support.thoroughness import FULL, choice, count
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

CASES = [("llama", 2), ("llama-tied", 4), ("olmo2", 2), ("olmo2", 4), ("gpt-oss", 2), ("cohere", 2), ("glm4-moe", 4)]


@pytest.mark.parametrize(("family", "size"), choice(CASES, in_ci=[("olmo2", 2)]))
def test_processes_give_the_tokens_of_generate(family: str, size: int, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder = make_tiny_model(family, tmp_path / "model", seed)
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 30))] for _ in range(3)]
    first, *others = tokens_of_ranks(folder, size, tmp_path / "store", Request(prompts, 12, 13, seed))
    assert all(other == first for other in others)
    parity = Parity(reference(folder, FLOAT32), FLOAT32)
    parity.check(prompts, first, 12)
    parity.assert_few_ties()


@pytest.mark.skipif(not FULL, reason="loads SmolLM2 four times: ROSTER_TEST_FULL=1 runs it")
def test_smollm2_on_three_ranks(tmp_path: Path) -> None:
    """It has 9 heads, 3 of keys."""
    try:
        folder = model_folder(DEFAULT_MODEL, default_cache_folder(), lambda what, share: None)
    except ModelNotFound as error:
        pytest.skip(str(error))
    tokenizer, max_tokens = Tokenizer.from_file(str(folder / "tokenizer.json")), count(24, in_ci=8)
    texts = ("The capital of France is", "def fibonacci(n):\n", "The 3 primary colours are red,")
    prompts = [tokenizer.encode(text).ids for text in texts]
    first, *others = tokens_of_ranks(folder, 3, tmp_path / "store", Request(prompts, max_tokens, 64, 1))
    assert all(other == first for other in others)
    assert "Paris" in tokenizer.decode(first[0])
    parity = Parity(reference(folder, FLOAT32), FLOAT32)
    parity.check(prompts, first, max_tokens)
    parity.assert_few_ties()


@pytest.mark.skipif(not FULL, reason="starts four processes: ROSTER_TEST_FULL=1 runs it")
def test_deterministic_processes_do_not_depend_on_chunks(tmp_path: Path) -> None:
    skip_where_refused()
    rng = random.Random(4)
    folder = make_tiny_model("llama", tmp_path / "model", 4)
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 30))] for _ in range(4)]
    answers = [
        tokens_of_ranks(folder, 2, tmp_path / f"store-{seed}", Request(prompts, 16, chunk, seed, deterministic=True))
        for seed, chunk in ((1, 40), (2, 3))
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_in_order_have_the_bits_of_a_row_alone(size: int, tmp_path: Path) -> None:
    """A ring's do not always: it begins to add each part of the bytes at another rank."""
    rows = [torch.randn(33, 48, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]

    def run(shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
        group = Group(shard, store_in(tmp_path, size))
        group.form()
        exchange, own = Exchange(group, in_order=True), rows[shard.rank]
        alone = torch.cat([exchange.summed(own[place : place + 1].clone()) for place in range(len(own))])
        return exchange.summed(own.clone()), alone

    sums = together(size, run)
    assert all(torch.equal(one, sums[0][0]) for pair in sums for one in pair)
    assert torch.allclose(sums[0][0], torch.stack(rows).sum(dim=0), atol=1e-5)
