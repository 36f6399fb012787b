"""A model divided among ranks gives the greedy tokens of transformers' whole one, near ties counted.

The ranks are threads that exchange through a list, or over gloo.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.decoder import cpu_decoder
from runner_svc.gguf import kept_blocks
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.folder.config_file import read_config
from runner_svc.model.gguf_conversion import converted_folder
from runner_svc.weights import cpu_products
from runner_svc.weights.on_load import OnLoad
from tests.support.drafters import let_draft
from tests.support.greedy_driver import RandomDriver
from tests.support.host_backend import no_progress
from tests.support.known_texts import Stream, stream_all
from tests.support.mixed_gguf import mixed_gguf
from tests.support.parity import FLOAT32, ROUNDED, Parity
from tests.support.ranked_backend import RankedBackend
from tests.support.tested_backend import poison, reference
from tests.support.thoroughness import choice
from tests.support.tiny_models import FAMILIES, NUM_TOKENS, make_tiny_model
from tests.support.tiny_mxfp4 import make_tiny_mxfp4
from tests.support.tiny_quantized import KINDS, make_tiny_quantized

MAX_TOKENS = 12
FAMILIES_IN_CI = ("llama-biases", "llama-tied", "gemma2", "olmo2", "glm4", "cohere", "gpt2", "gpt-oss", "glm4-moe")
"""Each way to be divided among ranks once; `model/test_rank_parts.py` puts the parts of all families together."""
IN_CI_KINDS = ("compressed-fp8-token", "auto-fp8-static", "gptq-reordered", "awq")
NOISY = replace(ROUNDED, gap=0.5)
"""Sums in another order round other numbers to e4m3, in every layer. A wrong part changes logits by much more."""
SIZES: dict[str, int] = {"num_blocks": 80, "block_size": 8, "num_slots": 4, "max_step_tokens": 128}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ranked(folder: Path, size: int, **options: Any) -> RankedBackend:
    backend = RankedBackend.load(folder, size, **SIZES, **options)
    poison(backend.cache.data)  # type: ignore[arg-type]
    return backend


EVERYWHERE = [(family, exchange) for exchange in ("list", "gloo") for family in FAMILIES]


@pytest.mark.parametrize(
    ("family", "exchange"),
    choice(EVERYWHERE, in_ci=[pair for pair in EVERYWHERE if pair[1] == "list" and pair[0] in FAMILIES_IN_CI]),
)
def test_ranks_give_the_tokens_of_generate(family: str, exchange: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder = make_tiny_model(family, tmp_path / family, seed)
    store = tmp_path / "store" if exchange == "gloo" else None
    _check(folder, Parity(reference(folder, FLOAT32), FLOAT32), rng, _sizes(folder), store)


@pytest.mark.parametrize("kind", choice(list(KINDS), in_ci=IN_CI_KINDS))
def test_quantized_matrices(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where activations are rounded per token, a rank has a scale of its own for its part of them."""
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    family = rng.choice(["llama", "qwen2", "gemma2", "olmo2"])
    print(f"seed {seed}, {family}")
    if rng.random() < 0.5:
        monkeypatch.setattr(cpu_decoder, "MAX_PLAIN_WEIGHTS", 0)
        monkeypatch.setattr(cpu_products, "has_bfloat16", lambda: False)
    is_rounded = "fp8" in kind or kind in ("fbgemm", "modelopt") or cpu_decoder.MAX_PLAIN_WEIGHTS == 0
    sizes = {"head_dim": 128, "intermediate_size": 512} if is_rounded else {}  # parts of whole blocks
    for size in (2, 4):
        folder, model = make_tiny_quantized(kind, family, tmp_path / str(size), seed, ranks=size, **sizes)
        _check(folder, Parity(model, NOISY if is_rounded else FLOAT32), rng, (size,))


ODD: dict[str, tuple[int, dict[str, int]]] = {
    "llama-biases": (4, {"intermediate_size": 206}),
    "gpt2": (4, {"n_inner": 110}),
    "gpt-oss": (3, {"intermediate_size": 200, "num_attention_heads": 6, "num_key_value_heads": 3}),
}
"""Numbers of ranks that don't divide widths."""


