"""Checkpoints that transformers would fill up or cut in silence are refused; products are those of both decoders."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import structlog
import torch
import transformers
from safetensors.torch import load_file, save_file

from runner_svc.backends.decoder_loading import load_decoder
from runner_svc.model.errors import ModelNotFound, UnsupportedModel
from runner_svc.transformers_decoder import linear_layers, start_check
from runner_svc.transformers_decoder.linear_layers import ServedLinear, swap_linear_layers, watched_layers
from runner_svc.transformers_decoder.loading import load_model
from tests.support.transformers_models import make_tiny

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("helium", "HeliumForCausalLM", tmp_path_factory.mktemp("helium"))


def changed(folder: Path, target: Path, change: Callable[[Tensors], Tensors]) -> Path:
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def load(folder: Path) -> object:
    return load_decoder(folder, "auto", lambda what, share: None)


def test_keys_without_an_effect_are_named_in_the_log(folder: Path, tmp_path: Path) -> None:
    changed(folder, tmp_path, lambda tensors: tensors)
    raw = {**json.loads((folder / "config.json").read_text()), "scale_depth": 1.4}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with structlog.testing.capture_logs() as logs:
        load_model(tmp_path, raw, torch.float32)
    assert [event["keys"] for event in logs if event["log_level"] == "warning"] == [["scale_depth"]]


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: {name: value for name, value in tensors.items() if name != NORM}, f"no tensor '{NORM}'"),
        (lambda tensors: {**tensors, "model.extra": torch.zeros(2)}, "a tensor 'model.extra'"),
        (lambda tensors: {**tensors, NORM: torch.zeros(7)}, NORM),
    ],
    ids=["missing", "unknown", "another shape"],
)
def test_tensors_that_are_missing_unknown_or_of_another_shape_are_refused(
    change: Callable[[Tensors], Tensors], says: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        load(changed(folder, tmp_path, change))
    assert says in str(caught.value)


def test_the_configuration_of_a_much_larger_model_is_refused_before_it_takes_memory(
    folder: Path, tmp_path: Path
) -> None:
    changed(folder, tmp_path, dict)
    raw = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**raw, "hidden_size": 16384, "num_hidden_layers": 90}), "utf-8")
    with pytest.raises(UnsupportedModel, match=r"describes a model of [\d,]+ weights, its checkpoint has [\d,]+"):
        load(tmp_path)


def test_a_folder_without_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    (changed(folder, tmp_path, dict) / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="is missing"):
        load(tmp_path)


def test_shards_load_as_one_file_does(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    row = np.arange(3, 12)
    whole, sharded = (start_check._alone(load(one).model, row, "eager") for one in (folder, tmp_path))  # type: ignore[attr-defined]
    assert torch.equal(whole, sharded)
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(ModelNotFound, match="is missing"):
        load(tmp_path)


def test_products_of_layers_that_text_reaches_are_swapped(folder: Path) -> None:
    decoder = load(folder)
    layers = [module for module in decoder.model.modules() if isinstance(module, ServedLinear)]  # type: ignore[attr-defined]
    assert len(layers) == 7 * 4 + 1
    assert not [module for module in decoder.model.modules() if type(module) is torch.nn.Linear]  # type: ignore[attr-defined]


def test_layers_that_are_read_or_never_called_stay_as_they_are() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.called, self.read, self.unused = (torch.nn.Linear(4, 4) for _ in range(3))
            self.again = self.called

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.again(self.called(x)) + x @ self.read.weight + self.read(x)

    model = Model()
    x = torch.randn(2, 3, 4)
    before = model(x)
    with watched_layers(model) as layers:
        model(x)
    swap_linear_layers(model, layers)
    assert isinstance(model.called, ServedLinear) and model.again is model.called and not layers
    assert type(model.read) is type(model.unused) is torch.nn.Linear
    torch.testing.assert_close(model(x), before)


def test_a_swapped_layer_keeps_no_second_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_layers, "MAX_PLAIN_WEIGHTS", 0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    with watched_layers(model) as layers:
        model(torch.zeros(1, 16))
    weights = [weakref.ref(layer.weight) for layer in model]
    swap_linear_layers(model, layers)
    assert [weight() for weight in weights] == [None] * 3
