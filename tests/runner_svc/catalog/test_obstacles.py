"""Why models can't be served, before their weights are looked at or downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner_svc.catalog.obstacles import CLASSES_FILE, obstacle, obstacle_before_weights
from tests.support.classes_page import PAGE, classes


def folder_of(tmp_path: Path, **config: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_classes_are_those_of_the_page() -> None:
    """Run `python -m tests.support.classes_page` when the page changes."""
    assert json.loads(CLASSES_FILE.read_text()) == classes(PAGE.read_text())


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"architectures": ["GPTNeoXForCausalLM"]}, None),
        ({"architectures": ["LlamaForCausalLM"], "hidden_size": 7}, None),  # transformers may, and says so at start
        ({"architectures": ["Lfm2ForCausalLM"]}, "Lfm2ForCausalLM is not served: it has layers of the kind 'conv'"),
        ({"architectures": ["Other"], "auto_map": {"a": "b"}}, "never run"),
        ({"architectures": ["GPTNeoXForCausalLM"], "quantization_config": {"bits": 4}}, "It is quantized"),
        (
            {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "bitsandbytes"}},
            "'bitsandby",
        ),
    ],
)
def test_a_class_of_transformers(config: dict[str, Any], sentence: str | None, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, **config)
    for found in (obstacle(folder), obstacle_before_weights(folder)):
        assert found is None if sentence is None else sentence in str(found)


def test_an_unknown_class_is_not_listed_as_served_but_downloaded(tmp_path: Path) -> None:
    """A newer transformers may have it."""
    folder = folder_of(tmp_path, architectures=["NewestForCausalLM"])
    assert "NewestForCausalLM" in str(obstacle(folder))
    assert obstacle_before_weights(folder) is None


@pytest.mark.parametrize("architectures", [3, [{}], [["LlamaForCausalLM"]], "LlamaForCausalLM", {"a": 1}])
def test_odd_architectures(architectures: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, architectures=architectures, model_type=[1])
    assert obstacle(folder) is not None
    obstacle_before_weights(folder)


@pytest.mark.parametrize("content", ["[1]", "{", "\xff", ""])
def test_a_broken_configuration(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content, "latin-1")
    for found in (obstacle(tmp_path), obstacle_before_weights(tmp_path)):
        assert found is not None and "config.json" in found
