"""Which matrices of a file stay in their blocks when it is converted, and what config.json then says of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from runner_svc.gguf.tensor_data import Target

KEPT_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""Types of blocks that are computed with as they are; others are dequantized."""
MOST_PLAIN_WEIGHTS = 2**28
"""Layers with at most as many weights are dequantized whatever they are stored as: small models gain nothing."""
HEAD = "lm_head"
METHOD, VERSION = "gguf-blocks", 1
"""What `quantization_config` says. Increase the version when blocks or names change."""


def with_kept_blocks(targets: Iterable[Target]) -> list[Target]:
    """Returns the targets; if their layers have more than `MOST_PLAIN_WEIGHTS`, matrices of known blocks as stored.

    Embeddings are looked up in, and stay plain.
    """
    targets = list(targets)
    matrices = [target for target in targets if ".layers." in target.name and len(target.shape) == 2]
    if sum(target.shape[0] * target.shape[1] for target in matrices) <= MOST_PLAIN_WEIGHTS:
        return targets
    names = {target.name for target in matrices} | {f"{HEAD}.weight"}
    return [target.as_blocks(KEPT_TYPES) if target.name in names else target for target in targets]


def quantization_config(targets: Iterable[Target]) -> dict[str, Any]:
    """Returns what config.json says of the targets in blocks, by their names; nothing if there are none."""
    kept = {target.module: target.block_type for target in targets if target.block_type is not None}
    return {"quantization_config": _config(kept)} if kept else {}


def _config(kept: Mapping[str, str]) -> dict[str, Any]:
    types: dict[str, list[str]] = {}
    for module, name in kept.items():
        types.setdefault(name, []).append(module)
    return {"quant_method": METHOD, "version": VERSION, "modules": types}
