"""Drafts with a small model that has KV of its own: k passes for k drafts, the first over what it has not seen yet.

It draws each draft as the target draws the token there: with the row's parameters, the tokens before it, and the same
noise of (seed, sample index, position). So where the two distributions are close, the draws are mostly equal, at any
temperature (Daliri, Musco, Suresh 2024: Gumbel coupling).

The model computes nothing while its rows don't draft. So the first pass of a row covers all positions from its
counter to the last known token: one or two if it drafted in the step before, otherwise what it missed, a prompt too. Of
that a step computes at most `CATCH_UP` positions, and a row drafts nothing until it has caught up. Once a row began, it
goes on in steps in which no row drafts: a scheduler that got no drafts asks for none for a while.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runner_svc.batch.batch_inputs import gather_inputs
from runner_svc.drafting.draft_counters import DraftCounters
from runner_svc.drafting.drafter import no_proposals
from runner_svc.interface.backend import SlotChanges
from runner_svc.interface.slot_state import ROW_PARAMS, SlotState
from runner_svc.interface.step import StepBatch

CATCH_UP = 256
"""Most positions of a step that are computed to catch up, over all rows."""
_USUAL_LAG = 2
"""Positions that a row has to compute which drafted in the step before: not counted."""


class DraftModel(Protocol):
    """Computes passes of a draft model, whose KV lies under the target's block ids."""

    context_length: int
    """Most positions of a sequence; beyond them it drafts nothing."""

    def draw(self, batch: StepBatch) -> NDArray[np.int32]:
        """Writes the KV of every position of the gathered batch; returns the token after each row that samples.

        int32 [L], an id of the target's vocabulary, or -1 where the logits are not finite.
        """

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copies whole blocks of its KV; all sources are read before any target is written."""


class ModelDrafter:
    """Implements `runner_svc.drafting.drafter.LateDrafter`."""

    def __init__(
        self,
        name: str,
        model: DraftModel,
        counters: DraftCounters,
        num_slots: int,
        block_size: int,
        catch_up: int = CATCH_UP,
    ) -> None:
        """`name`: as the setting `draft` has it. `catch_up`: most positions of a step that rows catch up by."""
        self.name = name
        self._catch_up = catch_up
        self.counters = counters
        self._model = model
        self._is_late = np.zeros(num_slots, np.bool_)  # rows that were to draft and have not caught up
        self._params = np.zeros(num_slots, ROW_PARAMS)
        self._states: NDArray[np.object_] = np.full(num_slots, None)
        self._tables = np.zeros((0, 0), np.int32)
        self._block_size = block_size

    def change(self, changes: SlotChanges, tables: NDArray[np.int32]) -> None:
        """As `SlotDrafter.change`."""
        self._tables = tables
        self.counters.change(changes, tables)
        for admitted in changes.admitted:
            slot = admitted.state.slot
            self._is_late[slot] = False
            self._params[slot], self._states[slot] = admitted.params, admitted.state

    def settle(self, slots: NDArray[np.int32], counters: NDArray[np.int32]) -> None:
        """As `SlotDrafter.settle`."""
        self.counters.settle(slots, counters)

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """As `SlotDrafter.copy_blocks`."""
        self._model.copy_blocks(sources, targets)
        self.counters.copy_blocks(sources, targets)

    def forget_blocks(self, blocks: NDArray[np.int32]) -> None:
        """As `SlotDrafter.forget_blocks`."""
        self.counters.forget_blocks(blocks)

    def catch_up(self, tokens: NDArray[np.int32], slots: NDArray[np.int32], counters: NDArray[np.int32]) -> None:
        """As `LateDrafter.catch_up`."""
        late = np.flatnonzero(self._is_late[slots])
        if not len(late):
            return
        slots, ends = slots[late], np.minimum(counters[late] - 1, self._model.context_length)
        starts = self.counters.drafted[slots]
        lags = np.maximum(ends - starts, 0)
        counts = _shares(lags, self._catch_up)
        self._is_late[slots[counts == lags]] = False
        rows = np.flatnonzero(counts)
        if len(rows):
            self._draw(tokens, slots[rows], starts[rows], counts[rows], np.zeros(len(rows), np.bool_))
            self.counters.settle(slots[rows], counters[late[rows]])

    def propose(
        self,
        tokens: NDArray[np.int32],
        slots: NDArray[np.int32],
        counters: NDArray[np.int32],
        most: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        """As `Drafter.propose`; leaves the drafts behind the known tokens, where the passes read them."""
        proposals = no_proposals(most)
        most = np.minimum(most, self._model.context_length + 1 - counters)
        rows = np.flatnonzero(most > 0)
        self.counters.settle(slots, counters)  # of a step that failed, nothing else has
        rows = self._first_pass(tokens, slots, counters, proposals, rows)
        for place in range(1, proposals.shape[1]):
            rows = rows[(most[rows] > place) & (proposals[rows, place - 1] >= 0)]
            if not len(rows):
                break
            ends = counters[rows] + place
            tokens[slots[rows], ends - 1] = proposals[rows, place - 1]
            ones = np.ones(len(rows), np.int32)
            proposals[rows, place] = self._draw(tokens, slots[rows], ends - 1, ones, ones.astype(np.bool_))
        return proposals

    def _first_pass(
        self,
        tokens: NDArray[np.int32],
        slots: NDArray[np.int32],
        known: NDArray[np.int32],
        proposals: NDArray[np.int32],
        rows: NDArray[np.intp],
    ) -> NDArray[np.intp]:
        """Computes what the `rows` missed, and the first drafts of those that have caught up; returns these."""
        starts = self.counters.drafted[slots]
        lags = known - starts
        counts = np.zeros_like(lags)
        counts[rows] = _shares(lags[rows], self._catch_up)
        self._is_late[slots[rows]] = counts[rows] < lags[rows]
        rows = rows[counts[rows] > 0]
        if not len(rows):
            return rows
        caught_up = counts[rows] == lags[rows]
        drawn = self._draw(tokens, slots[rows], starts[rows], counts[rows], caught_up)
        rows = rows[caught_up]
        proposals[rows, 0] = drawn
        return rows

    def _draw(
        self,
        tokens: NDArray[np.int32],
        slots: NDArray[np.int32],
        starts: NDArray[np.int32],
        counts: NDArray[np.int32],
        samples: NDArray[np.bool_],
    ) -> NDArray[np.int32]:
        """Computes `counts` [R] positions from `starts`; returns the token after each row that `samples` [R]."""
        batch = StepBatch(
            slots=slots,
            starts=starts,
            counts=counts,
            sample=samples,
            tokens=np.zeros(0, np.int32),
            positions=np.zeros(0, np.int32),
            slot_mapping=np.zeros(0, np.int64),
            block_tables=np.zeros((0, 0), np.int32),
            params=self._params[slots],
            states=[self._state(slot, tokens) for slot in slots.tolist()],
        )
        drawn = self._model.draw(gather_inputs(batch, tokens, self._tables, self._block_size))
        self.counters.advance(slots, starts + counts)
        return drawn

    def _state(self, slot: int, tokens: NDArray[np.int32]) -> SlotState:
        """Returns the slot's state over the token buffer; it asks for no log-probabilities."""
        state = self._states[slot]
        if state.tokens.base is not tokens or state.logprobs is not None or state.prompt_logprobs is not None:
            state = replace(state, tokens=tokens[slot], logprobs=None, prompt_logprobs=None)
            self._states[slot] = state
        return state


def _shares(lags: NDArray[np.int32], most: int) -> NDArray[np.int32]:
    """Returns how many of its `lags` [L] positions each row computes, the shortest lags first; `most` to catch up."""
    order = np.argsort(lags, kind="stable")
    owed = np.where(lags[order] > _USUAL_LAG, lags[order], 0)
    before = np.cumsum(owed) - owed
    shares = np.empty_like(lags)
    shares[order] = np.where(owed == 0, lags[order], np.clip(most - before, 0, owed))
    return shares
