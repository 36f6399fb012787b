"""Each tensor of a checkpoint is read, harmless, or named in a refusal."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runner_svc.model.checkpoint import expected_tensors as expected_tensors_module
from runner_svc.model.checkpoint.expected_tensors import check_tensors, expected_tensors
from runner_svc.model.checkpoint.servable import why_not
from runner_svc.model.checkpoint.weights import load_weights
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.folder.checkpoint_files import checkpoint_tensors
from runner_svc.model.folder.config_file import read_config
from runner_svc.weights.model_weights import ModelWeights
from tests.support.config_oracle import compare
from tests.support.thoroughness import choice
from tests.support.tiny_models import FAMILIES, make_tiny_model

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, made = tmp_path_factory.mktemp("tiny"), {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny_model(family, root / family)
        return made[family]

    return make


def changed(folder: Path, target: Path, change: Callable[[Tensors], object], **keys: object) -> Path:
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    raw = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**raw, **keys}))
    return target


def load(folder: Path) -> ModelWeights:
    config = ModelConfig.from_hugging_face(read_config(folder))
    return load_weights(folder, config, torch.float32, torch.device("cpu"), lambda what, share: None)


@pytest.mark.parametrize(
    "family",
    choice(list(FAMILIES), in_ci=["llama-biases", "phi3-partial", "qwen3", "gemma3", "cohere-qk-norm", "gpt2", "opt"]),
)
def test_a_whole_checkpoint_is_what_is_expected(family: str, tiny: Callable[[str], Path]) -> None:
    folder = tiny(family)
    assert why_not(folder) is None
    config, stored = ModelConfig.from_hugging_face(read_config(folder)), checkpoint_tensors(folder)
    expected = dict(expected_tensors(config, config.names.start(stored.__contains__), stored))
    if config.tied_embeddings:
        expected.pop(f"{config.names.head}.weight")
    read = {name: tensor.shape for name, tensor in stored.items() if not name.startswith(config.names.other_parts)}
    assert read == expected


def test_a_configuration_that_asks_for_billions_of_tensors(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one with 2,147,483,647 experts does, which took minutes and all memory."""

    def endless(*_: object) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from expected_tensors(config, "model.", stored)
        for number in range(10_000):
            yield f"model.experts.{number}", (1,)
        pytest.fail("all were asked for")

    config, stored = ModelConfig.from_hugging_face(read_config(tiny("qwen3"))), checkpoint_tensors(tiny("qwen3"))
    monkeypatch.setattr(expected_tensors_module, "expected_tensors", endless)
    with pytest.raises(UnsupportedModel, match=r"no tensor 'model\.experts\.0'"):
        check_tensors(stored, config)


@pytest.mark.parametrize("family", choice(["llama-biases", "phi3-partial", "qwen3", "gpt2"], in_ci=["qwen3"]))
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(
    family: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    names = load_file(tiny(family) / "model.safetensors").keys()
    for number, name in enumerate(name for name in names if not re.search(r"\.[12]\.", name)):
        without = changed(tiny(family), tmp_path / f"{number} without", lambda tensors, name=name: tensors.pop(name))
        told = why_not(without)
        assert told is not None and f"has no tensor '{name}'" in told

        def shorten(tensors: Tensors, name: str = name) -> None:
            tensors[name] = tensors[name][:-1].clone()

        told = why_not(changed(tiny(family), tmp_path / f"{number} shorter", shorten))
        assert told is not None and f"tensor '{name}' is" in told and "its config.json says" in told


def test_parts_of_a_product_may_not_swap_rows(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """All rows together are as many as they should be."""

    def swap(tensors: Tensors) -> None:
        prefix = "model.layers.1.self_attn"
        q, k = tensors[f"{prefix}.q_proj.weight"], tensors[f"{prefix}.k_proj.weight"]
        tensors[f"{prefix}.q_proj.weight"], tensors[f"{prefix}.k_proj.weight"] = k, q

    with pytest.raises(UnsupportedModel, match=r"layers\.1\.self_attn\.q_proj\.weight' is \(32, 64\).* \(64, 64\)"):
        load(changed(tiny("llama"), tmp_path / "swapped", swap))


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.3.mlp.up_proj.weight", "score.weight", "other"]
)
def test_a_tensor_that_nothing_reads_is_named(name: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = changed(tiny("llama"), tmp_path / "more", lambda tensors: tensors.update({name: torch.ones(64)}))
    told = why_not(folder)
    assert told is not None and f"has a tensor '{name}', which LlamaForCausalLM" in told
    with pytest.raises(UnsupportedModel, match="has a tensor"):
        load(folder)


def test_frequencies_of_rope_are_harmless(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    names = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]
    more = {name: torch.ones(8) for name in names}
    assert why_not(changed(tiny("llama"), tmp_path / "more", lambda tensors: tensors.update(more))) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes_that_are_read(dtype: torch.dtype, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = changed(
        tiny("llama"),
        tmp_path / "other",
        lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()}),
    )
    assert next(load(folder).layers).qkv.weight.dtype is torch.float32


def test_a_tied_head_beside_another_one(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """transformers leaves them apart, and so does Roster, which says it."""
    other = changed(tiny("llama"), tmp_path / "other", lambda tensors: None, tie_word_embeddings=True)
    with structlog.testing.capture_logs() as logs:
        weights = load(other)
    assert not torch.equal(weights.head.weight, weights.embeddings)
    assert [(entry["log_level"], entry["tensor"]) for entry in logs] == [("warning", "lm_head.weight")]
    assert compare(other).difference is None


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight", None])
def test_a_tied_head_under_either_name(kept: str | None, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    names = ["model.embed_tokens.weight", "lm_head.weight"]

    def tie(tensors: Tensors) -> None:
        table = tensors[names[0]]
        for name in names:
            tensors.pop(name)
        tensors.update({name: table.clone() for name in names if kept in (None, name)})

    folder = changed(tiny("llama"), tmp_path / "tied", tie, tie_word_embeddings=True)
    with structlog.testing.capture_logs() as logs:
        weights = load(folder)
    assert weights.head.weight is weights.embeddings and not logs
    verdict = compare(folder)
    assert (verdict.ours, verdict.theirs, verdict.difference) == (None, None, None)


def test_one_file_counts_before_an_index(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """As in transformers."""
    folder = changed(tiny("llama"), tmp_path / "both", lambda tensors: None)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "gone.safetensors"}}')
    assert compare(folder).difference is None and compare(folder).ours is None
