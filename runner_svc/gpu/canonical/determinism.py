"""What a deterministic backend on a GPU refuses, and what its bits depend on: see docs/determinism.md."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from runner_svc.attention.canonical_gpu.variants import MOST_HEAD_DIM, SEGMENT, SUB_TILE
from runner_svc.cuda.fp8.variant import split_of
from runner_svc.cuda.module import is_hopper
from runner_svc.cuda.products.skinny_variant import canonical_parts
from runner_svc.gpu.canonical.decoder import CanonicalDecoder, has_order
from runner_svc.model.config import ModelConfig
from runner_svc.model.folder.checkpoint_files import checkpoint_files
from runner_svc.model.rope_config import RopeType
from runner_svc.weights.fp8_matrix import Fp8Matrix
from runner_svc.weights.matrix import Matrix

ORDER_VERSION = "gpu-1"
"""Raised with every change of the bits that this code computes."""
_STEP = 64
_CHUNK = 2**24


def refusal(config: ModelConfig | None, formats: str, dtype: torch.dtype, block_size: int, draft: str = "") -> str:
    """Returns why a model can't be deterministic on this GPU and what to change; "" if nothing is in the way.

    `config` None: transformers computes it. `formats`: of its matrices. `draft`: as the setting has it.
    """
    if config is None:
        return "transformers computes this model, whose bits depend on the batch: serve a model of Roster's own decoder"
    if not is_hopper():
        return "the products of a fixed order need a GPU of compute capability 9.0 (Hopper): use one, or the CPU"
    if draft not in ("", "ngram"):
        return f"draft is {draft!r}, which was not tried with it on a GPU: set draft to 'ngram' or ''"
    return _of_model(config, formats) or _of_settings(formats, dtype, block_size)


def _of_model(config: ModelConfig, formats: str) -> str:
    if not has_order(config):
        return (
            "a GPU computes only models with Llama's norms in a fixed order so far: serve one of them, or use the CPU"
        )
    if config.head_dim > MOST_HEAD_DIM:
        return (
            f"the model has heads of {config.head_dim} dimensions, and a GPU computes at most {MOST_HEAD_DIM} in a "
            "fixed order: serve another model, or use the CPU"
        )
    if any(rope.type is RopeType.DYNAMIC for rope in config.ropes):
        return "the model has dynamic RoPE, whose powers depend on the batch: serve another model"
    if config.experts is not None and formats:
        return f"quantized mixtures of experts ({formats}) were not tried with it on a GPU: serve a plain checkpoint"
    if config.experts is not None and config.experts.bias:
        return "experts with biases were not tried with it on a GPU: serve another model, or use the CPU"
    widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    if any(width % _STEP for width in widths):
        return f"the model's widths {widths} are not all multiples of {_STEP}: serve another model, or use the CPU"
    return ""


def _of_settings(formats: str, dtype: torch.dtype, block_size: int) -> str:
    if not all(name.lower().startswith("fp8") for name in formats.split("; ") if name):
        return (
            f"the weights are quantized ({formats}), which a GPU doesn't compute in a fixed order yet: serve a plain "
            "checkpoint, or one in FP8"
        )
    if dtype is not torch.bfloat16:
        return f"dtype is {str(dtype).removeprefix('torch.')}, whose range is too small for it: set dtype to 'bfloat16'"
    if SEGMENT % block_size:
        return f"block_size is {block_size}, which does not divide {SEGMENT}: set block_size to 16"
    return ""


def numerics(
    folder: Path,
    config: ModelConfig,
    decoder: CanonicalDecoder,
    products: bytes,
    cache_dtype: torch.dtype,
    scales: Tensor | None,
    *,
    random_weights: bool,
) -> str:
    """Returns 32 hex digits of all that the bits depend on: Hello.numerics.

    `products`: what the decoder's `check` returned. `scales`: of an FP8 cache.
    """
    digest = hashlib.blake2b(digest_size=16)
    parts = [_order_of(matrix) for matrix in decoder.matrices]
    sizes = (
        f"{SEGMENT} in {SUB_TILE}",
        str(cache_dtype),
        "random" if random_weights else "checkpoint",
        config.rope_fingerprint,
        *([f"{config.shard.size} ranks"] if config.shard.size > 1 else []),
    )
    for part in (ORDER_VERSION, *libraries(), *sizes, *parts):
        digest.update(part.encode() + b"\0")
    for path in (folder / "config.json", *([] if random_weights else checkpoint_files(folder))):
        _add_file(digest.update, path)
    digest.update(products)
    for tensor in (*decoder.rotations, *([] if scales is None else [scales])):
        digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _order_of(matrix: Matrix) -> str:
    """Returns what the order of a product with the matrix depends on."""
    if not isinstance(matrix, Fp8Matrix):
        return f"{matrix.size}:{canonical_parts(*matrix.size)}"
    return f"{matrix.size}:{split_of(*matrix.size, grouped=matrix.block is not None)} of {matrix.format}"


def libraries() -> list[str]:
    """Returns the GPU's architecture and the versions of what computes and compiles."""
    import cupy

    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    nvrtc = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    return [f"sm {capability}", f"nvrtc {nvrtc}", f"cupy {cupy.__version__}", f"torch {torch.__version__}"]


def _add_file(update: Callable[[bytes], None], path: Path) -> None:
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            update(data)
