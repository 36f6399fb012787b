"""Reads a checkpoint in the safetensors format, one file or sharded, into the decoder's merged weights.

Layers are read one at a time, on the decoder's demand. It packs each weight, so an unpacked copy of the whole model
never exists.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import safe_open
from torch import Tensor

from runner_svc.interface.progress import Progress
from runner_svc.model.checkpoint.expected_tensors import check_tensors
from runner_svc.model.checkpoint.layer_reader import LayerReader
from runner_svc.model.checkpoint.quantized_matrices import QuantizedMatrix, matrix_reader
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.folder.checkpoint_files import checkpoint_files, checkpoint_tensors
from runner_svc.model.folder.file_samples import sample_bytes
from runner_svc.weights.model_weights import LayerWeights, ModelWeights

log = structlog.get_logger()


class Checkpoint:
    """The tensors of a folder's safetensors files, by name."""

    def __init__(self, folder: Path) -> None:
        """Raises what `checkpoint_tensors` does."""
        self.tensors = checkpoint_tensors(folder)
        self._folder = folder
        self._open_files: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str) -> Tensor:
        """Returns the tensor as stored. Raises UnsupportedModel if there is no tensor of that name."""
        if name not in self.tensors:
            raise UnsupportedModel(
                f"The checkpoint in {self._folder} has no tensor {name!r}, which its config.json requires."
            )
        tensor: Tensor = self._open(self.tensors[name].path).get_tensor(name)
        return tensor

    def _open(self, path: Path) -> Any:
        if path not in self._open_files:
            self._open_files[path] = safe_open(path, framework="pt")
        return self._open_files[path]


def load_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, progress: Progress
) -> ModelWeights:
    """Loads the weights in `dtype` to `device`; layers are loaded, and progress reported, on iteration."""
    if config.why_shorter is not None:
        log.warning(
            f"the context is shorter than the model's: {config.why_shorter}", context_length=config.context_length
        )
    checkpoint = Checkpoint(folder)
    matrices = check_tensors(checkpoint.tensors, config)
    _log_formats(config, matrices)

    def read(name: str) -> Tensor:
        return checkpoint.read(name).to(device=device, dtype=dtype)

    def read_exact(name: str) -> Tensor:
        return checkpoint.read(name).to(device)

    quantized = matrix_reader(matrices, checkpoint.tensors, read_exact)
    base = config.names.start(checkpoint.__contains__)
    reader = LayerReader(config, base, read, checkpoint.tensors, read_exact, quantized)
    embeddings, head = _ends(
        checkpoint, config, read, reader.name(config.names.embeddings, "weight"), f"{config.names.head}.weight"
    )
    return ModelWeights(
        embeddings=embeddings,
        head=head,
        norm=reader.norm(config.names.norm, config.norm),
        layers=_layers(reader, progress),
        positions=reader.positions(),
    )


def _log_formats(config: ModelConfig, matrices: Mapping[str, QuantizedMatrix]) -> None:
    if config.quantization is None:
        return
    counts = Counter(matrix.format.name for matrix in matrices.values())
    log.info("the checkpoint is quantized", method=config.quantization.method, matrices=dict(counts))
    for note in config.quantization.notes:
        log.warning(f"activations are quantized otherwise: {note}")


def _ends(
    checkpoint: Checkpoint, config: ModelConfig, read: Callable[[str], Tensor], first: str, last: str
) -> tuple[Tensor, Tensor]:
    """Returns the embeddings and the head by their names, tied or not as transformers decides.

    Tied ones may have either name. Where both are there and differ, the checkpoint counts and not the configuration.
    """
    if first not in checkpoint or last not in checkpoint:
        tied = read(first if first in checkpoint else last)
        return tied, tied
    embeddings, head = read(first), read(last)
    if not config.tied_embeddings:
        return embeddings, head
    if torch.equal(embeddings, head):
        return embeddings, embeddings
    log.warning(
        "config.json ties the head to the embeddings, but the checkpoint has another one, which is used",
        tensor=last,
        hint="set tie_word_embeddings to false in config.json",
    )
    return embeddings, head


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