@pytest.mark.parametrize("family", choice([*ODD], in_ci=["gpt-oss"]))
def test_widths_without_equal_parts(family: str, tmp_path: Path) -> None:
    """The zeros behind the last ranks' parts add nothing, whatever the activation is."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    size, sizes = ODD[family]
    folder = make_tiny_model(family, tmp_path / family, seed, **sizes)
    _check(folder, Parity(reference(folder, FLOAT32), FLOAT32), random.Random(seed), (size,))


@pytest.mark.parametrize(("kind", "family"), [("mxfp4", "gpt-oss"), ("awq", "qwen3-moe"), ("gptq", "mixtral")])
def test_quantized_experts(kind: str, family: str, tmp_path: Path) -> None:
    rng = random.Random(7)
    made = make_tiny_mxfp4(tmp_path, 1) if kind == "mxfp4" else make_tiny_quantized(kind, family, tmp_path, 1)
    _check(made[0], Parity(made[1], FLOAT32), rng, (2,))


def test_blocks_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_blocks, "MOST_PLAIN_WEIGHTS", 0)
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    file, model = mixed_gguf("llama", rng)
    folder = converted_folder(file.write(tmp_path / "mixed.gguf"), tmp_path / "cache", no_progress)
    _check(folder, Parity(model, FLOAT32), rng, (2,))


def test_what_is_quantized_on_load(tmp_path: Path) -> None:
    """Activations are not rounded here, so the ranks have one rank's tokens."""
    rng = random.Random(11)
    folder = make_tiny_model("llama", tmp_path, intermediate_size=192, hidden_size=128)
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(20)] for _ in range(3)]
    one, two = (
        RandomDriver(ranked(folder, size, on_load=OnLoad("int4")), rng).generate(prompts, MAX_TOKENS, 17)
        for size in (1, 2)
    )
    assert one == two


def test_the_hello_says_how_many_add_up(tmp_path: Path) -> None:
    """Runners with another number of ranks serve the same model beside each other; a log says that they round apart."""
    folder = make_tiny_model("llama", tmp_path)
    one, two = ranked(folder, 1), ranked(folder, 2)
    assert one.model == two.model
    assert one.fingerprints["kv"] == two.fingerprints["kv"] == "float32"
    assert (one.fingerprints["numerics"], two.fingerprints["numerics"]) == ("cpu float32", "cpu float32 on 2 ranks")


@pytest.mark.parametrize("family", ["gemma2", "glm4-moe"])
def test_log_probabilities_are_close(family: str, tmp_path: Path) -> None:
    folder, dice = make_tiny_model(family, tmp_path), random.Random(9)
    prompts = [[dice.randrange(NUM_TOKENS) for _ in range(dice.choice([2, 5, 12]))] for _ in range(4)]
    streams: list[list[Stream]] = []
    for size in (1, 2, 4):
        streams.append([Stream(prompt) for prompt in prompts])
        stream_all(ranked(folder, size), streams[-1], MAX_TOKENS, None)  # type: ignore[arg-type]
    for one, *others in zip(*streams, strict=True):
        for other in others:
            assert other.tokens == one.tokens
            for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=FLOAT32.error)


def test_what_only_transformers_computes_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path)
    with pytest.raises(UnsupportedModel, match=r"Only Roster's own decoder .* 2 ranks, .* set tensor_parallel to 1"):
        ranked(folder, 2, decoder="transformers")


def test_a_rank_that_is_new_joins_ranks_that_have_drafted(tmp_path: Path) -> None:
    """The others keep what they have seen before: nothing of it may reach a token, nor what is exchanged."""
    folder = make_tiny_model("llama", tmp_path)
    backend = ranked(folder, 2)
    rng = random.Random(3)
    let_draft(backend, rng)
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 30))] for _ in range(4)]
    wanted = RandomDriver(backend, random.Random(1)).generate(prompts, MAX_TOKENS, 17)
    arguments = {"cache_folder": folder / "unused", "progress": no_progress, **SIZES}
    backend.ranks[1] = TorchBackend.load(str(folder), ranks=backend.communicators[1], **arguments)
    let_draft(backend, rng)
    for each in (1, 2):
        assert RandomDriver(backend, random.Random(each)).generate(prompts, MAX_TOKENS, 17) == wanted


def _check(folder: Path, parity: Parity, rng: random.Random, sizes: Sequence[int], store: Path | None = None) -> None:
    vocabulary = parity.model.config.get_text_config().vocab_size
    prompts = [[rng.randrange(vocabulary) for _ in range(rng.randint(1, 40))] for _ in range(3)]
    for size in sizes:
        streams = RandomDriver(
            ranked(folder, size, store=store / str(size) if store is not None else None), rng
        ).generate(prompts, MAX_TOKENS, 17)
        parity.check(prompts, streams, MAX_TOKENS)
    parity.assert_few_ties()


def _sizes(folder: Path) -> list[int]:
    """Returns the numbers of ranks that the model's heads allow."""
    config = ModelConfig.from_hugging_face(read_config(folder))
    heads, keys = config.num_heads, config.num_kv_heads
    return [size for size in (2, 3, 4) if heads % size == 0 and (keys % size == 0 or size % keys == 0)]
