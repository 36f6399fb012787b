"""Matrices read from tensors that compressed-tensors itself wrote have the numbers that it reads.

The package is not among the tests' dependencies: `pip install --no-deps --target FOLDER compressed-tensors loguru`, and
FOLDER in PYTHONPATH.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from runner_svc.model.quantization.read import read_quantization
from runner_svc.model.quantization.stored_format import StoredTensors

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp

ARGUMENTS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "channel": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    ),
    "tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, None),
    "block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True},
    ),
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}, None),
    "int4-asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
        None,
    ),
    "int4-channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}, None),
}


def scales_and_zeros(weight: Tensor, arguments: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Returns those of the weights by their extremes."""
    if arguments.strategy == "tensor":
        low, high = weight.min().reshape(1), weight.max().reshape(1)
    elif arguments.strategy == "block":
        blocks = weight.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        low, high = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    else:
        groups = weight.unflatten(1, (-1, arguments.group_size or weight.shape[1]))
        low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    return calculate_qparams(low, high, arguments)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_compressed_tensors(name: str) -> None:
    form, weights, inputs = ARGUMENTS[name]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    quantization = read_quantization(
        {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    )
    assert quantization is not None
    stored = quantization.format_of("layer")
    assert stored is not None
    scheme = QuantizationScheme(**group)
    weight = torch.randn(256, 384) * torch.logspace(-2, 1, 256).unsqueeze(1)
    scale, zero = scales_and_zeros(weight, scheme.weights)
    compressor = BaseCompressor.get_value_from_registry(form)
    tensors = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
    tensors = {f"layer.{below}": tensor for below, tensor in tensors.items()}
    for expected in stored.tensors("layer", 256, 384):
        assert tuple(tensors[expected.name].shape) in expected.shapes
    matrix = stored.read("layer", 256, 384, StoredTensors(tensors, tensors.__getitem__))
    below = {name.removeprefix("layer."): tensor for name, tensor in tensors.items()}
    torch.testing.assert_close(matrix.dequantized(), compressor.decompress(below, scheme)["weight"].float())
    if scheme.input_activations is not None:
        x = torch.randn(5, 384) * torch.logspace(-3, 3, 5).unsqueeze(1)
        x[2], x[3, 7] = 0, 1e4
        of_inputs = scheme.input_activations
        batch = x[None] if of_inputs.strategy == "token" else x  # it takes tokens for the second dimension
        own, zeros = compute_dynamic_scales_and_zp(batch, of_inputs, torch.nn.Module())
        expected_x = fake_quantize(batch, own, zeros, of_inputs).reshape(x.shape)
        torch.testing.assert_close(matrix.rounded(x), expected_x)
