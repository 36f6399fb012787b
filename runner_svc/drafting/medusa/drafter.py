"""Drafts with Medusa's heads, from the model's state at the last position whose draw was kept.

The state comes with the step that drew the last known token, so drafting needs no pass of the model. A sequence has
none before its first step here (it has just been admitted), and drafts nothing in that step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.drafting.drafter import no_proposals
from runner_svc.drafting.medusa.heads import MedusaHead, logits_of
from runner_svc.drafting.slot_draws import SlotDraws
from runner_svc.interface.backend import SlotChanges
from runner_svc.interface.kv_cache import int64


class MedusaDrafter:
    """Implements `runner_svc.drafting.drafter.HiddenDrafter`."""

    def __init__(
        self,
        name: str,
        heads: Sequence[MedusaHead],
        model_head: Callable[[Tensor], Tensor],
        num_slots: int,
        hidden_size: int,
        vocab_size: int,
    ) -> None:
        """`name`: as the setting `draft` has it. `model_head`: as `ServedDecoder.head`, for heads that share it."""
        self.name = name
        self.max_drafts = len(heads)
        self._heads, self._model_head = heads, model_head
        self._draws = SlotDraws(num_slots, vocab_size)
        self._states = torch.zeros(num_slots + 1, hidden_size)
        self._counters = np.full(num_slots + 1, -1, np.int32)
        """Known tokens of each slot when its state was taken; -1: it has none."""

    def change(self, changes: SlotChanges, tables: NDArray[np.int32]) -> None:
        self._draws.change(changes)
        for admitted in changes.admitted:
            self._counters[admitted.state.slot] = -1

    def settle(self, slots: NDArray[np.int32], counters: NDArray[np.int32]) -> None:
        """Needs nothing: `observe` brings the counters with the states."""

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Needs nothing: the heads have no KV."""

    def forget_blocks(self, blocks: NDArray[np.int32]) -> None:
        """Needs nothing: the heads have no KV."""

    def observe(self, slots: NDArray[np.int32], counters: NDArray[np.int32], states: Tensor) -> None:
        self._states[int64(slots)] = states
        self._counters[slots] = counters

    @torch.inference_mode()
    def propose(
        self,
        tokens: NDArray[np.int32],
        slots: NDArray[np.int32],
        counters: NDArray[np.int32],
        most: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        proposals = no_proposals(most)
        wanted = np.where(self._counters[slots] == counters, most, 0)
        drafting = np.flatnonzero(wanted)
        if not len(drafting):
            return proposals
        states = self._states[int64(slots[drafting])]
        heads = self._heads[: int(wanted.max())]
        for distance, logits in enumerate(logits_of(heads, states, self._model_head)):
            kept = np.flatnonzero(wanted[drafting] > distance)
            rows = drafting[kept]
            before = proposals[rows, :distance]
            own = logits[torch.from_numpy(kept)]
            proposals[rows, distance] = self._draws.draw(own, tokens, slots[rows], counters[rows], before)
        return proposals
