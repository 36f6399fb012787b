"""Reads a checkpoint in the safetensors format, one file or sharded, into the decoder's merged weights.

Layers are read one at a time, on the decoder's demand. It packs each weight, so an unpacked copy of the whole model
never exists.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import safe_open
from torch import Tensor

from runner_svc.interface.progress import Progress
from runner_svc.model.checkpoint.expected_tensors import check_tensors
from runner_svc.model.checkpoint.layer_reader import LayerReader
from runner_svc.model.checkpoint.staged_reader import StagedReader
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

    def on(self, device: torch.device) -> AbstractContextManager[Callable[[str], Tensor]]:
        """Returns what reads tensors to the device, as stored, while the context is open."""
        if device.type == "cuda":
            return StagedReader(self.tensors, device, self.read)
        return nullcontext(lambda name: self.read(name).to(device))

    def _open(self, path: Path) -> Any:
        if path not in self._open_files:
            self._open_files[path] = safe_open(path, framework="pt")
        return self._open_files[path]


def load_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, progress: Progress
) -> ModelWeights:
    """Loads the weights in `dtype` to `device`; layers are loaded, and progress reported, on iteration.

    On a GPU, layers are complete for the stream that is current on iteration and, after it, for all.
    """
    if config.why_shorter is not None:
        log.warning(
            f"the context is shorter than the model's: {config.why_shorter}", context_length=config.context_length
        )
    checkpoint = Checkpoint(folder)
    check_tensors(checkpoint.tensors, config)

    with ExitStack() as opening:
        read_exact = opening.enter_context(checkpoint.on(device))

        def read(name: str) -> Tensor:
            return read_exact(name).to(dtype)

        progress("loading weights", 0.0)
        reader = LayerReader(config, config.names.start(checkpoint.__contains__), read, checkpoint.tensors, read_exact)
        embeddings, head = _ends(
            checkpoint, config, read, reader.name(config.names.embeddings, "weight"), f"{config.names.head}.weight"
        )
        norm, positions = reader.norm(config.names.norm, config.norm), reader.positions()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # layers may be read on another stream
        opened = opening.pop_all()
    return ModelWeights(embeddings, head, norm, layers=_layers(reader, progress, opened), positions=positions)


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


def _layers(reader: LayerReader, progress: Progress, opened: ExitStack) -> Iterator[LayerWeights]:
    num_layers = reader.config.num_layers
    with opened:
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
