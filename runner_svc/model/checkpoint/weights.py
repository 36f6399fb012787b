"""Reads a checkpoint in the safetensors format, one file or sharded, into the decoder's merged weights.

Layers are read one at a time, on the decoder's demand. It packs each weight, so an unpacked copy of the whole model
never exists.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import safe_open
from torch import Tensor

from runner_svc.interface.progress import Progress
from runner_svc.interface.ranks import WHOLE, Shard
from runner_svc.model.checkpoint.cut_weights import cut_layer, padded_ends
from runner_svc.model.checkpoint.expected_tensors import check_tensors, expected_tensors
from runner_svc.model.checkpoint.kv_scale_tensors import read_kv_scales
from runner_svc.model.checkpoint.layer_reader import LayerReader
from runner_svc.model.checkpoint.padded_widths import padded_mlp
from runner_svc.model.checkpoint.quantized_matrices import MatrixReader, Quantized, QuantizedReader, check_stray_biases
from runner_svc.model.checkpoint.staged_reader import StagedReader
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.folder.checkpoint_files import checkpoint_files, checkpoint_tensors
from runner_svc.model.folder.file_samples import sample_bytes
from runner_svc.model.quantization.stored_format import StoredTensors
from runner_svc.model.rank_parts import RankParts
from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.matrix import Matrix
from runner_svc.weights.matrix_part import MatrixPart
from runner_svc.weights.model_weights import LayerWeights, ModelWeights
from runner_svc.weights.on_load import NOTHING, OnLoad
from runner_svc.weights.plain_matrix import PlainMatrix

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

    def read(self, name: str, *places: slice) -> Tensor:
        """Returns the tensor as stored, or slices of its first dimensions, without reading the rest.

        Raises UnsupportedModel if there is no tensor of that name.
        """
        if name not in self.tensors:
            raise UnsupportedModel(
                f"The checkpoint in {self._folder} has no tensor {name!r}, which its config.json requires."
            )
        file = self._open(self.tensors[name].path)
        tensor: Tensor = file.get_slice(name)[places] if places else file.get_tensor(name)
        return tensor

    def on(self, device: torch.device) -> AbstractContextManager[Callable[..., Tensor]]:
        """Returns what reads tensors to the device, as `read` does, while the context is open."""
        if device.type == "cuda":
            return StagedReader(self.tensors, device, self.read)
        return nullcontext(lambda name, *places: self.read(name, *places).to(device))

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
    on_load: OnLoad = NOTHING,
    shard: Shard = WHOLE,
) -> ModelWeights:
    """Loads the weights in `dtype` to `device`; layers are loaded, and progress reported, on iteration.

    `config` is the whole model's; a rank reads the part that `RankParts` says. `on_load` quantizes plain matrices, each
    when it has been read, so that a plain copy of the whole never exists. On a GPU, layers are complete for the stream
    that is current on iteration and, after it, for all. Raises UnsupportedModel for a checkpoint that is not the
    configuration's, or that can't be quantized or divided.
    """
    check_on_load(config, on_load)
    parts, checkpoint = RankParts(config, shard), Checkpoint(folder)
    parts.local()  # a model that can't be divided is refused before anything is read
    matrices = check_tensors(checkpoint.tensors, config)
    _log(config, matrices)
    with ExitStack() as opening:
        read_exact = opening.enter_context(checkpoint.on(device))

        def read(name: str, *places: slice) -> Tensor:
            return read_exact(name, *places).to(dtype)

        progress("loading weights", 0.0)
        quantized = QuantizedReader(matrices, checkpoint.tensors, read_exact, dtype)
        base = config.names.start(checkpoint.__contains__)
        expected = dict(expected_tensors(config, base, checkpoint.tensors))
        check_stray_biases(matrices, expected, checkpoint.tensors, read_exact)
        # What is quantized on load is quantized as a whole, so that a group of ranks has the numbers of one.
        of_reader = WHOLE if on_load.layers != "none" else shard
        reader = LayerReader(
            config, base, read, checkpoint.tensors, read_exact, quantized, on_load.layer_matrix, of_reader
        )
        ends = _ends(checkpoint, parts, read, quantized, reader.name(config.names.embeddings, "weight"))
        embeddings, head = padded_ends(*ends, parts)
        if on_load.head and not isinstance(head, PlainMatrix):
            raise UnsupportedModel("The checkpoint's head is quantized already: set quantize_head to false.")
        used_head = LinearWeights(on_load.head_matrix(head))
        norm, positions = reader.norm(config.names.norm, config.norm), reader.positions()
        scales = read_kv_scales(config, base, StoredTensors(checkpoint.tensors, read_exact))
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # layers may be read on another stream
        opened = opening.pop_all()
        opened.callback(_log_plain, quantized.made_plain)
    layers = _layers(reader, progress, opened, parts, is_cut=of_reader == shard, dtype=dtype)
    return ModelWeights(embeddings, used_head, norm, layers=layers, positions=positions, kv_scales=scales)


def check_on_load(config: ModelConfig, on_load: OnLoad) -> None:
    """Logs what is quantized. Raises UnsupportedModel for a model whose layers can't be."""
    if on_load.name:
        log.info("the weights are quantized while they are loaded", formats=on_load.name)
    if on_load.layers == "none":
        return
    if config.quantization is not None:
        raise UnsupportedModel(
            f"The checkpoint is quantized already ({config.quantization.method}): set quantization to 'none'."
        )
    if config.experts is not None:
        raise UnsupportedModel(
            f"{config.architecture} has experts, which are not quantized: set quantization to 'none'."
        )


