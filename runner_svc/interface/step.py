"""A batch and its result, by rows: the input and output of a backend.

All arrays are numpy on the CPU; a backend copies what it needs to its device. Rows are the plan's extents, in order,
without those of sequences that failed before. R rows have T positions in total.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from roster_protos import plan_pb2
from runner_svc.interface.slot_state import SlotState

Integer = TypeVar("Integer", bound=np.integer)


@dataclass(slots=True, eq=False)
class StepBatch:
    """One forward pass."""

    slots: NDArray[np.int32]  # [R] slot of each row
    # [R] first position; -1: that of the slot's last known token, by the backend's own counter (a SlotBackend only).
    starts: NDArray[np.int32]
    counts: NDArray[np.int32]  # [R] positions, >= 1
    sample: NDArray[np.bool_]  # [R] a token is sampled after the last position
    # The next four are empty for a SlotBackend, which gathers its inputs itself.
    tokens: NDArray[np.int32]  # [T] input token ids, row after row
    positions: NDArray[np.int32]  # [T] position of each
    slot_mapping: NDArray[np.int64]  # [T] block * block_size + offset: where each position's KV is written
    block_tables: NDArray[np.int32]  # [R, W] W covers the longest row; 0, the dummy block, beyond a row's own table
    params: NDArray[np.void]  # [R] records of ROW_PARAMS
    states: list[SlotState]  # [R]
    # [W] ascending sampling rows that sample once their masks arrive, not right after the forward pass.
    awaits: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp))
    # [R] most tokens that each row drafts, or [0] if none does; such a row has start -1, and at most 1 + this number of
    # positions.
    drafts: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    # [R] bounds of each row's first position, or [0] if no row has start -1.
    lowest: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    highest: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def drawing_rows(self) -> NDArray[np.intp]:
        """intp: rows that sample right after the forward pass, ascending."""
        rows = np.flatnonzero(self.sample)
        return np.setdiff1d(rows, self.awaits, assume_unique=True) if len(self.awaits) else rows

    @property
    def waiting(self) -> NDArray[np.bool_]:
        """bool [R]: set for rows that wait for masks."""
        waiting = np.zeros(len(self.slots), np.bool_)
        waiting[self.awaits] = True
        return waiting

    @property
    def ends(self) -> NDArray[np.int32]:
        """int32 [R]: number of positions that the row attends to, which is also the position of its sampled token."""
        return self.starts + self.counts

    @property
    def upper_ends(self) -> NDArray[np.int32]:
        """int32 [R]: `ends`; its upper bound for a row whose start only the backend knows."""
        return (self.highest if len(self.highest) else self.starts) + self.counts

    def num_scored(self, row: int) -> int:
        """Returns the number of leading positions whose logits score the next prompt token; 0 if not requested."""
        if self.states[row].prompt_logprobs is None or self.starts[row] < 0:  # such a row is beyond its prompt
            return 0
        start, count = int(self.starts[row]), int(self.counts[row])
        return max(0, min(count, self.states[row].prompt_len - 1 - start)) if start >= 0 else 0


class MaskedRows(Protocol):
    """Rows of a batch that wait for masks after the forward pass."""

    def sample(self, masks: NDArray[np.uint32], gone: NDArray[np.bool_]) -> PendingStep:
        """Samples all of the rows. `masks` [W, ceil(vocab_size / 32)]: a bit per token id, set if it is allowed.

        `gone` [W]: rows whose sequence has left its slot since. They are sampled like the others, because a preempted
        sequence continues with its token, but the token is not written to the slot, which may be another sequence's.
        The output is by batch row; rows that did not wait have no token in it.
        """


@dataclass(slots=True, eq=False)
class StepOutput:
    """Result of a batch, by its rows. Rows that wait for masks have no token yet."""

    statuses: NDArray[np.uint8]  # [R] plan_pb2.RowStatus
    token_counts: NDArray[np.uint8]  # [R] tokens sampled: 0 or 1, or up to 1 + the row's verified drafts
    tokens: NDArray[np.int32]  # [token_counts.sum()]
    # Of rows that requested them; `row` is the batch's row.
    logprobs: list[plan_pb2.RowLogprobs] = field(default_factory=list)
    prompt_logprobs: list[plan_pb2.RowLogprobs] = field(default_factory=list)
    forward_ns: int = 0
    sample_ns: int = 0
    # Time for which the device was idle before the batch; None if only the caller can measure it.
    idle_ns: int | None = None
    # The rows that wait for masks, if the backend computed the batch while the caller waited.
    masked_rows: MaskedRows | None = None
    # [R] drafted tokens that each row verified, or [0] if the batch has no drafts.
    drafted: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))

    @property
    def drew_all(self) -> bool:
        """Whether every row sampled one token, and none drafted."""
        return len(self.tokens) == len(self.token_counts) and not len(self.drafted)

    @classmethod
    def sampled(
        cls, num_rows: int, rows: NDArray[np.intp], tokens: NDArray[np.int32], finite: NDArray[np.bool_]
    ) -> StepOutput:
        """Returns the output of ascending `rows` [L] that sampled `tokens` [L]; rows not `finite` [L] get no token."""
        statuses = np.zeros(num_rows, np.uint8)
        if len(rows) == num_rows and finite.all():
            return cls(statuses, np.ones(num_rows, np.uint8), tokens.astype(np.int32, copy=False))
        statuses[rows[~finite]] = plan_pb2.ROW_STATUS_NOT_FINITE
        token_counts = np.zeros(num_rows, np.uint8)
        token_counts[rows[finite]] = 1
        return cls(statuses, token_counts, tokens[finite].astype(np.int32, copy=False))

    @classmethod
    def verified(
        cls,
        rows: NDArray[np.intp],
        draws: NDArray[np.int32],
        counts: NDArray[np.uint8],
        statuses: NDArray[np.uint8],
        drafted: NDArray[np.int32],
    ) -> StepOutput:
        """Returns the output of a batch with drafts, of which ascending `rows` [L] sampled.

        `draws` [L, 1 + k]: each row keeps its first `counts` [L]. `statuses` [L]: the rows'. `drafted` [R]: the drafts
        that each row of the batch verified.
        """
        by_row = np.zeros((2, len(drafted)), np.uint8)
        by_row[:, rows] = statuses, counts
        kept = np.arange(draws.shape[1]) < counts[:, None]
        return cls(by_row[0], by_row[1], draws[kept].astype(np.int32, copy=False), drafted=drafted.astype(np.uint8))

    def add(self, masked: StepOutput) -> None:
        """Adds the output of rows that waited for masks."""
        rows = np.concatenate([np.repeat(np.arange(len(o.statuses)), o.token_counts) for o in (self, masked)])
        self.tokens = np.concatenate([self.tokens, masked.tokens])[np.argsort(rows, kind="stable")]
        self.statuses |= masked.statuses  # each output has 0 for the other's rows
        self.token_counts |= masked.token_counts
        self.logprobs += masked.logprobs
        self.sample_ns += masked.sample_ns

    def fail(self, rows: NDArray[np.bool_]) -> None:
        """Marks the rows set in `rows` [R] ROW_STATUS_FAILED and removes their tokens and log-probabilities."""
        self.tokens = self.tokens[~np.repeat(rows, self.token_counts)]
        self.token_counts[rows] = 0
        if len(self.drafted):
            self.drafted[rows] = 0
        self.statuses[rows] = plan_pb2.ROW_STATUS_FAILED
        self.logprobs = [entry for entry in self.logprobs if not rows[entry.row]]
        self.prompt_logprobs = [entry for entry in self.prompt_logprobs if not rows[entry.row]]


class PendingStep(Protocol):
    """A launched batch, or its launched masked rows."""

    @property
    def masked_rows(self) -> MaskedRows | None:
        """The rows that wait for masks."""

    def done(self) -> bool:
        """Returns whether `wait` would return at once; cheap."""

    def wait(self) -> StepOutput:
        """Blocks until the batch is done and returns its output; called once."""


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A `PendingStep` that is already done."""

    output: StepOutput

    @property
    def masked_rows(self) -> MaskedRows | None:
        return self.output.masked_rows

    def done(self) -> bool:
        return True

    def wait(self) -> StepOutput:
        return self.output


