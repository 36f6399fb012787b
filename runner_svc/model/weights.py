"""Reads a checkpoint in the safetensors format, one file or sharded, into the decoder's merged weights.

Layers are read one at a time, as the decoder asks for them: it packs each weight, so that a plain copy of the whole
model never exists.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import safe_open
from torch import Tensor

from runner_svc.interface.progress import Progress
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.expected_tensors import EMBEDDINGS, HEAD, check_tensors
from runner_svc.model.folder.checkpoint_files import checkpoint_files, checkpoint_tensors

# A fingerprint reads this many samples of each file, of this many bytes: milliseconds where all of it takes seconds,
# and no training step leaves all of them as they were.
FINGERPRINT_SAMPLES = 256
FINGERPRINT_SAMPLE_BYTES = 4096

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer; matrices are [out, in], as torch.nn.functional.linear takes them."""

    attention_norm: Tensor  # [hidden_size]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    qkv: Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    qkv_bias: Tensor | None
    output: Tensor  # [hidden_size, num_heads * head_dim]
    output_bias: Tensor | None
    mlp_norm: Tensor  # [hidden_size]
    gate_up: Tensor  # [2 * intermediate_size, hidden_size]
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden_size, intermediate_size]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """A whole model."""

    embeddings: Tensor  # [vocab_size, hidden_size]
    head: Tensor  # [vocab_size, hidden_size]; the embeddings themselves where they are tied
    norm: Tensor  # [hidden_size]
    # To be read once.
    layers: Iterator[LayerWeights]


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
        """The tensor, as stored. Raises UnsupportedModel when there is none of that name."""
        if name not in self.tensors:
            raise UnsupportedModel(
                f"The checkpoint in {self._folder} has no tensor {name!r}, which its config.json asks for."
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
    """The weights in `dtype` on `device`; layers follow as they are iterated over, and `progress` with them."""
    checkpoint = Checkpoint(folder)
    check_tensors(checkpoint.tensors, config)

    def read(name: str) -> Tensor:
        return checkpoint.read(name).to(device=device, dtype=dtype)

    embeddings, head = _ends(checkpoint, config, read)
    return ModelWeights(
        embeddings=embeddings,
        head=head,
        norm=read("model.norm.weight"),
        layers=_layers(read, config, progress),
    )


def _ends(checkpoint: Checkpoint, config: ModelConfig, read: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the embeddings and the head, tied or not as transformers decides.

    Tied ones may have either name. Where both are there and differ, the checkpoint counts and not the configuration.
    """
    embeddings = read(EMBEDDINGS if EMBEDDINGS in checkpoint else HEAD)
    if HEAD not in checkpoint or EMBEDDINGS not in checkpoint:
        return embeddings, embeddings
    head = read(HEAD)
    if not config.tied_embeddings:
        return embeddings, head
    if torch.equal(embeddings, head):
        return embeddings, embeddings
    log.warning(
        "config.json ties the head to the embeddings, but the checkpoint has another one, which is used",
        tensor=HEAD,
        hint="set tie_word_embeddings to false in config.json",
    )
    return embeddings, head


def _layers(read: Callable[[str], Tensor], config: ModelConfig, progress: Progress) -> Iterator[LayerWeights]:
    for index in range(config.num_layers):
        yield _layer(read, config, f"model.layers.{index}")
        progress("loading weights", (index + 1) / config.num_layers)


def _layer(read: Callable[[str], Tensor], config: ModelConfig, prefix: str) -> LayerWeights:
    def merged(module: str, whole: str, parts: tuple[str, ...], kind: str) -> Tensor:
        names = (whole,) if config.merged_weights else parts
        return torch.cat([read(f"{prefix}.{module}.{name}.{kind}") for name in names])

    qkv = ("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj"))
    gate_up = ("mlp", "gate_up_proj", ("gate_proj", "up_proj"))
    return LayerWeights(
        attention_norm=read(f"{prefix}.input_layernorm.weight"),
        q_norm=read(f"{prefix}.self_attn.q_norm.weight") if config.qk_norm else None,
        k_norm=read(f"{prefix}.self_attn.k_norm.weight") if config.qk_norm else None,
        qkv=merged(*qkv, "weight"),
        qkv_bias=merged(*qkv, "bias") if config.qkv_bias else None,
        output=read(f"{prefix}.self_attn.o_proj.weight"),
        output_bias=read(f"{prefix}.self_attn.o_proj.bias") if config.output_bias else None,
        mlp_norm=read(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=merged(*gate_up, "weight"),
        gate_up_bias=merged(*gate_up, "bias") if config.mlp_bias else None,
        down=read(f"{prefix}.mlp.down_proj.weight"),
        down_bias=read(f"{prefix}.mlp.down_proj.bias") if config.mlp_bias else None,
    )


def weights_fingerprint(folder: Path, dtype: torch.dtype) -> str:
    """32 hex digits of the configuration, the compute type, and samples of the weights."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update((folder / "config.json").read_bytes())
    digest.update(str(dtype).encode())
    for path in checkpoint_files(folder):
        digest.update(sample_bytes(path))
    return digest.hexdigest()


def sample_bytes(path: Path) -> bytes:
    """The file's size and evenly spaced samples, the first and the last bytes among them."""
    size = path.stat().st_size
    last = max(0, size - FINGERPRINT_SAMPLE_BYTES)
    samples = [size.to_bytes(8, "little")]
    with path.open("rb") as file:
        for index in range(FINGERPRINT_SAMPLES):
            file.seek(last * index // (FINGERPRINT_SAMPLES - 1))
            samples.append(file.read(FINGERPRINT_SAMPLE_BYTES))
    return b"".join(samples)
