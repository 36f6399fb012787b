"""Rotary embeddings whose frequencies depend on the longest row of a batch, computed row by row.

transformers' dynamic and longrope modules take their frequencies from the greatest position that they are given, so
that a row's numbers would depend on its neighbours. Here such a module is called once for each length that has
frequencies of its own, with that length's last position beside the others, and each position keeps what belongs to its
sequence. As in `runner_svc.decoder.rope`, the length that counts is the whole prompt's for a prompt token, however it
is cut into chunks, and position + 1 for a generated token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class RowLengths:
    """Of the current pass: the length that counts for each position, int64 [T]."""

    lengths: Tensor | None = None


class _RowRotary:
    """Stands for the forward of one module."""

    def __init__(self, module: Any, rows: RowLengths) -> None:
        self._module = module
        self._forward = module.forward
        self._rows = rows

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None, **others: Any) -> Any:
        """Takes positions [1, T]; returns what the module does: tensors [1, T, ...]."""
        lengths = self._rows.lengths
        kind, original = _scaling(self._module, layer_type)
        named = {**others, **({} if layer_type is None else {"layer_type": layer_type})}
        if kind is None or lengths is None:
            return self._forward(x, position_ids, **named)
        result: Any = None
        for length, chosen in _lengths(lengths, original, kind):
            part = self._compute(x, position_ids, length, layer_type, named)
            result = part if result is None else _where(chosen, part, result)
        return result

    def _compute(
        self, x: Tensor, position_ids: Tensor, length: Tensor, layer_type: str | None, named: dict[str, Any]
    ) -> Any:
        prefix = "" if layer_type is None else f"{layer_type}_"
        setattr(self._module, f"{prefix}max_seq_len_cached", 0)  # or it keeps the frequencies of a longer row
        last = (length - 1).reshape(1, 1)
        # A shorter pass than `length` must not see positions of longer ones.
        positions = torch.cat((torch.minimum(position_ids, last), last), dim=1)
        out = self._forward(x, positions, **named)
        return tuple(part[:, :-1] for part in out) if isinstance(out, tuple) else out[:, :-1]


def _lengths(lengths: Tensor, original: int, kind: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each length that has frequencies of its own, and the positions of that length, bool [T].

    The first one is any length up to `original`.
    """
    yield lengths.new_tensor(original), lengths <= original
    if kind == "longrope":
        longest = torch.clamp(lengths.max(), min=original + 1)
        yield longest, lengths > original
    else:
        for length in torch.unique(lengths[lengths > original]):
            yield length, lengths == length


def _where(chosen: Tensor, part: Any, others: Any) -> Any:
    if isinstance(part, tuple):
        return tuple(_where(chosen, *pair) for pair in zip(part, others, strict=True))
    return torch.where(chosen.view(1, -1, *[1] * (part.dim() - 2)), part, others)


def _scaling(module: Any, layer_type: str | None) -> tuple[str | None, int]:
    """Returns "dynamic" or "longrope", or None for fixed frequencies; and the positions that they scale beyond."""
    rope_type = module.rope_type
    parameters = module.config.rope_parameters
    if isinstance(rope_type, dict):
        if layer_type is None:
            return None, 0
        rope_type, parameters = rope_type.get(layer_type), parameters[layer_type]
    if rope_type is not None and "dynamic" in rope_type:
        return "dynamic", int(module.config.max_position_embeddings)
    if rope_type == "longrope":
        return "longrope", int(parameters["original_max_position_embeddings"])
    return None, 0


def compute_by_row(model: Any, rows: RowLengths) -> int | None:
    """Replaces the forward of such modules; returns the positions below which frequencies are fixed (None: all are)."""
    bounds = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds is None:
            continue
        scalings = [_scaling(module, layer_type) for layer_type in (kinds if isinstance(kinds, dict) else (None,))]
        scaled = [original for kind, original in scalings if kind is not None]
        if scaled:
            bounds += scaled
            module.forward = _RowRotary(module, rows)
    return min(bounds, default=None)
