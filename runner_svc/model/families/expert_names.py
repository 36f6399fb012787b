"""The names of a checkpoint's tensors of experts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a layer's modules, the first that the checkpoint has; defaults are those of Qwen's."""

    blocks: tuple[str, ...] = ("mlp",)
    """What the others' names begin with."""
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    interleaved: bool = False
    """Tensors of all experts are [experts, in, out], and rows of gate and up take turns (gpt-oss)."""


QWEN_NAMES = ExpertNames()
MIXTRAL_NAMES = ExpertNames(("block_sparse_moe", "mlp"), gate="w1", up="w3", down="w2")
GPT_OSS_NAMES = ExpertNames(router="router", interleaved=True)
