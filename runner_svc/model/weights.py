"""Reads a checkpoint in the safetensors format, one file or sharded, into the decoder's merged weights.

Layers are read one at a time, on the decoder's demand. It packs each weight, so an unpacked copy of the whole model
never exists.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from runner_svc.interface.progress import Progress
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import ModelNotFound, UnsupportedModel
from runner_svc.model.layer_reader import LayerReader
from runner_svc.weights.model_weights import LayerWeights, ModelWeights

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Number and size in bytes of the samples that a fingerprint reads of each file. This takes milliseconds, while reading
# whole files takes seconds; any training step changes some of the samples.
FINGERPRINT_SAMPLES = 256
FINGERPRINT_SAMPLE_BYTES = 4096

PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Checkpoint:
    """The tensors of a folder's safetensors files, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open_files: dict[Path, Any] = {}
        self._file_of = {name: path for path in checkpoint_files(folder) for name in self._open(path).keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str) -> Tensor:
        """Returns the tensor as stored. Raises UnsupportedModel if there is no tensor of that name."""
        if name not in self._file_of:
            raise UnsupportedModel(
                f"The checkpoint in {self._folder} has no tensor {name!r}, which its config.json requires."
            )
        tensor: Tensor = self._open(self._file_of[name]).get_tensor(name)
        return tensor

    def _open(self, path: Path) -> Any:
        if path not in self._open_files:
            self._open_files[path] = safe_open(path, framework="pt")
        return self._open_files[path]


def pickled_weights_sentence(folder: Path) -> str:
    """Returns a sentence that names a pickle file in the folder, which could run code when loaded; "" without one."""
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED_SUFFIXES)
    if not pickled:
        return ""
    return f" {pickled[0]} is a pickle file, which could run code when loaded; convert it to safetensors."


def checkpoint_files(folder: Path) -> list[Path]:
    """Returns the folder's safetensors files, sorted. Raises ModelNotFound if a file is missing."""
    index = folder / INDEX_FILE
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        paths = [folder / name for name in names]
    else:
        paths = [folder / SINGLE_FILE]
    for path in paths:
        if not path.is_file():
            raise ModelNotFound(
                f"{path} is missing; a model's folder needs {SINGLE_FILE}, or {INDEX_FILE} and its shards."
                f"{pickled_weights_sentence(folder)}"
            )
    return paths


def load_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, progress: Progress
) -> ModelWeights:
    """Loads the weights in `dtype` to `device`; layers are loaded, and progress reported, on iteration."""
    checkpoint = Checkpoint(folder)

    def read(name: str) -> Tensor:
        return checkpoint.read(name).to(device=device, dtype=dtype)

    reader = LayerReader(config, config.names.start(checkpoint.__contains__), read)
    embeddings = read(reader.name(config.names.embeddings, "weight"))
    if embeddings.shape != (config.vocab_size, config.hidden_size):
        raise UnsupportedModel(
            f"The checkpoint's embeddings have the shape {tuple(embeddings.shape)}, but its config.json requires "
            f"{(config.vocab_size, config.hidden_size)}."
        )
    return ModelWeights(
        embeddings=embeddings,
        head=embeddings if config.tied_embeddings else read(f"{config.names.head}.weight"),
        norm=reader.norm(config.names.norm, config.norm),
        layers=_layers(reader, progress),
        positions=reader.positions(),
    )


def _layers(reader: LayerReader, progress: Progress) -> Iterator[LayerWeights]:
    num_layers = reader.config.num_layers
    for index in range(num_layers):
        yield reader.layer(index)
        progress("loading weights", (index + 1) / num_layers)


def weights_fingerprint(folder: Path, dtype: torch.dtype) -> str:
    """Returns 32 hex digits that depend on the configuration, the compute type and samples of the weights."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update((folder / "config.json").read_bytes())
    digest.update(str(dtype).encode())
    for path in checkpoint_files(folder):
        digest.update(sample_bytes(path))
    return digest.hexdigest()


def sample_bytes(path: Path) -> bytes:
    """Returns the file's size and evenly spaced samples, which include the first and the last bytes."""
    size = path.stat().st_size
    last = max(0, size - FINGERPRINT_SAMPLE_BYTES)
    samples = [size.to_bytes(8, "little")]
    with path.open("rb") as file:
        for index in range(FINGERPRINT_SAMPLES):
            file.seek(last * index // (FINGERPRINT_SAMPLES - 1))
            samples.append(file.read(FINGERPRINT_SAMPLE_BYTES))
    return b"".join(samples)
