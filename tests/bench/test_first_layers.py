"""A model's first layers are a draft model of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from bench.speculation.first_layers import write_first_layers
from tests.support.tiny_models import make_tiny_model


def test_the_first_layers_are_a_model_with_the_same_tokens(tmp_path: Path) -> None:
    source, target = make_tiny_model("llama", tmp_path / "whole"), tmp_path / "part"
    write_first_layers(source, target, 2)
    assert json.loads((target / "config.json").read_text())["num_hidden_layers"] == 2
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    with safe_open(target / "model.safetensors", "pt") as part, safe_open(source / "model.safetensors", "pt") as whole:
        assert {name for name in set(whole.keys()) if ".layers.2." not in name} == set(part.keys())
    with pytest.raises(ValueError, match="the model has 3 layers: name fewer"):
        write_first_layers(source, tmp_path / "other", 3)
