"""Tiny quantized checkpoints, written without Roster's code, and transformers' model of the numbers that they hold.

Packing follows the loops of the packages that write such files: AutoAWQ's `WQLinear_GEMM.from_linear`, AutoGPTQ's
`QuantLinear.pack`, compressed-tensors' `pack_to_int32`. Where products round their inputs, the model does so by a
table of all numbers of e4m3.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.tiny_models import make_tiny_model

Round = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Quantized:
    """A matrix in a checkpoint: its tensors by their names below the module, its numbers, and how inputs round."""

    tensors: dict[str, Tensor]
    numbers: Tensor
    round: Round | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint: its `quantization_config`, and how a matrix [out, in] gets into it."""

    config: dict[str, Any]
    quantize: Callable[[Tensor], Quantized]
    left: str = "lm_head"
    """Part of the names of modules that stay plain, beside the head."""


@cache
def _e4m3() -> Tensor:
    """Returns the non-negative numbers of e4m3, ascending, by their codes: float64 [127]."""
    codes = np.arange(127)
    exponent, fraction = codes >> 3, codes & 7
    return torch.from_numpy((fraction / 8 + (exponent > 0)) * 2.0 ** (np.maximum(exponent, 1) - 7))


def nearest_codes(x: Tensor) -> Tensor:
    """Returns the codes of the nearest numbers, uint8: ties to the even code, beyond 448 that of 448."""
    table, size = _e4m3(), x.double().abs().clamp(max=448.0)
    above = torch.searchsorted(table, size).clamp(max=126)
    below = (above - 1).clamp(min=0)
    low, high = size - table[below], table[above] - size
    codes = torch.where((low < high) | ((low == high) & (below % 2 == 0)), below, above)
    return (codes + 128 * (x < 0)).to(torch.uint8)


def _values(codes: Tensor) -> Tensor:
    return (_e4m3()[(codes & 127).long()] * torch.where(codes > 127, -1.0, 1.0)).float()


def _rounded_by(scale: Tensor, x: Tensor) -> Tensor:
    return _values(nearest_codes(x / scale)) * scale


def per_token(x: Tensor, bound: float = torch.inf) -> Tensor:
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(max=bound) / 448
    return _rounded_by(torch.where(scale == 0, torch.ones_like(scale), scale), x)


def per_block(x: Tensor) -> Tensor:
    return torch.cat([per_token(part) for part in x.split(128, dim=-1)], dim=-1)


def _fp8(
    weight: Tensor, kind: str, round_: Round | None = None, *, name: str = "weight_scale", **others: Tensor
) -> Quantized:
    scales = torch.empty(weight.shape)
    if kind == "block":
        stored = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
        for row, rows in enumerate(weight.split(128)):
            for column, block in enumerate(rows.split(128, dim=1)):
                stored[row, column] = block.abs().max() / 448
        scales = stored.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    elif kind == "tensor":
        stored = weight.abs().max() / 448
        scales = stored.expand(weight.shape)
    else:
        stored = weight.abs().amax(dim=1, keepdim=True) / 448
        scales = stored.expand(weight.shape)
    codes = nearest_codes(weight / scales)
    tensors = {"weight": codes.view(torch.float8_e4m3fn), name: stored, **others}
    return Quantized(tensors, _values(codes) * scales, round_)


def _static(weight: Tensor, kind: str = "tensor") -> Quantized:
    # Matrices that are multiplied with the same x have different scales.
    scale = 0.01 + weight.abs().mean() * 0.02
    return _fp8(weight, kind, lambda x: _rounded_by(scale, x), input_scale=scale.clone())


