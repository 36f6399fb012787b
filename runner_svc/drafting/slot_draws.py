"""Draws drafts as the tokens that they stand for will be drawn: with the slot's parameters and that position's noise.

A drafter whose logits are close to the model's then agrees with it as often as it can, at any temperature.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.interface.backend import SlotChanges
from runner_svc.interface.slot_state import ROW_PARAMS, SlotState
from runner_svc.sampling.logit_adjustments import adjust_logits
from runner_svc.sampling.sampler import Sampler


class SlotDraws:
    """The sampling parameters of the slots, and draws with them on the CPU."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._params = np.zeros(num_slots + 1, ROW_PARAMS)
        self._states: dict[int, SlotState] = {}
        self._sampler = Sampler(vocab_size)

    def change(self, changes: SlotChanges) -> None:
        """Takes the parameters of the sequences that are admitted."""
        for admitted in changes.admitted:
            self._params[admitted.state.slot] = admitted.params
            self._states[admitted.state.slot] = admitted.state

    def draw(
        self,
        logits: Tensor,
        tokens: NDArray[np.int32],
        slots: NDArray[np.int32],
        counters: NDArray[np.int32],
        drafts: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        """Returns the token behind the known ones and the `drafts` [L, j] of each of `slots` [L], int32 [L].

        `logits`: float32 [L, vocab_size], overwritten. `tokens`: the token buffer [slots + 1, context_length], of which
        `tokens[slot, :counter]` is read. `counters` [L]: number of known tokens of each slot.
        """
        params, positions = self._params[slots], counters + np.int32(drafts.shape[1])
        for i in np.flatnonzero(params["adjusted"]).tolist():
            text = np.concatenate([tokens[slots[i], : counters[i]], drafts[i]])
            adjust_logits(logits[i], params[i], replace(self._states[int(slots[i])], tokens=text), int(positions[i]))
        return self._sampler.tokens(logits, params, positions)
