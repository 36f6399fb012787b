"""Checks that a plan fits the slots, as a whole before anything changes, on copies of the per-slot counters.

A plan that contradicts the slots is a scheduler bug and raises `PlanFault`. Unusable request data (a token outside the
vocabulary, NaN in a parameter) fails only its sequence: its rows get ROW_STATUS_FAILED.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roster_common.link_protocol import AWAIT_FLAG, SAMPLE_FLAG
from roster_protos import plan_pb2
from runner_svc.batch.plan_columns import PlanColumns, PlanFault, int32_column, require


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on what plans may name; units as in plan.proto's Hello and Model."""

    num_slots: int
    num_blocks: int
    block_size: int
    max_step_tokens: int
    context_length: int
    vocab_size: int
    max_drafts: int = 0

    @property
    def max_table(self) -> int:
        """Maximum number of blocks of one sequence."""
        return -(-self.context_length // self.block_size)


@dataclass(slots=True, eq=False)
class SlotCounters:
    """Per-slot counters, [num_slots] each; the others are meaningless in slots that are not `resident`."""

    resident: NDArray[np.bool_]
    # The sequence has failed: its later rows, which may already be in flight, are not computed.
    failed: NDArray[np.bool_]
    computed: NDArray[np.int32]  # number of positions with KV
    # Least number of prompt and sampled tokens in the token buffer once every plan so far is done.
    num_tokens: NDArray[np.int32]
    num_blocks: NDArray[np.int32]  # length of the block table
    # By how much the true number of tokens may exceed `num_tokens`: the drafts of the rows that are not recorded yet.
    # While it is not 0, only a row without start fits, and `computed` is an upper bound: `most_tokens` - 1.
    spread: NDArray[np.int32]
    # Tokens of the sequence in the host's buffer; only kept if rows may draft.
    recorded: NDArray[np.int32]

    @classmethod
    def empty(cls, num_slots: int) -> SlotCounters:
        """Returns counters of empty slots."""
        return cls(
            np.zeros(num_slots, np.bool_),
            np.zeros(num_slots, np.bool_),
            np.zeros(num_slots, np.int32),
            np.zeros(num_slots, np.int32),
            np.zeros(num_slots, np.int32),
            np.zeros(num_slots, np.int32),
            np.zeros(num_slots, np.int32),
        )

    def most_tokens(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns the largest number of tokens of each of `slots` [R] once every plan so far is done, int32 [R]."""
        return self.num_tokens[slots] + self.spread[slots]

    def copy(self) -> SlotCounters:
        """Returns a deep copy."""
        return SlotCounters(
            self.resident.copy(),
            self.failed.copy(),
            self.computed.copy(),
            self.num_tokens.copy(),
            self.num_blocks.copy(),
            self.spread.copy(),
            self.recorded.copy(),
        )


class PlanCheck:
    """Check of one plan against `counters`, which `run` updates."""

    def __init__(self, limits: Limits, counters: SlotCounters) -> None:
        self._limits = limits
        self._counters = counters
        self._admitted: set[int] = set()  # slots

    def run(self, plan: plan_pb2.Plan, columns: PlanColumns) -> SlotCounters:
        """Applies releases, admissions and appends to the counters, checks extents against them, and returns them.

        Raises PlanFault if the plan does not fit.
        """
        if len(columns.releases):
            self._releases(columns.releases)
        for admission in plan.admissions:
            self._admission(admission)
        if len(columns.append_slots):
            self._appends(columns)
        if len(columns.copy_sources):
            self._copies(columns)
        if len(columns.extent_slots):
            self._extents(columns)
        return self._counters

    def _releases(self, releases: NDArray[np.int32]) -> None:
        self._require_slots("release", releases)
        require("release", np.bincount(releases)[releases] > 1, "slot {} is released twice", releases)
        require("release", ~self._counters.resident[releases], "slot {} has no sequence", releases)
        self._counters.resident[releases] = False

    def _admission(self, admission: plan_pb2.Admission) -> None:
        limits, counters, slot = self._limits, self._counters, admission.slot
        name = f"admission of sequence {admission.sequence_id} to slot {slot}"
        num_tokens = len(int32_column(f"{name}: tokens", admission.tokens))
        blocks = int32_column(f"{name}: blocks", admission.blocks)
        sampling = admission.sampling
        int32_column(f"{name}: stop_ids", sampling.stop_ids)
        if len(int32_column(f"{name}: bias_ids", sampling.bias_ids)) * 4 != len(sampling.bias_values):
            raise PlanFault(f"{name}: bias_ids and bias_values have different lengths")
        if slot >= limits.num_slots:
            raise PlanFault(f"{name}: slots are 0 to {limits.num_slots - 1}")
        if counters.resident[slot]:
            raise PlanFault(f"{name}: the slot is occupied")
        if not 1 <= num_tokens <= limits.context_length:
            raise PlanFault(f"{name}: {num_tokens} tokens, must be 1 to {limits.context_length}")
        if not 1 <= admission.prompt_len <= num_tokens:
            raise PlanFault(f"{name}: prompt_len is {admission.prompt_len}, must be 1 to {num_tokens}")
        if len(blocks) > limits.max_table:
            raise PlanFault(f"{name}: {len(blocks)} blocks, must be at most {limits.max_table}")
        self._require_blocks(name, blocks)
        if admission.num_computed >= num_tokens or admission.num_computed > len(blocks) * limits.block_size:
            raise PlanFault(
                f"{name}: num_computed is {admission.num_computed} with {num_tokens} tokens and {len(blocks)} blocks"
            )
        self._admitted.add(slot)
        counters.resident[slot] = True
        counters.computed[slot] = admission.num_computed
        counters.num_tokens[slot] = num_tokens
        counters.num_blocks[slot] = len(blocks)
        counters.spread[slot] = 0
        counters.recorded[slot] = num_tokens
        counters.failed[slot] = unusable(admission, limits.vocab_size)  # overwrites the previous sequence's flag

    def _appends(self, columns: PlanColumns) -> None:
        slots, indexes = columns.append_slots, columns.append_indexes
        self._require_slots("append", slots)
        require("append", ~self._counters.resident[slots], "slot {} has no sequence", slots)
        self._require_blocks("append", columns.append_blocks)
        # The k-th append (from 0) of a slot has the index of its table's length plus k.
        order = np.argsort(slots, kind="stable")
        grouped = slots[order]
        ranks = np.empty(len(slots), np.int32)
        ranks[order] = np.arange(len(slots)) - np.searchsorted(grouped, grouped)
        expected = self._counters.num_blocks[slots] + ranks
        require("append", indexes != expected, "index {} is not the table's length {}", indexes, expected)
        require("append", indexes >= self._limits.max_table, "index {} is beyond the context", indexes)
        np.add.at(self._counters.num_blocks, slots, 1)

    def _copies(self, columns: PlanColumns) -> None:
        self._require_blocks("copy source", columns.copy_sources)
        targets = columns.copy_targets
        self._require_blocks("copy target", targets)
        require("copy", np.bincount(targets)[targets] > 1, "block {} is written twice", targets)

    def _extents(self, columns: PlanColumns) -> None:
        limits, counters = self._limits, self._counters
        slots, starts, counts = columns.extent_slots, columns.extent_starts, columns.extent_counts
        flags = columns.extent_flags
        self._require_slots("extent", slots)
        known_flags = np.uint8(SAMPLE_FLAG | AWAIT_FLAG)
        require("extent", flags & ~known_flags != 0, "flags {} are not supported by this runner", flags)
        require("extent", flags == AWAIT_FLAG, "flags {} wait for a mask without sampling", flags)
        require("extent", np.bincount(slots)[slots] > 1, "slot {} has two rows", slots)
        require("extent", ~counters.resident[slots], "slot {} has no sequence", slots)
        require("extent", counts < 1, "count {} must be at least 1", counts)
        total = int(counts.sum(dtype=np.int64))
        if total > limits.max_step_tokens:
            raise PlanFault(f"the extents have {total} positions, must be at most {limits.max_step_tokens}")
        # A failed sequence has no token at its next row's start; that row is skipped, not refused.
        alive = ~counters.failed[slots]
        if len(columns.extent_forced):
            self._forced(columns, alive)
        computed, known = counters.computed[slots], counters.num_tokens[slots]
        if limits.max_drafts or len(columns.extent_drafts) or starts.min() < 0:
            starts, known = self._bounds(columns, alive)
        require(
            "extent", alive & (starts != computed), "start {} is not the first uncomputed position {}", starts, computed
        )
        ends = starts + counts
        require("extent", alive & (ends > known), "end {} is beyond the {} tokens known", ends, known)
        capacity = counters.num_blocks[slots] * limits.block_size
        require("extent", alive & (ends > capacity), "end {} is beyond the {} positions of its blocks", ends, capacity)
        sampled = alive & (flags & SAMPLE_FLAG).astype(bool)
        require(
            "extent", sampled & (ends != known), "a token sampled at {} would replace one: {} are known", ends, known
        )
        require("extent", sampled & (ends >= limits.context_length), "position {} is beyond the context", ends)

    def _forced(self, columns: PlanColumns, alive: NDArray[np.bool_]) -> None:
        """Checks the tokens that the plan appends to its rows' sequences, and counts them as known."""
        counters, slots, tokens = self._counters, columns.extent_slots, columns.forced_tokens
        forced = columns.extent_forced.astype(np.int32)
        require("forced token", (tokens < 0) | (tokens >= self._limits.vocab_size), "there is no token {}", tokens)
        flags, has_some = columns.extent_flags, forced > 0
        drafting = (_row_drafts(columns) > 0) | (columns.extent_starts < 0)
        require("extent", has_some & drafting, "{} forced tokens, but no start or drafts", forced)
        awaiting = np.uint8(SAMPLE_FLAG | AWAIT_FLAG)
        require("extent", has_some & (flags != awaiting), "flags {} of a row with forced tokens, must be 3", flags)
        if not self._admitted.isdisjoint(slots[has_some].tolist()):
            raise PlanFault("a sequence is admitted with forced tokens: they belong to its other tokens")
        known = counters.num_tokens[slots]
        # A row in flight that awaits its mask has computed the last known token, and its own is not known yet.
        unknown = alive & has_some & ((counters.spread[slots] > 0) | (counters.computed[slots] >= known))
        require("extent", unknown, "forced tokens after position {}, whose token is not known", known)
        beyond = alive & has_some & (known + forced >= self._limits.context_length)
        require("extent", beyond, "{} forced tokens after {} known ones are beyond the context", forced, known)
        counters.num_tokens[slots[alive]] += forced[alive]
        counters.recorded[slots[alive]] += forced[alive]

    def _bounds(self, columns: PlanColumns, alive: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Checks the rows without start and the drafts; returns starts and known tokens, int32 [rows] each.

        Those of a row without start are their upper bounds, with its drafts counted as known: the rest of the check
        tests it like any other row.
        """
        counters, slots, starts = self._counters, columns.extent_slots, columns.extent_starts
        drafts = _row_drafts(columns)
        open_ended, spread = starts == -1, counters.spread[slots]
        most = self._limits.max_drafts
        if not most:
            require("extent", open_ended | (drafts > 0), "a row needs a start, and no drafts: there is no drafter")
        require("extent", drafts > most, "{} drafts, must be at most {}", drafts, np.full_like(drafts, most))
        require("extent", ~open_ended & (drafts > 0), "start {} with {} drafts, must be -1", starts, drafts)
        require(
            "extent",
            open_ended & (columns.extent_counts != 1 + drafts),
            "count {} must be 1 plus the row's {} drafts",
            columns.extent_counts,
            drafts,
        )
        flags = columns.extent_flags
        require("extent", open_ended & (flags != SAMPLE_FLAG), "flags {} of a row without start, must be 1", flags)
        require(
            "extent",
            alive & ~open_ended & (spread > 0),
            "start {} must be -1: the sequence has up to {} tokens more than are known",
            starts,
            spread,
        )
        known = counters.most_tokens(slots)
        unread = alive & open_ended & (counters.computed[slots] != known - 1)
        require("extent", unread, "start -1 in mid-prompt: {} of {} computed", counters.computed[slots], known)
        return np.where(open_ended, known - 1, starts), known + drafts

    def _require_slots(self, name: str, slots: NDArray[np.int32]) -> None:
        require(name, (slots < 0) | (slots >= self._limits.num_slots), "there is no slot {}", slots)

    def _require_blocks(self, name: str, blocks: NDArray[np.int32]) -> None:
        require(name, (blocks < 1) | (blocks > self._limits.num_blocks), "there is no block {}", blocks)


def _row_drafts(columns: PlanColumns) -> NDArray[np.int32]:
    """Returns the number of drafts of each row, int32 [rows]."""
    if len(columns.extent_drafts):
        return columns.extent_drafts.astype(np.int32)
    return np.zeros(len(columns.extent_slots), np.int32)


def unusable(admission: plan_pb2.Admission, vocab_size: int) -> bool:
    """Returns whether the request's data is unusable.

    That is the case with ids outside the vocabulary, more log-probabilities than the vocabulary has tokens, or
    parameters that are not finite or out of range.
    """
    sampling = admission.sampling
    for column in (admission.tokens, sampling.bias_ids, sampling.stop_ids):
        ids = np.frombuffer(column, "<i4")
        if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
            return True
    numbers = (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )
    return (
        max(sampling.logprobs, sampling.prompt_logprobs) > vocab_size
        or not all(map(math.isfinite, numbers))
        or sampling.temperature < 0
        or sampling.repetition_penalty <= 0
        or not np.isfinite(np.frombuffer(sampling.bias_values, "<f4")).all()
    )