@dataclass(frozen=True, slots=True)
class MaskedDraw:
    """`MaskedRows` of a backend that computes while the caller waits."""

    draw: Callable[[NDArray[np.uint32], NDArray[np.bool_]], StepOutput]
    """Samples the rows; arguments as those of `MaskedRows.sample`."""

    def sample(self, masks: NDArray[np.uint32], gone: NDArray[np.bool_]) -> PendingStep:
        began = time.perf_counter_ns()
        output = self.draw(masks, gone)
        output.sample_ns = time.perf_counter_ns() - began
        return DoneStep(output)


def allowed_ids(masks: NDArray[np.uint32], vocab_size: int) -> NDArray[np.bool_]:
    """Unpacks `masks` [W, ceil(vocab_size / 32)] to bool [W, vocab_size]."""
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return bits[:, :vocab_size].view(np.bool_)


def cache_places(
    tables: NDArray[np.int32], rows: NDArray[np.integer] | int, positions: NDArray[np.integer], block_size: int
) -> NDArray[np.int64]:
    """Returns where the KV of `positions` [T] lies in the cache, int64 [T]: block * block_size + offset.

    `tables` [R, W]: block tables; `rows` [T]: the one of each position, or one for all.
    """
    indexes, offsets = np.divmod(positions, block_size)
    return tables[rows, indexes].astype(np.int64) * block_size + offsets


def run_positions(starts: NDArray[Integer], counts: NDArray[np.integer]) -> NDArray[Integer]:
    """Returns the positions `starts[i]`, `starts[i] + 1`, ... of each run of `counts` [R], one run after the other:
    [counts.sum()], of the type of `starts` [R]."""
    firsts = np.cumsum(counts, dtype=starts.dtype) - counts
    offsets = (starts - firsts).astype(starts.dtype, copy=False)
    return np.arange(int(counts.sum()), dtype=starts.dtype) + np.repeat(offsets, counts)
