"""Fingerprints of the properties that determine a runner's sampled tokens; only compared for equality (plan.proto).

A new release must not change a value by itself; otherwise runners could not be upgraded one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runner_svc.model.rope_config import RopeConfig


def fingerprints(
    ropes: Sequence[RopeConfig], device: torch.device, computed: torch.dtype, cached: torch.dtype
) -> dict[str, str]:
    """Returns the fingerprints for a compute type and a KV type. That of the weights is in plan.proto's Model."""
    return {
        "rope": "; ".join(
            f"{rope.type}, theta {rope.theta:g}, factor {rope.factor:g} of {rope.original_positions} positions"
            for rope in ropes
        )
        or "none",
        "kv": _name(cached),
        "numerics": f"{_processor(device)} {_name(computed)}",
    }


def _processor(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
