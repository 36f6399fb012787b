"""The rotations of a step on a GPU: a table over all positions or, for dynamic RoPE, computed for each step.

Dynamic frequencies depend on a sequence's length (see `decoder.rope`), so a table over positions can't be used. With
longrope there are two tables, for sequences up to the pretraining context and for longer ones. The launches depend only
on the step's shape, not on values, and can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runner_svc.decoder.rope import RotaryEmbedding
from runner_svc.model.rope_config import RopeConfig, RopeType


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """A step's rows on the device."""

    # int32 [rows + 1]: index of each row's first position, then the total; padding rows are empty.
    offsets: Tensor
    prompt_lens: Tensor  # int32 [rows]

    def prompt_lens_of(self, indexes: Tensor) -> Tensor:
        """Returns the prompt length of the row of each position, int32 [T], by the positions' indexes in the step."""
        row = torch.searchsorted(self.offsets[1:], indexes, right=True).clamp(max=len(self.prompt_lens) - 1)
        return self.prompt_lens[row]


@dataclass(frozen=True, slots=True, eq=False)
class StepRotation:
    """One rotary embedding of a step's positions."""

    # float32 [N, rotary_dim], cosines of the pairs, then their sines; and each position's row in it, int32 [T].
    table: Tensor
    rows: Tensor


class StepRotations:
    """cos and sin of positions, for one rotary embedding."""

    def __init__(self, rope: RopeConfig, context_length: int, max_tokens: int, device: torch.device) -> None:
        """`max_tokens` is the most positions of a step."""
        self._rope = RotaryEmbedding(rope, device)
        self._original = rope.original_positions
        self._depends_on_length = rope.depends_on_length and not (
            rope.type is RopeType.LONGROPE and context_length <= rope.original_positions
        )
        self._is_dynamic = rope.type is RopeType.DYNAMIC
        self._indexes = torch.arange(max_tokens, dtype=torch.int32, device=device)
        positions = torch.arange(0 if self._is_dynamic else context_length, device=device)
        self._table = self._rotations(positions, torch.zeros_like(positions))
        if self._depends_on_length and not self._is_dynamic:  # of short sequences, then of long ones
            long = self._rotations(positions, torch.full_like(positions, self._original + 1))
            self._table = torch.cat((self._table[: self._original], long))

    @property
    def table(self) -> Tensor:
        """The table over positions, float32 [N, rotary_dim]; empty for dynamic RoPE."""
        return self._table

    def __call__(self, positions: Tensor, rows: StepRows) -> StepRotation:
        """Returns the rotations of a step's positions, int32 [T]."""
        if not self._depends_on_length:
            return StepRotation(self._table, positions)
        indexes = self._indexes[: len(positions)]
        prompt_lens = rows.prompt_lens_of(indexes)
        if self._is_dynamic:
            return StepRotation(self._rotations(positions, prompt_lens), indexes)
        is_long = torch.maximum(positions + 1, prompt_lens) > self._original
        return StepRotation(self._table, positions + self._original * is_long.int())

    def _rotations(self, positions: Tensor, prompt_lens: Tensor) -> Tensor:
        rotation = self._rope.rotation(positions, prompt_lens)
        half = rotation.cos.shape[-1] // 2
        return torch.cat((rotation.cos[:, 0, :half], rotation.sin[:, 0, half:]), dim=-1).contiguous()
