"""Fingerprints of the properties that determine a runner's sampled tokens; only compared for equality (plan.proto).

A new release must not change a value by itself; otherwise runners could not be upgraded one at a time.
"""

from __future__ import annotations

import torch

from runner_svc.interface.served_config import ServedConfig


def fingerprints(
    config: ServedConfig, device: torch.device, computed: torch.dtype, cached: torch.dtype, ranks: int = 1
) -> dict[str, str]:
    """Returns those of a model that is computed in one dtype, with KV in another. Model has that of the weights.

    `ranks`: how many compute it together, which adds up in another order than one alone.
    """
    numerics = f"{_processor(device)} {_name(computed)}"
    if config.decoder != "roster":  # which rounds at other places
        numerics += f" {config.decoder}"
    if ranks > 1:
        numerics += f" on {ranks} ranks"
    values = {"kv": _name(cached), "numerics": numerics}
    if config.rope_fingerprint is not None:
        values["rope"] = config.rope_fingerprint
    return values


def _processor(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
