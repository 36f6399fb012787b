"""Weights read in pieces by several threads are those of the file, and little more than them is ever held."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from runner_svc.model.checkpoint.layer_reader import LayerReader
from runner_svc.model.checkpoint.staged_reader import DTYPES, StagedReader
from runner_svc.model.checkpoint.weights import Checkpoint, load_weights
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import BrokenModel
from runner_svc.model.folder.checkpoint_files import checkpoint_tensors
from runner_svc.model.folder.config_file import read_config
from runner_svc.weights.model_weights import ModelWeights
from tests.support.thoroughness import choice
from tests.support.tiny_models import FAMILIES, make_tiny_model

CPU = torch.device("cpu")
PIECE_BYTES = 4096
THREADS = 3


def unread(name: str) -> torch.Tensor:
    raise AssertionError(f"{name} is read in the plain way")


def staged(checkpoint: Checkpoint, device: torch.device) -> StagedReader:
    return StagedReader(checkpoint.tensors, device, unread, threads=THREADS, piece_bytes=PIECE_BYTES)


def load(folder: Path, dtype: torch.dtype) -> ModelWeights:
    config = ModelConfig.from_hugging_face(read_config(folder))
    return load_weights(folder, config, dtype, CPU, lambda what, share: None)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))
    elif isinstance(value, Iterator):
        for each in value:
            yield from tensors_of(each)


@pytest.mark.parametrize(
    "family", choice(list(FAMILIES), in_ci=["llama-biases", "llama-tied", "gpt2", "cohere-qk-norm", "qwen2-moe"])
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_a_memory_map(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(family, tmp_path)
    expected = list(tensors_of(load(folder, dtype)))
    monkeypatch.setattr(Checkpoint, "on", staged)
    found = list(tensors_of(load(folder, dtype)))
    assert len(found) == len(expected) > 10
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_every_type_and_shape(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shapes = [(), (0, 3), (1,), (PIECE_BYTES + 1,), (3, 5, 7), (37, PIECE_BYTES // 8)]
    saved = {
        f"{name} {shape}": torch.randint(0, 100, shape).to(dtype) for name, dtype in DTYPES.items() for shape in shapes
    }
    save_file(saved, tmp_path / "model.safetensors")
    with StagedReader(checkpoint_tensors(tmp_path), CPU, unread, threads=THREADS, piece_bytes=PIECE_BYTES) as read:
        for name, tensor in saved.items():
            found = read(name)
            assert found.dtype is tensor.dtype and found.shape == tensor.shape
            assert torch.equal(found.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
    odd = {"yes": torch.tensor([True, False])}
    save_file(odd, tmp_path / "model.safetensors")
    with StagedReader(checkpoint_tensors(tmp_path), CPU, odd.__getitem__) as read:
        assert torch.equal(read("yes"), odd["yes"])


def test_a_file_that_becomes_shorter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(PIECE_BYTES * 3, dtype=torch.uint8)}, path)
    tensors = checkpoint_tensors(tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    with (
        StagedReader(tensors, CPU, unread, threads=THREADS, piece_bytes=PIECE_BYTES) as read,
        pytest.raises(BrokenModel, match=r"model\.safetensors became shorter while it was read"),
    ):
        read("a")


def test_a_reader_is_closed_however_loading_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, readers = make_tiny_model("llama-biases", tmp_path), []

    def on(checkpoint: Checkpoint, device: torch.device) -> StagedReader:
        readers.append(staged(checkpoint, device))
        return readers[-1]

    def failing(reader: LayerReader, *names: object) -> None:
        raise BrokenModel("the norm is broken")

    monkeypatch.setattr(Checkpoint, "on", on)
    list(load(folder, torch.float32).layers)
    with monkeypatch.context() as patch, pytest.raises(BrokenModel, match="the norm is broken"):
        patch.setattr(LayerReader, "norm", failing)
        load(folder, torch.float32)
    with monkeypatch.context() as patch, pytest.raises(BrokenModel, match="the norm is broken"):
        loading = load(folder, torch.float32)
        patch.setattr(LayerReader, "norm", failing)
        list(loading.layers)
    assert len(readers) == 3
    for reader in readers:
        with pytest.raises(RuntimeError, match="after shutdown"):
            reader("model.embed_tokens.weight")


class Held(TorchDispatchMode):
    """Counts the bytes of all storages that tensors made within it keep."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            self._storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.largest = max(self.largest, self.now())
        return result

    def now(self) -> int:
        self._storages = {key: held for key, held in self._storages.items() if not held[0].expired()}
        return sum(size for _, size in self._storages.values())


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_no_more_than_the_model_and_a_matrix_is_held(
    stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of a merged matrix are held beside it, or a matrix as stored beside the one of the wanted type."""
    folder = make_tiny_model("llama-biases", tmp_path)
    path = folder / "model.safetensors"
    save_file({name: tensor.to(stored) for name, tensor in load_file(path).items()}, path)
    monkeypatch.setattr(Checkpoint, "on", staged)
    config = ModelConfig.from_hugging_face(read_config(folder))
    with Held() as held:
        loaded = load_weights(folder, config, torch.bfloat16, CPU, lambda what, share: None)
        kept = [loaded.embeddings, loaded.head, loaded.norm, *loaded.layers]
        whole = held.now()
    largest = max(config.vocab_size, 2 * config.intermediate_size) * config.hidden_size * stored.itemsize
    assert whole == sum(
        tensor.nbytes for tensor in {id(tensor): tensor for each in kept for tensor in tensors_of(each)}.values()
    )
    assert whole < held.largest <= whole + largest
