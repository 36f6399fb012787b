"""EAGLE's draft layer over the slots of a GPU backend: what it keeps of a pass, and the drafts that it draws.

As `runner_svc.drafting.eagle.drafter`: states and KV lie under the model's block ids, and are written for all positions
that the model computes. Both are launches beside the passes, not in their graphs, as attention's extent varies.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.drafting.eagle.checkpoint import EagleWeights
from runner_svc.drafting.eagle.layer import EagleLayer
from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.gpu.drafts.draft_draws import DraftDraws
from runner_svc.interface.draft_launchers import DraftRows

_NEVER = -1e30
"""Logit of an id that the layer's head does not have: finite, as others mark the row."""


class EagleDraft:
    """A layer, its KV, and what it keeps of the model's states at the positions of the cache."""

    def __init__(
        self,
        weights: EagleWeights,
        decoder: CudaDecoder,
        draws: DraftDraws,
        slots: DeviceSlots,
        logits: Tensor,
        *,
        num_blocks: int,
        block_size: int,
    ) -> None:
        """`weights` are on the decoder's device, in its dtype. `logits`: float32 [at least R, vocab_size]."""
        positions = (num_blocks + 1) * block_size
        self.draws = draws
        self._decoder, self._slots, self._logits, self._block_size = decoder, slots, logits, block_size
        own = weights.embeddings
        self._layer = EagleLayer(weights, decoder.embeddings if own is None else own, positions)
        self._head_ids = weights.head_ids
        self._states = torch.zeros(positions, weights.config.hidden_size, dtype=decoder.dtype, device=decoder.device)

    @staticmethod
    def numbers_per_position(weights: EagleWeights) -> int:
        """Returns how many numbers are kept for a position of the cache."""
        config = weights.config
        return config.hidden_size + 2 * config.num_kv_heads * config.head_dim

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copies whole blocks, int64 [N] each; all sources are read before any target is written."""
        size = self._block_size
        for kept in (self._states, *self._layer.cache):
            blocks = kept.view(len(kept) // size, size, *kept.shape[1:])
            blocks[targets] = blocks[sources]

    def kept_by_block(self) -> list[Tensor]:
        """Returns the states, and the layer's keys and values: only steps of the model could compute them again."""
        return [self._states[None], self._layer.cache]

    def follow(self, slots: Tensor, offsets: Tensor, inputs: Tensor, states: Tensor) -> None:
        """Takes what the layer reads of the model at all T positions of a pass.

        `slots` [R], `offsets` [R + 1]: of the rows of the pass. `inputs`: tokens, positions and places of the cache,
        int32 [3, T]; a padded place is position 0 of the dummy block. `states`: of EAGLE-1 those after the final norm,
        [T, hidden_size], of EAGLE-3 three within the model, [T, 3 * hidden_size].
        """
        tokens, positions, places = inputs.long()
        self._states.index_copy_(0, places, self._layer.fused(states))
        every = torch.arange(len(positions), device=positions.device)
        rows = torch.searchsorted(offsets[1:].long(), every, right=True).clamp(max=len(slots) - 1)
        before = self._places(slots.index_select(0, rows), (positions - 1).clamp(min=0))
        follows = positions > 0
        self._layer.write(
            tokens, self._states.index_select(0, before), positions.clamp(min=1), torch.where(follows, places, 0)
        )

    def propose(self, stream: int, rows: DraftRows, proposals: Tensor, longest: int) -> None:
        """Fills `proposals`, int32 [R, S], for rows that know at most `longest` tokens."""
        slots, tokens, width = rows.slots, self._slots.tokens, min(longest + proposals.shape[1], self._most_positions)
        known = self._slots.counters.index_select(0, slots)
        fits = (rows.counts > 0) & (known > 1) & (known <= rows.limits)
        reached = torch.arange(width, device=slots.device)
        contexts = self._places(slots[:, None], reached)
        seen = torch.where(fits, known, 2)
        inputs = tokens.view(-1).index_select(0, slots.long() * tokens.shape[1] + seen - 1)
        states = self._states.index_select(0, self._places(slots, (seen - 2).long()))
        proposals.fill_(-1)
        for distance in range(proposals.shape[1]):
            fits = fits & (known + distance <= rows.limits)
            if distance:
                inputs = self.draws.tokens[: len(slots)].clamp(min=0)
                fits = fits & (proposals[:, distance - 1] >= 0)
            positions = torch.where(fits, known - 1 + distance, 1).long()
            places = torch.where(fits, self._places(slots, positions), 0)
            states = self._layer.step_rows(inputs.long(), states, positions, places, contexts)
            logits = self._logits_of(stream, states)
            self.draws.draw(stream, logits, slots, known + distance, fits, proposals[:, distance])

    def _logits_of(self, stream: int, states: Tensor) -> Tensor:
        """Returns float32 [L, vocab_size] for outputs of the layer."""
        logits = self._logits[: len(states)]
        if self._head_ids is None:
            self._decoder.head_logits(stream, states, logits)
        else:
            logits.fill_(_NEVER)
            logits[:, self._head_ids] = self._layer.head(states).float()
        return logits

    @property
    def _most_positions(self) -> int:
        return self._slots.tables.shape[1] * self._block_size

    def _places(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Returns the places in the cache of int64 `positions` of `slots`, int64, of the shape of both."""
        tables = self._slots.tables
        blocks = tables.view(-1)[slots.long() * tables.shape[1] + positions // self._block_size]
        return blocks.long() * self._block_size + positions % self._block_size


def longest_of(highest: NDArray[np.int32], starts: NDArray[np.int32]) -> int:
    """Returns the most tokens that a row of a step may know, from bounds of the rows' first positions."""
    return int((highest if len(highest) else starts).max()) + 1