def _grouped(weight: Tensor, group: int, *, symmetric: bool, least: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes [out, in], zeros [out, groups] and float16 scales [out, groups] of adjacent columns."""
    codes, zeros, scales = [], [], []
    for part in weight.split(group, dim=1):
        low, high = part.amin(dim=1).clamp(max=0), part.amax(dim=1).clamp(min=0)
        if symmetric:
            scale, zero = (torch.maximum(high, -low) / 7.5).half().float(), torch.full_like(low, 8)
        else:
            scale = ((high - low) / 15).half().float()
            zero = (-low / scale).round().clamp(least, 15)
        codes.append(((part / scale[:, None]).round() + zero[:, None]).clamp(0, 15))
        zeros.append(zero)
        scales.append(scale)
    return torch.cat(codes, 1).int(), torch.stack(zeros, 1).int(), torch.stack(scales, 1).half()


def _numbers(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    return (codes - zeros[:, groups]).float() * scales.float()[:, groups]


def _pack_columns(codes: Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """Packs eight adjacent columns to a word, as AutoAWQ does."""
    words = np.zeros((codes.shape[0], -(-codes.shape[1] // 8)), np.uint32)
    for column in range(words.shape[1]):
        for nibble in range(8):
            if (place := column * 8 + order[nibble]) < codes.shape[1]:
                words[:, column] |= codes[:, place].numpy().astype(np.uint32) << np.uint32(nibble * 4)
    return torch.from_numpy(words.astype(np.int32))


def _awq(weight: Tensor, group: int) -> Quantized:
    codes, zeros, scales = _grouped(weight, group, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": _pack_columns(codes.t(), order),
        "qzeros": _pack_columns(zeros.t(), order),
        "scales": scales.t().contiguous(),
    }
    return Quantized(tensors, _numbers(codes, zeros, scales, torch.arange(weight.shape[1]) // group))


def _gptq(weight: Tensor, group: int, *, symmetric: bool, reordered: bool = False, version: int = 1) -> Quantized:
    width = weight.shape[1]
    groups = torch.arange(width) // group
    order = torch.arange(width)
    if reordered:  # by the columns' magnitudes, as where these are those of the activations
        order = weight.abs().sum(dim=0).argsort(descending=True)
    codes_by_group, zeros, scales = _grouped(weight[:, order], group, symmetric=symmetric, least=1)
    codes = torch.empty_like(codes_by_group)
    codes[:, order] = codes_by_group
    index = torch.empty_like(groups)
    index[order] = groups
    tensors = {
        "qweight": _pack_columns(codes).t().contiguous(),  # eight adjacent inputs to a word
        "qzeros": _pack_columns((zeros - int(version == 1)).t()),
        "scales": scales.t().contiguous(),
        "g_idx": index.int(),
    }
    return Quantized(tensors, _numbers(codes, zeros, scales, index))


def _packed(weight: Tensor, group: int | None, *, symmetric: bool) -> Quantized:
    width = weight.shape[1]
    codes, zeros, scales = _grouped(weight, group or width, symmetric=symmetric)
    tensors = {
        "weight_packed": _pack_columns(codes),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _pack_columns(zeros.t()).t().contiguous()
    return Quantized(tensors, _numbers(codes, zeros, scales, torch.arange(width) // (group or width)))


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.4,
        "ignore": ["lm_head", "re:.*layers\\.1\\.mlp\\.down_proj"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }


def _numbers_of(kind: str, bits: int, strategy: str, **others: Any) -> dict[str, Any]:
    dynamic = {"dynamic": False, "observer": "minmax"}
    return {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True, **dynamic, **others}


_FP8 = {"quant_method": "fp8", "fmt": "e4m3"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "true_sequential": True, "damp_percent": 0.1}

KINDS: dict[str, Kind] = {
    "compressed-fp8-token": Kind(
        _compressed(
            "float-quantized", _numbers_of("float", 8, "channel"), _numbers_of("float", 8, "token", dynamic=True)
        ),
        lambda weight: _fp8(weight, "channel", per_token),
    ),
    "compressed-fp8-static": Kind(
        _compressed("float-quantized", _numbers_of("float", 8, "channel"), _numbers_of("float", 8, "tensor")),
        lambda weight: _static(weight, "channel"),
    ),
    "compressed-fp8-weights": Kind(
        _compressed("naive-quantized", _numbers_of("float", 8, "tensor")), lambda weight: _fp8(weight, "tensor")
    ),
    "compressed-fp8-block": Kind(
        _compressed(
            "float-quantized",
            _numbers_of("float", 8, "block", block_structure=[128, 128]),
            _numbers_of("float", 8, "group", group_size=128, dynamic=True),
        ),
        lambda weight: _fp8(weight, "block", per_block),
    ),
    "fbgemm": Kind(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 2.0, "modules_to_not_convert": ["lm_head"]},
        lambda weight: _fp8(weight, "channel", lambda x: per_token(x, 2.0)),
    ),
    "fp8-blocks": Kind(
        {**_FP8, "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        lambda weight: _fp8(weight, "block", per_block, name="weight_scale_inv"),
    ),
    "auto-fp8-static": Kind({**_FP8, "activation_scheme": "static", "ignored_layers": ["lm_head"]}, _static),
    "auto-fp8-dynamic": Kind(
        {**_FP8, "activation_scheme": "dynamic"}, lambda weight: _fp8(weight, "tensor", per_token)
    ),
    "modelopt": Kind(
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "*.1.mlp.up*"]},
        _static,
        ".1.mlp.up",
    ),
    "awq": Kind(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        lambda weight: _awq(weight, 32),
    ),
    "gptq": Kind(
        {**_GPTQ, "group_size": 32, "desc_act": False, "sym": True}, lambda weight: _gptq(weight, 32, symmetric=True)
    ),
    "gptq-asymmetric": Kind(
        {**_GPTQ, "group_size": 32, "desc_act": False, "sym": False, "checkpoint_format": "gptq"},
        lambda weight: _gptq(weight, 32, symmetric=False),
    ),
    "gptq-reordered": Kind(
        {**_GPTQ, "group_size": 32, "desc_act": True, "sym": False, "checkpoint_format": "gptq_v2"},
        lambda weight: _gptq(weight, 32, symmetric=False, reordered=True, version=2),
    ),
    "gptq-whole-columns": Kind(
        {**_GPTQ, "group_size": -1, "desc_act": False, "sym": True},
        lambda weight: _gptq(weight, weight.shape[1], symmetric=True),
    ),
    "packed": Kind(
        _compressed("pack-quantized", _numbers_of("int", 4, "group", group_size=32)),
        lambda weight: _packed(weight, 32, symmetric=True),
    ),
    "packed-asymmetric": Kind(
        _compressed("pack-quantized", _numbers_of("int", 4, "group", group_size=32, symmetric=False)),
        lambda weight: _packed(weight, 32, symmetric=False),
    ),
    "packed-channel": Kind(
        _compressed("pack-quantized", _numbers_of("int", 4, "channel")),
        lambda weight: _packed(weight, None, symmetric=True),
    ),
}


_LEFT_KEYS = {"compressed-tensors": "ignore", "fp8": "modules_to_not_convert", "awq": "modules_to_not_convert"}
"""Where a `quantization_config` names modules that stay plain, by `quant_method`. GPTQ has no such key."""


def _in_parts(round_: Round, count: int, x: Tensor) -> Tensor:
    return torch.cat([round_(part) for part in x.chunk(count, dim=-1)], dim=-1)


def _is_left(kind: str, module: str, has_head: bool) -> bool:
    if module == "lm_head":
        return not has_head
    if "layers" not in module or "norm" in module or module.endswith("gate"):
        return True
    left = "layers.1.mlp.down_proj" if kind.startswith(("compressed", "packed")) else KINDS[kind].left
    return left in module


def _with_head(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the `quantization_config` of a checkpoint whose head is quantized too. Raises KeyError if it can't be."""
    if config["quant_method"] == "gptq":
        return config | {"lm_head": True}
    name = {"compressed-tensors": "ignore", "modelopt": "exclude_modules"}[config["quant_method"]]
    return config | {name: [module for module in config[name] if module != "lm_head"]}


def make_tiny_quantized(
    kind: str, family: str, folder: Path, seed: int = 0, *, has_head: bool = False, ranks: int = 1, **sizes: Any
) -> tuple[Path, Any]:
    """Returns the folder of a quantized model, and transformers' model in float32 that computes the same.

    `ranks`: how many divide the columns of the matrices whose products they sum; each rounds its own part of the input.
    """
    plain = make_tiny_model(family, folder / "plain", seed, **sizes)
    quantized = Path(shutil.copytree(plain, folder / "quantized"))
    tensors, numbers, rounds, routers = {}, {}, {}, []
    for name, tensor in load_file(plain / "model.safetensors").items():
        module = name.removesuffix(".weight")
        routers += [module] * module.endswith("gate")
        if tensor.dim() != 2 or _is_left(kind, module, has_head):
            tensors[name] = numbers[name] = tensor
            continue
        matrix = KINDS[kind].quantize(tensor)
        tensors |= {f"{module}.{below}": each.contiguous() for below, each in matrix.tensors.items()}
        numbers[name] = matrix.numbers.contiguous()
        if matrix.round is not None:
            is_summed = module.endswith(("o_proj", "down_proj"))
            rounds[module] = partial(_in_parts, matrix.round, ranks if is_summed else 1)
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    said = dict(_with_head(KINDS[kind].config) if has_head else KINDS[kind].config)
    if routers and (key := _LEFT_KEYS.get(said["quant_method"])) is not None:
        said[key] = [*said.get(key, []), *routers]
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    for name, module in model.named_modules():
        if name in rounds:
            module.register_forward_pre_hook(lambda _, inputs, rounded=rounds[name]: (rounded(inputs[0]),))
    return quantized, model
