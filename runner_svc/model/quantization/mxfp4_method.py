"""Reads the `quantization_config` of gpt-oss: experts in MXFP4, everything else plain."""

from __future__ import annotations

from runner_svc.model.quantization.config_reader import QuantizationKeys
from runner_svc.model.quantization.selection import Globs, Left, Quantization, Rule
from runner_svc.model.quantization.stored_mxfp4 import StoredMxfp4

_STACKS = Globs(("*.experts.gate_up_proj", "*.experts.down_proj"))


def read_mxfp4(keys: QuantizationKeys) -> Quantization:
    """mxfp4: whatever it says of other modules, only experts are quantized."""
    keys.only("dequantize", False, default=False)
    left = Left(keys.names("modules_to_not_convert"))
    keys.finish()
    return Quantization("mxfp4", (Rule(_STACKS, StoredMxfp4()),), (left,))
