"""Checkpoints of one and of several files, the errors of broken ones, and fingerprints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runner_svc.model.checkpoint.weights import load_weights, weights_fingerprint
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import ModelNotFound, UnsupportedModel
from runner_svc.model.folder.config_file import read_config
from runner_svc.weights.model_weights import ModelWeights
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama-biases", tmp_path_factory.mktemp("weights") / "tiny")


def load(folder: Path, shares: list[float] | None = None) -> ModelWeights:
    config = ModelConfig.from_hugging_face(read_config(folder))
    seen = [] if shares is None else shares
    return load_weights(folder, config, torch.float32, torch.device("cpu"), lambda what, share: seen.append(share))


def shard(folder: Path, target: Path) -> Path:
    """Returns the same checkpoint in two files with an index."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, target / f"part-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{number}.safetensors")
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return target


def test_qkv_and_gate_up_are_merged_in_order(tiny_folder: Path) -> None:
    raw = load_file(tiny_folder / "model.safetensors")
    layers = list(load(tiny_folder).layers)
    for index, layer in enumerate(layers):
        prefix = f"model.layers.{index}"
        for kind, qkv, gate_up in (
            ("weight", layer.qkv.weight, layer.mlp.gate_up.weight),
            ("bias", layer.qkv.bias, layer.mlp.gate_up.bias),
        ):
            parts = [raw[f"{prefix}.self_attn.{name}_proj.{kind}"] for name in "qkv"]
            assert torch.equal(qkv, torch.cat(parts))
            assert torch.equal(gate_up, torch.cat([raw[f"{prefix}.mlp.{name}_proj.{kind}"] for name in ("gate", "up")]))
    assert len(layers) == 3


def test_progress_ends_at_one(tiny_folder: Path) -> None:
    shares: list[float] = []
    list(load(tiny_folder, shares).layers)
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_shards_load_like_one_file(tiny_folder: Path, tmp_path: Path) -> None:
    one, many = load(tiny_folder), load(shard(tiny_folder, tmp_path / "sharded"))
    assert torch.equal(one.embeddings, many.embeddings) and torch.equal(one.head.weight, many.head.weight)
    for a, b in zip(one.layers, many.layers, strict=True):
        assert torch.equal(a.qkv.weight, b.qkv.weight) and torch.equal(a.mlp.down.weight, b.mlp.down.weight)


def test_a_missing_shard_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shard(tiny_folder, tmp_path / "sharded")
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"part-1\.safetensors is missing"):
        load(folder)


def test_a_missing_tensor_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "broken"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        list(load(folder).layers)


def test_embeddings_of_another_size_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "broken"))
    config = {**read_config(folder), "vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="300"):
        load(folder)


def test_fingerprint_changes_with_weights_type_and_configuration(tiny_folder: Path, tmp_path: Path) -> None:
    original = weights_fingerprint(tiny_folder, torch.float32)
    assert original == weights_fingerprint(Path(shutil.copytree(tiny_folder, tmp_path / "same")), torch.float32)
    others = {original, weights_fingerprint(tiny_folder, torch.bfloat16)}
    others.add(weights_fingerprint(make_tiny_model("llama-biases", tmp_path / "seed", seed=1), torch.float32))
    changed = Path(shutil.copytree(tiny_folder, tmp_path / "changed"))
    config = {**read_config(changed), "rms_norm_eps": 1e-3}
    (changed / "config.json").write_text(json.dumps(config))
    others.add(weights_fingerprint(changed, torch.float32))
    assert len(others) == 4
