"""Drafts with EAGLE's layer: one pass of it for each draft, from the model's state and then from its own outputs.

The states of all positions that the model computes are kept under the model's block ids, and the layer's KV is written
for them at once. So whatever KV the model has, the layer has too: for prefixes that are shared, after preemption, and
in blocks that are copied.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.drafting.drafter import no_proposals
from runner_svc.drafting.eagle.checkpoint import EagleWeights
from runner_svc.drafting.eagle.layer import EagleLayer
from runner_svc.drafting.slot_draws import SlotDraws
from runner_svc.interface.backend import SlotChanges
from runner_svc.interface.kv_cache import int64
from runner_svc.interface.step import StepBatch, cache_places

_NEVER = -1e30
"""Logit of an id that the layer's head does not have."""


class EagleDrafter:
    """Implements `runner_svc.drafting.drafter.FollowingDrafter`."""

    def __init__(
        self,
        name: str,
        weights: EagleWeights,
        states_of: Callable[[Tensor], Tensor],
        model_head: Callable[[Tensor], Tensor],
        embed: Callable[[Tensor], Tensor],
        num_slots: int,
        num_blocks: int,
        block_size: int,
    ) -> None:
        """`name`: as the setting `draft` has it.

        `states_of`: returns what the layer reads of the model, [T, ...], for the hidden states [T, hidden_size] that
        `ServedDecoder.forward` has just returned. `model_head`: `ServedDecoder.head`, for EAGLE-1. `embed`:
        `ServedDecoder.embed`, for a layer without embeddings of its own.
        """
        self.name = name
        positions, config = (num_blocks + 1) * block_size, weights.config
        cache = torch.zeros(2, positions, config.num_kv_heads, config.head_dim)
        self._layer = EagleLayer(weights, embed, cache)
        self._states = torch.zeros(positions, weights.config.hidden_size)
        """The model's state at each position of the cache."""
        self._states_of, self._model_head = states_of, model_head
        self._head_ids = weights.head_ids
        self._vocab_size = weights.config.vocab_size
        self._draws = SlotDraws(num_slots, self._vocab_size)
        self._tables = np.zeros((0, 0), np.int32)
        self._block_size = block_size

    def change(self, changes: SlotChanges, tables: NDArray[np.int32]) -> None:
        self._tables = tables
        self._draws.change(changes)

    def settle(self, slots: NDArray[np.int32], counters: NDArray[np.int32]) -> None:
        """Needs nothing: states and KV of wrong drafts are overwritten before they are read, as the model's are."""

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        size = self._block_size
        read, written = int64(sources), int64(targets)
        for kept in (self._states, *self._layer.cache):
            blocks = kept.view(len(kept) // size, size, *kept.shape[1:])
            blocks[written] = blocks[read]

    def forget_blocks(self, blocks: NDArray[np.int32]) -> None:
        """Needs nothing: what it keeps travels with the blocks."""

    def kept_by_block(self) -> list[Tensor]:
        """As `FollowingDrafter.kept_by_block`: the states, and the layer's keys and values."""
        return [self._states[None], self._layer.cache]

    @torch.inference_mode()
    def follow(self, batch: StepBatch, hidden: Tensor) -> None:
        places = torch.from_numpy(batch.slot_mapping)
        self._states[places] = self._layer.fused(self._states_of(hidden))
        rows = np.repeat(np.arange(len(batch.slots)), batch.counts)
        later = np.flatnonzero(batch.positions > 0)
        places_before = cache_places(batch.block_tables, rows[later], batch.positions[later] - 1, self._block_size)
        states = self._states[torch.from_numpy(places_before)]
        tokens, positions = int64(batch.tokens[later]), int64(batch.positions[later])
        self._layer.write(tokens, states, positions, places[torch.from_numpy(later)])

    @torch.inference_mode()
    def propose(
        self,
        tokens: NDArray[np.int32],
        slots: NDArray[np.int32],
        counters: NDArray[np.int32],
        most: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        proposals = no_proposals(most)
        wanted = np.where(counters > 1, most, 0)  # a sequence of one token has no state before it
        rows = np.flatnonzero(wanted)
        contexts = [self._places(slots[row], counters[row] + most[row] - 1) for row in rows.tolist()]
        inputs = tokens[slots[rows], counters[rows] - 1]
        befores = [int(places[counters[row] - 2]) for row, places in zip(rows.tolist(), contexts, strict=True)]
        states = self._states[befores]
        for place in range(proposals.shape[1]):
            kept = np.flatnonzero(wanted[rows] > place)
            if not len(kept):
                break
            rows, states = rows[kept], states[torch.from_numpy(kept)]
            contexts, inputs = [contexts[index] for index in kept.tolist()], inputs[kept]
            positions = counters[rows] - 1 + place
            seen = [places[1 : end + 1] for places, end in zip(contexts, positions.tolist(), strict=True)]
            states = self._layer.step(int64(inputs), states, int64(positions), seen)
            before = proposals[rows, :place]
            inputs = self._draws.draw(self._logits(states), tokens, slots[rows], counters[rows], before)
            proposals[rows, place] = inputs
        return proposals

    def _logits(self, states: Tensor) -> Tensor:
        """Returns float32 [L, vocab_size] for outputs of the layer."""
        if self._head_ids is None:
            return self._model_head(states)
        logits = torch.full((len(states), self._vocab_size), _NEVER)
        logits[:, self._head_ids] = self._layer.head(states)
        return logits

    def _places(self, slot: int, count: int) -> Tensor:
        """Returns the places in the cache of the first `count` positions of a slot, int64."""
        return torch.from_numpy(cache_places(self._tables, slot, np.arange(count), self._block_size))
