"""Reads a config.json's `quantization_config`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runner_svc.model.folder.errors import UnsupportedModel
from runner_svc.model.folder.key_values import shortened
from runner_svc.model.quantization.compressed_tensors import read_compressed_tensors
from runner_svc.model.quantization.config_reader import QuantizationKeys
from runner_svc.model.quantization.fp8_methods import read_fbgemm, read_fp8, read_modelopt
from runner_svc.model.quantization.gguf_method import read_gguf
from runner_svc.model.quantization.int4_methods import read_auto_round, read_awq, read_gptq
from runner_svc.model.quantization.mxfp4_method import read_mxfp4
from runner_svc.model.quantization.selection import Quantization

METHODS: dict[str, Callable[[QuantizationKeys], Quantization]] = {
    "compressed-tensors": read_compressed_tensors,
    "fbgemm_fp8": read_fbgemm,
    "fp8": read_fp8,
    "modelopt": read_modelopt,
    "awq": read_awq,
    "gptq": read_gptq,
    "auto-round": read_auto_round,
    "mxfp4": read_mxfp4,
    "gguf-blocks": read_gguf,
}
"""By `quant_method`."""


def read_quantization(raw: Any) -> Quantization | None:
    """Returns the formats that the value of the key says; None for null.

    Raises UnsupportedModel for a method, a key or a value that is not known.
    """
    if raw is None:
        return None
    keys = QuantizationKeys(raw)
    method = keys.take("quant_method", str, default=None)
    if method not in METHODS:
        raise UnsupportedModel(
            f"The model is quantized, and its config.json has 'quantization_config.quant_method' {shortened(method)}, "
            f"which is not supported; supported: {', '.join(METHODS)}."
        )
    return METHODS[method](keys)
