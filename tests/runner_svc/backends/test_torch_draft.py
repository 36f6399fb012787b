"""Draft models of real weights: right drafts where the model is the target, exact streams whatever it is."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from roster_common.setting_sources import UnusableSettings
from runner_svc.backends.model_drafter import ModelDrafter
from runner_svc.backends.torch_backend import DraftTarget, TorchBackend
from runner_svc.backends.torch_draft import TorchDraftModel, load_draft_model
from runner_svc.drafting.drafter import Drafter
from runner_svc.execution.runner import Runner
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup.backend_factory import build_backend
from runner_svc.weights.on_load import NOTHING, OnLoad
from tests.runner_svc.backends.test_verified_rows import MOST, assert_alike, copies, streams
from tests.support.deterministic_cpu import skip_where_refused
from tests.support.host_backend import no_progress
from tests.support.known_texts import Counts, stream_all
from tests.support.parity import EXACT, FLOAT32
from tests.support.thoroughness import choice, count
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

TOKENS = count(24, in_ci=12)
SIZES: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "num_slots": 4, "max_step_tokens": 128}
PAIRS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "itself": ("llama", "llama", {}),
    "windows": ("gemma2", "gemma2", {}),
    "RoPE by length": ("llama-dynamic", "llama-dynamic", {}),
    "experts": ("qwen3-moe", "qwen3-moe", {}),
    "windows, deterministic": ("gemma2", "gemma2", {"deterministic": True}),
    "experts, deterministic": ("qwen3-moe", "qwen3-moe", {"deterministic": True}),
    "learned positions": ("gpt2", "gpt2", {}),
    "int4": ("qwen3", "qwen3", {"on_load": OnLoad("int4")}),
    "another family": ("qwen2", "gemma3", {}),
    "another model": ("llama", "llama-yarn", {}),
}
"""Target, draft model, and what is special about one of them."""


def with_draft(target: Path, draft: Path, on_load: OnLoad = NOTHING, *, deterministic: bool = False) -> TorchBackend:
    """Returns the target's backend; `on_load` is for the draft model, which is not deterministic in any case."""
    if deterministic:
        skip_where_refused()

    def make(drafted: DraftTarget) -> Drafter:
        return load_draft_model("draft", draft, drafted, draft / "unused", no_progress, on_load)

    backend = TorchBackend.load(
        str(target),
        cache_folder=target / "unused",
        progress=no_progress,
        make_drafter=make,
        max_drafts=MOST,
        deterministic=deterministic,
        **SIZES,
    )
    model = draft_model(backend)
    for cache in (backend.cache, model.cache_pass.cache):
        cache.data.fill_(torch.nan)  # so that reading an unwritten position shows
    return backend


def draft_model(backend: TorchBackend) -> TorchDraftModel:
    drafter = backend.host_slots._drafter
    assert isinstance(drafter, ModelDrafter) and isinstance(drafter._model, TorchDraftModel)
    return drafter._model


def stream_both(dice: random.Random, backend: TorchBackend, temperature: float, tokens: int = TOKENS) -> Counts:
    """Compares streams with drafts and without; returns what was drafted."""
    plain = streams(dice, temperature)
    drafted = copies(plain)
    stream_all(backend, plain, tokens, None)
    counts = stream_all(backend, drafted, tokens, dice)
    allowed = EXACT if backend.model.numerics else FLOAT32
    parted = sum(assert_alike(*pair, allowed.gap, allowed.error) for pair in zip(plain, drafted, strict=True))
    assert parted <= allowed.few
    return counts


@pytest.mark.parametrize("kind", choice([*PAIRS], in_ci=["windows, deterministic"]))
def test_a_draft_model_drafts_what_it_would_draw_itself(kind: str, tmp_path: Path) -> None:
    """With the same noise, penalties and tokens before: where it is the target, nearly all drafts are accepted."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    family, other, options = PAIRS[kind]
    target = make_tiny_model(family, tmp_path / "target")
    draft = target if other == family else make_tiny_model(other, tmp_path / "draft")
    backend = with_draft(target, draft, **options)
    for temperature in choice([0.0, 1.0], in_ci=[1.0]):
        counts = stream_both(dice, backend, temperature)
        assert counts.drafted > 12
        if other == family and "on_load" not in options:
            assert counts.accepted >= 0.97 * counts.drafted
        else:
            assert counts.accepted > 0


@pytest.mark.parametrize("more", choice([-1, 8], in_ci=[-1]))
def test_ids_that_only_one_of_the_models_has(more: int, tmp_path: Path) -> None:
    """A family's models pad their vocabularies differently; a context may hold ids that the draft model lacks."""
    target = make_tiny_model("llama", tmp_path / "target")
    draft = make_tiny_model("llama", tmp_path / "draft", vocab_size=NUM_TOKENS + more)
    backend = with_draft(target, draft)
    dice = random.Random(2)
    assert stream_both(dice, backend, 1.0).drafted > 12
    model = draft_model(backend)
    drawn = model._of_target(torch.zeros(1, NUM_TOKENS + more))
    assert drawn.shape == (1, NUM_TOKENS) and bool(torch.isfinite(drawn).all())


def test_draft_logits_that_are_not_finite_end_the_drafts(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "target")
    backend = with_draft(folder, folder)
    embeddings = draft_model(backend).cache_pass.decoder.embeddings
    embeddings[::2] = torch.nan
    counts = stream_both(random.Random(3), backend, 1.0)
    assert counts.accepted <= counts.drafted < 20


def settings(target: Path, draft: Path, **others: Any) -> RunnerSettings:
    return RunnerSettings.read(
        device="cpu", model=str(target), draft=f"model:{draft}", slots=2, kv_tokens=256, **others
    )


def test_the_setting_loads_the_draft_model(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "model")
    backend = build_backend(settings(folder, folder, max_drafts=3), "cpu", no_progress)
    hello = Runner(backend).hello()
    assert (hello.max_drafts, hello.drafter) == (3, f"model:{folder}")


def test_unusable_draft_models_are_refused_in_one_sentence(tmp_path: Path) -> None:
    target = make_tiny_model("llama", tmp_path / "target")
    cases = {"other": "its token 65 is 'a', but 'A' of the served model: use a", "bare": "no tokenizer.json"}
    for name in cases:
        shutil.copytree(target, tmp_path / name)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["A"] = ids["A"], ids["a"]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "bare" / "tokenizer.json").unlink()
    for name, sentence in cases.items():
        with pytest.raises(UnusableSettings, match=sentence) as refused:
            build_backend(settings(target, tmp_path / name), "cpu", no_progress)
        assert str(refused.value).startswith(f"draft is 'model:{tmp_path / name}': ")
