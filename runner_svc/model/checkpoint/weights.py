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
from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.model_weights import LayerWeights, ModelWeights
from runner_svc.weights.on_load import ON_LOAD

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
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    quantization: str = "none",
) -> ModelWeights:
    """Loads the weights in `dtype` to `device`; layers are loaded, and progress reported, on iteration.

    `quantization` is the runner's setting. Raises UnsupportedModel for a checkpoint that is not the configuration's, or
    that can't be quantized.
    """
    _check_quantization(config, quantization)
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
    reader = LayerReader(config, base, read, checkpoint.tensors, read_exact, quantized, ON_LOAD.get(quantization))
    embeddings, head = _ends(
        checkpoint, config, read, reader.name(config.names.embeddings, "weight"), f"{config.names.head}.weight"
    )
    return ModelWeights(
        embeddings=embeddings,
        head=LinearWeights.plain(head),
        norm=reader.norm(config.names.norm, config.norm),
        layers=_layers(reader, progress),
        positions=reader.positions(),
    )


def _check_quantization(config: ModelConfig, quantization: str) -> None:
    if quantization == "none":
        return
    if config.quantization is not None:
        raise UnsupportedModel(
            f"The checkpoint is quantized already ({config.quantization.method}): set quantization to 'none'."
        )
    if config.experts is not None:
        raise UnsupportedModel(
            f"{config.architecture} has experts, which are not quantized: set quantization to 'none'."
        )
    log.info("the weights are quantized while they are loaded", quantization=quantization)


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


def weight_formats(config: ModelConfig, quantization: str = "none") -> str:
    """Returns the names of the formats that matrices have; "" where all are plain. See `load_weights`."""
    if config.quantization is None:
        return "" if quantization == "none" else f"{quantization} on load"
    return "; ".join(dict.fromkeys(rule.format.name for rule in config.quantization.rules))


def weights_fingerprint(folder: Path, dtype: torch.dtype, quantization: str = "none") -> str:
    """Returns 32 hex digits that depend on the configuration, the compute type and samples of the weights.

    They depend on `quantization` (see `load_weights`) only where that is used: plain weights keep the digits that they
    had before there was another format.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update((folder / "config.json").read_bytes())
    digest.update(str(dtype).encode())
    if quantization != "none":
        digest.update(quantization.encode())
    for path in checkpoint_files(folder):
        digest.update(sample_bytes(path))
    return digest.hexdigest()
