"""Slot state of a backend on the CPU, kept as on a device: `device_slots` in numpy.

The sampler writes into the token buffer and the next chunk reads from it, without a check of which sequence has the
slot. A token written for a sequence that has left its slot becomes a wrong token of the slot's next sequence, as on a
GPU. `LaunchedPlan` prevents this; here a failure to do so shows up without a GPU.

A row without start begins at the slot's last known token, by `known`, which counts what is in the buffer, whatever the
host has seen of it. Its drafts are written behind that token before the inputs are gathered. Only `verify`, or `write`
for rows that draw one token, moves the counter.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from runner_svc.batch.batch_inputs import gather_inputs
from runner_svc.drafting.accept import accept
from runner_svc.drafting.drafter import Drafter, FollowingDrafter, HiddenDrafter, LateDrafter, SlotDrafter
from runner_svc.interface.backend import AdmittedSlot, SlotChanges
from runner_svc.interface.ranks import Regrouping
from runner_svc.interface.step import StepBatch, StepOutput


class HostSlots:
    """Tokens, block tables, known positions and epochs by slot; the last row belongs to the dummy slot.

    The operating system allocates them zeroed and lazily, like the buffers of `BatchState`.
    """

    def __init__(
        self,
        num_slots: int,
        context_length: int,
        block_size: int,
        drafter: Drafter | None = None,
        vocab_size: int = 0,
    ) -> None:
        """`vocab_size`: proposals of the `drafter` are ids below it."""
        self.dummy_slot = num_slots
        self.tokens = np.zeros((num_slots + 1, context_length), np.int32)
        self.tables = np.zeros((num_slots + 1, -(-context_length // block_size)), np.int32)
        self.table_lengths = np.zeros(num_slots + 1, np.int32)
        self.known = np.zeros(num_slots + 1, np.int32)
        """Number of positions with a token; later positions contain an earlier sequence's tokens."""
        self.epochs = np.zeros(num_slots + 1, np.int64)
        """Number of sequences admitted to each slot so far."""
        self.admitted: dict[int, AdmittedSlot] = {}
        """The last sequence of each slot as it was admitted, for drafters of tests."""
        self.strays = 0
        """Tokens written into a slot after its sequence had changed: 0 unless the runner fails to redirect them."""
        self._block_size = block_size
        self._vocab_size = vocab_size
        self.draft_with(drafter)

    def forget(self, num_blocks: int) -> None:
        """Forgets all sequences, and what the drafter keeps of them and of the cache's `num_blocks` blocks.

        Ranks of a group then have equal states, whatever each has seen before.
        """
        for array in (self.tokens, self.tables, self.table_lengths, self.known, self.epochs):
            array.fill(0)
        self.admitted.clear()
        if self._follower is not None:
            self._follower.forget_blocks(np.arange(1, num_blocks + 1, dtype=np.int32))
        if isinstance(self._drafter, Regrouping):
            self._drafter.regroup()

    def draft_with(self, drafter: Drafter | None) -> None:
        """Sets the drafter, before the first change."""
        self._drafter = drafter
        self._follower = drafter if isinstance(drafter, SlotDrafter) else None
        self.observer = drafter if isinstance(drafter, HiddenDrafter) else None
        self.reader = drafter if isinstance(drafter, FollowingDrafter) else None
        self._late = drafter if isinstance(drafter, LateDrafter) else None

    def change(self, changes: SlotChanges) -> None:
        """Applies admissions, then appends. Raises RuntimeError for tokens that do not follow the last known one."""
        for admitted in changes.admitted:
            slot, count = admitted.state.slot, admitted.num_tokens
            self.tokens[slot, :count] = admitted.state.tokens[:count]
            self.tables[slot, : len(admitted.blocks)] = admitted.blocks
            self.table_lengths[slot] = len(admitted.blocks)
            self.known[slot] = count
            self.epochs[slot] += 1
            self.admitted[slot] = admitted
        if len(changes.append_slots):
            self.tables[changes.append_slots, changes.append_indexes] = changes.append_blocks
            self.table_lengths[changes.append_slots] = changes.append_indexes + 1  # a slot's last append counts
        for forced in changes.forced:
            end = forced.first + len(forced.tokens)
            if forced.first != self.known[forced.slot]:
                raise RuntimeError(f"tokens appended at {forced.first}, {self.known[forced.slot]} are known")
            self.tokens[forced.slot, forced.first : end] = forced.tokens
            self.known[forced.slot] = end
        if self._follower is not None:
            self._follower.change(changes, self.tables)

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Has the drafter copy what it keeps of blocks."""
        if self._follower is not None:
            self._follower.copy_blocks(sources, targets)

    def forget_drafts(self, blocks: NDArray[np.int32]) -> None:
        """Has the drafter forget what it keeps of blocks whose KV comes from the host pool, without its own."""
        if self._follower is not None:
            self._follower.forget_blocks(blocks)

    def gathered(self, batch: StepBatch) -> StepBatch:
        """Returns the batch with its inputs. Raises RuntimeError if an input token has not been written yet.

        Rows without start get theirs, and `drafts` and `counts` become those that are verified.
        """
        if self._drafter is not None:
            batch = self._drafted(batch, self._drafter)
            if self._late is not None and not len(batch.drafts) and (batch.counts == 1).all():
                self._late.catch_up(self.tokens, batch.slots, self.known[batch.slots])
        known_ends = batch.ends - batch.drafts if len(batch.drafts) else batch.ends
        if (known_ends > self.known[batch.slots]).any():
            raise RuntimeError("a row reads a token that has not been written yet")
        return gather_inputs(batch, self.tokens, self.tables, self._block_size)

    def _drafted(self, batch: StepBatch, drafter: Drafter) -> StepBatch:
        """Returns the batch with the starts of all rows; writes the drafts into the token buffer."""
        rows = np.flatnonzero(batch.starts < 0)
        if not len(rows):
            return batch
        slots = batch.slots[rows]
        known, starts = self.known[slots], batch.starts.copy()
        starts[rows] = known - 1
        if not len(batch.drafts):
            return replace(batch, starts=starts)
        drafts, counts = np.zeros_like(batch.drafts), batch.counts.copy()
        drafts[rows] = self._propose(drafter, slots, known, batch.drafts[rows])
        counts[rows] = 1 + drafts[rows]
        return replace(batch, starts=starts, counts=counts, drafts=drafts)

    def _propose(
        self, drafter: Drafter, slots: NDArray[np.int32], known: NDArray[np.int32], asked: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Writes at most `asked` [L] drafts behind the `known` [L] tokens; returns their numbers, int32 [L].

        All of them have a position in the slot's blocks, and the token after them has one in the context, whatever the
        plan asks for.
        """
        room = np.minimum(self.tokens.shape[1] - 1, self.table_lengths[slots] * self._block_size) - known
        most = np.clip(asked, 0, np.maximum(room, 0))
        if not most.any():
            return most
        proposals = drafter.propose(self.tokens, slots, known, most)
        columns = np.arange(proposals.shape[1])
        valid = (proposals >= 0) & (proposals < self._vocab_size) & (columns < most[:, None])
        kept = np.logical_and.accumulate(valid, axis=1)
        rows, places = np.nonzero(kept)
        self.tokens[slots[rows], known[rows] + places] = proposals[kept]
        return kept.sum(axis=1, dtype=np.int32)

    def verify(
        self, batch: StepBatch, rows: NDArray[np.intp], draws: NDArray[np.int32], finite: NDArray[np.bool_]
    ) -> StepOutput:
        """Accepts the drafts of a gathered batch, writes the draws that are kept, and moves the counters.

        `rows` [L] are the batch's rows that sample. `draws` and `finite` [P]: the token drawn after each of a row's
        last 1 + `batch.drafts` positions, one row after the other, and whether its logits were finite.
        """
        slots, drafted = batch.slots[rows, None], batch.drafts[rows]
        columns = np.arange(1 + drafted.max(initial=0))
        drawn = columns <= drafted[:, None]
        by_row, are_finite = np.full(drawn.shape, -1, np.int32), np.zeros(drawn.shape, np.bool_)
        by_row[drawn], are_finite[drawn] = draws, finite
        places = (batch.ends[rows] - drafted)[:, None] + columns
        is_draft = columns[:-1] < drafted[:, None]
        drafts = np.full(is_draft.shape, -1, np.int32)
        drafts[is_draft] = self.tokens[np.broadcast_to(slots, is_draft.shape)[is_draft], places[:, :-1][is_draft]]
        counts, statuses = accept(by_row, are_finite, drafts)
        kept = columns < counts[:, None]
        self.tokens[np.broadcast_to(slots, kept.shape)[kept], places[kept]] = by_row[kept]
        # Plans in flight go on behind a row that has failed, in vain: as behind those of `write`.
        self.known[batch.slots[rows]] = places[:, 0] + np.maximum(counts, 1)
        if self._follower is not None:
            self._follower.settle(batch.slots[rows], self.known[batch.slots[rows]])
        return StepOutput.verified(rows, by_row, counts, statuses, batch.drafts)

    def redirected(self, slots: NDArray[np.int32], gone: NDArray[np.bool_] | None) -> NDArray[np.int32]:
        """Returns the slots [L], with those that are `gone` [L] replaced by the dummy slot."""
        return slots if gone is None else np.where(gone, self.dummy_slot, slots).astype(np.int32, copy=False)

    def write(
        self,
        slots: NDArray[np.int32],
        positions: NDArray[np.int32],
        tokens: NDArray[np.int32],
        epochs: NDArray[np.int64] | None = None,
    ) -> None:
        """Writes sampled `tokens` [L] to `positions` of `slots`.

        `epochs` [L] are the slots' epochs when the rows were computed; None means that they have not changed.
        """
        if epochs is not None:
            self.strays += int((self.epochs[slots] != epochs)[slots != self.dummy_slot].sum())
        self.tokens[slots, positions] = tokens
        self.known[slots] = np.maximum(self.known[slots], positions + 1)
