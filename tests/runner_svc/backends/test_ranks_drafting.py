"""What drafts does so alike on every rank, and changes no token: a model of its own, Medusa's heads, EAGLE's layers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from runner_svc.execution.runner import Runner
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup.backend_factory import build_backend
from tests.support.eagle_layers import random_layer, save_layer
from tests.support.host_backend import no_progress
from tests.support.known_texts import Stream, copies, stream_all
from tests.support.medusa_models import cycle_heads, make_cycle_model, save_heads
from tests.support.ranked_backend import RankedBackend
from tests.support.tested_backend import poison
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model


def load(model: Path, draft: str, size: int = 2) -> RankedBackend:
    read = RunnerSettings.read(
        device="cpu", model=str(model), draft=draft, slots=4, kv_tokens=640, block_size=4, max_step_tokens=128
    )
    backend = RankedBackend(size, lambda ranks: build_backend(read, "cpu", no_progress, ranks))  # type: ignore[arg-type]
    poison(backend.cache.data)  # type: ignore[arg-type]
    return backend


def check(backend: Any, temperature: float = 0.0, max_tokens: int = 12) -> float:
    """Compares streams with drafts and without; returns the share of drafts that were accepted."""
    dice = random.Random(5)
    prompts = [[dice.randrange(NUM_TOKENS) for _ in range(dice.choice([2, 5, 12]))] for _ in range(4)]
    plain = [Stream(prompt, dice.getrandbits(64), {"temperature": temperature}) for prompt in prompts]
    drafted = copies(plain)
    stream_all(backend, plain, max_tokens, None)
    counts = stream_all(backend, drafted, max_tokens, dice)
    assert [stream.tokens for stream in drafted] == [stream.tokens for stream in plain]
    assert counts.drafted > 12
    return counts.accepted / counts.drafted


def test_a_draft_model_is_whole_on_each_rank(tmp_path: Path) -> None:
    """The target itself, so that nearly all of its drafts are right."""
    folder = make_tiny_model("llama", tmp_path / "target")
    backend = load(folder, f"model:{folder}")
    assert Runner(backend).hello().drafter == f"model:{folder}"  # type: ignore[arg-type]
    assert check(backend, temperature=1.0) > 0.97


def test_heads(tmp_path: Path) -> None:
    heads = save_heads(tmp_path / "heads", cycle_heads(4, own_outputs=False))
    assert check(load(make_cycle_model(tmp_path / "model"), f"medusa:{heads}")) == 1.0


@pytest.mark.parametrize("third", [False, True])
def test_a_layer_looks_up_and_reads_the_model_on_all_ranks(third: bool, tmp_path: Path) -> None:
    torch.manual_seed(3)
    folder = make_tiny_model("llama", tmp_path / "model", num_hidden_layers=8)
    layer = save_layer(tmp_path / "layer", random_layer(third, own_embeddings=False))
    backend = load(folder, f"eagle:{layer}")
    check(backend)
    if not third:  # which has no embeddings of its own: each of its tokens is looked up by all ranks
        assert backend.communicators[0].sums > 100