def _log(config: ModelConfig, matrices: Mapping[str, Quantized]) -> None:
    """Logs how long the context is, if that is not the model's, and in which formats matrices are."""
    if config.why_shorter is not None:
        log.warning(
            f"the context is shorter than the model's: {config.why_shorter}", context_length=config.context_length
        )
    if config.quantization is None:
        return
    counts = Counter(matrix.format.name for matrix in matrices.values())
    log.info("the checkpoint is quantized", method=config.quantization.method, matrices=dict(counts))
    if config.quantization.has_kv_scales:
        log.info("the checkpoint has scales of a KV cache in FP8, which kv_cache_dtype fp8_e4m3 uses")
    for note in config.quantization.notes:
        log.warning(f"activations are quantized otherwise: {note}")


def _log_plain(modules: Sequence[str]) -> None:
    """Logs which of a rank's parts lost their format."""
    if modules:
        log.warning(
            "matrices became plain numbers, as this rank's part of them begins within their groups of columns",
            matrices=len(modules),
            first=modules[0],
        )


def _ends(
    checkpoint: Checkpoint, parts: RankParts, read_any: Callable[..., Tensor], quantized: MatrixReader, first: str
) -> tuple[Tensor, Matrix]:
    """Returns the rank's rows of the embeddings, by their name, and of the head, tied or not as transformers decides.

    Tied ones may have either name. Where both are there and differ, the checkpoint counts and not the configuration.
    """
    config, rows = parts.whole, () if parts.is_whole else (parts.vocabulary,)

    def read(name: str) -> Tensor:
        return read_any(name, *rows)

    if (matrix := quantized(config.names.head, MatrixPart(rows or None))) is not None:
        return read(first), matrix
    last = f"{config.names.head}.weight"
    if first not in checkpoint or last not in checkpoint:
        tied = read(first if first in checkpoint else last)
        return tied, PlainMatrix(tied)
    embeddings, head = read(first), read(last)
    if not config.tied_embeddings:
        return embeddings, PlainMatrix(head)
    if torch.equal(embeddings, head):
        return embeddings, PlainMatrix(embeddings)
    log.warning(
        "config.json ties the head to the embeddings, but the checkpoint has another one, which is used",
        tensor=last,
        hint="set tie_word_embeddings to false in config.json",
    )
    return embeddings, PlainMatrix(head)


def _layers(
    reader: LayerReader, progress: Progress, opened: ExitStack, parts: RankParts, *, is_cut: bool, dtype: torch.dtype
) -> Iterator[LayerWeights]:
    """Yields what the reader reads, which `is_cut` to the parts already, or is cut to them, and padded."""
    num_layers = reader.config.num_layers
    with opened:
        for index, described in enumerate(reader.config.layers):
            layer = reader.layer(index)
            own = layer if is_cut else cut_layer(layer, described, parts, dtype)
            yield replace(own, mlp=padded_mlp(own.mlp, described.mlp, parts, dtype))
            progress("loading weights", (index + 1) / num_layers)


def weight_formats(config: ModelConfig, on_load: OnLoad = NOTHING) -> str:
    """Returns the names of the formats that matrices have; "" where all are plain. See `load_weights`."""
    names = [f"{on_load.name} on load"] if on_load.name else []
    if config.quantization is not None:
        names += [rule.format.name for rule in config.quantization.rules]
    return "; ".join(dict.fromkeys(names))


def weights_fingerprint(folder: Path, dtype: torch.dtype, on_load: OnLoad = NOTHING) -> str:
    """Returns 32 hex digits that depend on the configuration, the compute type and samples of the weights.

    They depend on `on_load` only where it quantizes: plain weights keep the digits that they had before there was
    another format.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update((folder / "config.json").read_bytes())
    digest.update(str(dtype).encode())
    digest.update(on_load.name.encode())
    for path in checkpoint_files(folder):
        digest.update(sample_bytes(path))
    return digest.hexdigest()
