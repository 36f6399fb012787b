"""Puts the parts of a model that ranks hold together again, as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from runner_svc.model.config import ModelConfig
from runner_svc.model.families.experts_config import ExpertsConfig
from runner_svc.weights.expert_matrices import ExpertMatrices
from runner_svc.weights.expert_weights import ExpertWeights
from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.model_weights import LayerWeights

Numbers = dict[str, Tensor]


def numbers_of(
    layers: Sequence[LayerWeights], configs: Sequence[ModelConfig], whole: ModelConfig, index: int
) -> Numbers:
    """Returns all numbers of the layer `index`, of which `layers` are the ranks' parts and `configs` the ranks'.

    Fails unless what is behind the `whole` model's widths is zero.
    """
    found: Numbers = {}
    for name in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"):
        _same(found, name, [getattr(layer, name) for layer in layers])
    _qkv(found, layers, configs)
    for name in ("q_norm", "k_norm"):
        _head_norm(found, name, [getattr(layer, name) for layer in layers], configs)
    _summed(found, "output", [layer.output for layer in layers])
    if layers[0].sinks is not None:
        found["sinks"] = torch.cat([layer.sinks for layer in layers if layer.sinks is not None])
    experts = [layer.mlp for layer in layers if isinstance(layer.mlp, ExpertWeights)]
    if experts:
        _experts(found, experts, whole.layers[index].mlp)  # type: ignore[arg-type]
    else:
        gated, width = whole.layers[index].mlp.gated, whole.layers[index].mlp.width
        _in_pieces(found, "gate_up", [layer.mlp.gate_up for layer in layers], 1 + gated, width)  # type: ignore[union-attr]
        _summed(found, "down", [layer.mlp.down for layer in layers], width)  # type: ignore[union-attr]
    return found


def _same(found: Numbers, name: str, tensors: Sequence[Tensor | None]) -> None:
    first = tensors[0]
    if first is not None:
        assert all(other is not None and torch.equal(first, other) for other in tensors), name
        found[name] = first


def _qkv(found: Numbers, layers: Sequence[LayerWeights], configs: Sequence[ModelConfig]) -> None:
    for kind in ("weight", "bias"):
        parts: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
        for layer, config in zip(layers, configs, strict=True):
            rows = _rows(layer.qkv, kind)
            if rows is None:
                return
            queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
            q, k, v = rows.split([queries, keys, keys])
            parts["q"].append(q)
            if config.shard.rank % config.kv_replicas == 0:
                parts["k"].append(k)
                parts["v"].append(v)
            else:
                assert torch.equal(parts["k"][-1], k) and torch.equal(parts["v"][-1], v)
        for name, pieces in parts.items():
            found[f"{name}.{kind}"] = torch.cat(pieces)


def _head_norm(found: Numbers, name: str, parts: Sequence[Tensor | None], configs: Sequence[ModelConfig]) -> None:
    first, config = parts[0], configs[0]
    if first is None:
        return
    if len(first) == config.head_dim and config.layers[0].qk_norm == "head":
        return _same(found, name, parts)
    step = config.kv_replicas if name == "k_norm" else 1
    found[name] = torch.cat([part for part in parts[::step] if part is not None])


def _rows(linear: LinearWeights, kind: str) -> Tensor | None:
    return linear.matrix.dequantized().float() if kind == "weight" else linear.bias


def _in_pieces(found: Numbers, name: str, linears: Sequence[LinearWeights], count: int, width: int) -> None:
    """Adds rows of `count` kinds, each of which the ranks divide."""
    for kind in ("weight", "bias"):
        rows = [rows for linear in linears if (rows := _rows(linear, kind)) is not None]
        if rows:
            pieces = [each.chunk(count) for each in rows]
            kinds = [torch.cat([piece[place] for piece in pieces]) for place in range(count)]
            found[f"{name}.{kind}"] = torch.cat([_without_zeros(each, 0, width) for each in kinds])


def _without_zeros(numbers: Tensor, dim: int, width: int) -> Tensor:
    own, zeros = numbers.split([width, numbers.shape[dim] - width], dim=dim)
    assert not zeros.any()
    return own


def _summed(found: Numbers, name: str, linears: Sequence[LinearWeights], width: int | None = None) -> None:
    numbers = torch.cat([linear.matrix.dequantized().float() for linear in linears], dim=1)
    found[f"{name}.weight"] = numbers if width is None else _without_zeros(numbers, 1, width)
    first, *others = linears
    assert all(other.bias is None for other in others)
    if first.bias is not None:
        found[f"{name}.bias"] = first.bias


def _experts(found: Numbers, parts: Sequence[ExpertWeights], whole: ExpertsConfig) -> None:
    first, width = parts[0], whole.width
    _same(found, "router", [part.router.weight for part in parts])
    _same(found, "router.bias", [part.router.bias for part in parts])
    _same(found, "corrections", [part.corrections for part in parts])
    gate_up = [_stack(part.gate_up).chunk(2, dim=1) for part in parts]
    kinds = [torch.cat([piece[place] for piece in gate_up], dim=1) for place in (0, 1)]
    found["gate_up"] = torch.cat([_without_zeros(each, 1, width) for each in kinds], dim=1)
    found["down"] = _without_zeros(torch.cat([_stack(part.down) for part in parts], dim=2), 2, width)
    if first.gate_up_bias is not None:
        biases = [part.gate_up_bias.chunk(2, dim=1) for part in parts if part.gate_up_bias is not None]
        kinds = [torch.cat([piece[place] for piece in biases], dim=1) for place in (0, 1)]
        found["gate_up.bias"] = torch.cat([_without_zeros(each, 1, width) for each in kinds], dim=1)
    assert all(part.down_bias is None for part in parts[1:])
    if first.down_bias is not None:
        found["down.bias"] = first.down_bias
    shared = [part.shared for part in parts if part.shared is not None]
    if shared:
        assert whole.shared_width is not None
        _in_pieces(found, "shared.gate_up", [each.gate_up for each in shared], 2, whole.shared_width)
        _summed(found, "shared.down", [each.down for each in shared], whole.shared_width)
        _same(found, "shared.gate", [each.gate for each in shared])


def _stack(experts: ExpertMatrices) -> Tensor:
    return torch.stack([matrix.dequantized().float() for matrix in experts.matrices])


def assert_same(found: Numbers, wanted: Numbers) -> None:
    """Fails for the first tensor that differs."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def assert_disjoint(widths: Sequence[slice], whole: int) -> None:
    """Fails unless the parts lie beside each other and make up the whole."""
    assert widths[0].start == 0 and widths[-1].stop == whole
    assert all(one.stop == other.start for one, other in pairwise(widths))
