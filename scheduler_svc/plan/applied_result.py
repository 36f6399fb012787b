"""Applies a result: tokens, counters and ends of all rows of one plan at once.

A row is *live* while its sequence has the slot under the same epoch. Other rows are stale: a preempted sequence still
gets its token (the stream must not lose it) but no counter changes; rows of an ended sequence are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from roster_protos import plan_pb2
from scheduler_svc.model.sequence import End, FinishReason, Phase, Sequence
from scheduler_svc.plan.in_flight import InFlight
from scheduler_svc.plan.plan_draft import Column
from scheduler_svc.plan.slot_table import SlotTable

OK = plan_pb2.ROW_STATUS_UNSPECIFIED
_MESSAGES: dict[int, str] = {
    plan_pb2.ROW_STATUS_NOT_FINITE: "the model's logits were not finite",
    plan_pb2.ROW_STATUS_FAILED: "the runner could not compute this sequence",
}


_NO_TIMES = np.zeros(0)
_NO_TIMES.setflags(write=False)


@dataclass(slots=True)
class AppliedResult:
    """Effects of a result. Token i belongs to row `rows[i]` of the plan: live rows first, then late ones.

    If the plan drafted, a row may have several tokens, which follow one another.
    """

    flight: InFlight
    rows: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    sequence_ids: npt.NDArray[np.uint64]
    ends: list[tuple[Sequence, End]] = field(default_factory=list)
    dropped_rows: int = 0
    logprobs: list[tuple[int, plan_pb2.RowLogprobs]] = field(default_factory=list)
    """(index of the token, log-probabilities)."""
    prompt_logprobs: list[tuple[Sequence, plan_pb2.RowLogprobs]] = field(default_factory=list)
    now_s: float = 0.0
    """When the result arrived."""
    previous_at: npt.NDArray[np.float64] = field(default_factory=lambda: _NO_TIMES)
    """When the sequence's previous token arrived, for the tokens of live rows; NaN for a first token. Of several tokens
    of a row, all but the first came with the one before."""
    step_s: float = 0.0
    """Seconds of the runner's time that the step took."""
    runner_s: float = 0.0
    """Seconds of the forward pass and the sampling, as the runner measured them; 0 if it did not."""
    idle_s: float = 0.0
    """Seconds for which the runner had no plan before this one was sent."""
    drafted: Column | None = None
    """Drafted tokens that each row of the plan verified, int32; None if all rows had a known start."""
    accepted: Column | None = None
    """Those of them that the runner accepted, stale rows' included; some may lie behind an end."""
    num_forced: int = 0
    """Forced tokens among `tokens`."""

    @property
    def gaps_s(self) -> npt.NDArray[np.float64]:
        """Seconds since the sequence's previous token, for the tokens of live rows; NaN for a first token."""
        return self.now_s - self.previous_at

    def keep_logprobs(self) -> None:
        """Stores log-probabilities in live sequences for Attach, and keeps only the new ones of prompts."""
        if self.logprobs:
            sequences = self.sequences
            for index, logprobs in self.logprobs:
                sequences[index].logprobs.append(logprobs)
        rows, self.prompt_logprobs = self.prompt_logprobs, []
        for sequence, row in rows:
            known = sequence.request.prompt_logprobs
            if known is not None and sequence.phase is not Phase.FINISHED and (new := known.add(row)) is not None:
                self.prompt_logprobs.append((sequence, new))

    @property
    def num_accepted(self) -> int:
        """Sum of `accepted`."""
        return 0 if self.accepted is None else int(np.add.reduce(self.accepted))

    @property
    def sequences(self) -> list[Sequence]:
        """Sequence of each token. Computed on demand: most steps need no sequence object."""
        return self.flight.sequences[self.rows].tolist()


class MalformedResult(ValueError):
    """The columns of a result do not fit its plan."""


def apply_rows(table: SlotTable, flight: InFlight, result: plan_pb2.Result, now_s: float) -> AppliedResult:
    """Applies `result`, received at `now_s`, to the counters of the rows of `flight`.

    Raises MalformedResult, changing nothing.
    """
    batch_rows, num_rows = flight.batch_rows, len(flight.flags)
    undisturbed = result.token_counts == flight.flags and result.statuses == bytes(num_rows)
    undisturbed = undisturbed and len(result.tokens) == 4 * flight.samples
    got, failed = (flight.sample, {}) if undisturbed else _columns(flight, result)
    if any(logprobs.row >= num_rows for logprobs in result.prompt_logprobs):
        raise MalformedResult(f"result of plan {flight.number}: log-probabilities for a row that is not in the plan")
    tokens = np.frombuffer(result.tokens, "<i4")
    if undisturbed and flight.samples == num_rows and batch_rows.is_seated(table):
        applied = _apply_steady(table, flight, tokens, now_s)
    else:
        live = table.epoch[batch_rows.slots] == batch_rows.epochs
        applied = _apply_mixed(table, flight, failed, got, live, tokens, now_s)
    if result.logprobs:
        index_of_row = {row: index for index, row in enumerate(applied.rows.tolist())}
        applied.logprobs = [(index_of_row[p.row], p) for p in result.logprobs if p.row in index_of_row]
    for logprobs in result.prompt_logprobs:
        applied.prompt_logprobs.append((flight.sequences[logprobs.row], logprobs))
    return applied


def _columns(flight: InFlight, result: plan_pb2.Result) -> tuple[npt.NDArray[np.bool_], dict[int, int]]:
    """Returns (whether each row has a token, row -> status of failed rows).

    Raises MalformedResult if the columns do not fit the plan.
    """
    statuses, token_counts = np.frombuffer(result.statuses, np.uint8), np.frombuffer(result.token_counts, np.uint8)
    num_rows = len(flight.sequences)
    if {len(statuses), len(token_counts)} != {num_rows} or int(token_counts.sum()) * 4 != len(result.tokens):
        raise MalformedResult(f"result of plan {flight.number}: the columns do not fit {num_rows} rows")
    got = token_counts == 1
    if not np.array_equal(got, flight.sample & (statuses == OK)):
        raise MalformedResult(f"result of plan {flight.number}: tokens and sampling rows do not match")
    return got, {row: int(statuses[row]) for row in (statuses != OK).nonzero()[0].tolist()}


def _apply_steady(table: SlotTable, flight: InFlight, tokens: npt.NDArray[np.int32], now_s: float) -> AppliedResult:
    """Applies a result in which every row is live and sampled."""
    batch_rows = flight.batch_rows
    table.computed[batch_rows.slots] = flight.ends
    applied = AppliedResult(flight, batch_rows.rows, tokens, batch_rows.sequence_ids)
    _append(table, batch_rows.slots, flight.known, applied, now_s)
    return applied


def _append(
    table: SlotTable, slots: npt.NDArray[np.int64], lengths: Column, applied: AppliedResult, now_s: float
) -> None:
    """Appends the tokens of live rows, which bring their sequences to `lengths`, and collects the ends."""
    tokens = applied.tokens
    applied.now_s, applied.previous_at = now_s, table.last_token_at[slots]
    table.last_token_at[slots] = now_s
    table.append(slots, tokens, lengths)
    if applied.flight.fills or table.stops:
        _collect_ends(table, slots, lengths, applied)


def _collect_ends(table: SlotTable, slots: npt.NDArray[np.int64], lengths: Column, applied: AppliedResult) -> None:
    """Collects the sequences that end with their new token."""
    flight, tokens = applied.flight, applied.tokens
    ended = table.stops.places(tokens) if table.stops else []
    if flight.fills:
        filled = (lengths >= table.limit[slots]).nonzero()[0].tolist()
        ended = sorted({*ended, *filled}) if ended else filled
    for index in ended:
        sequence = flight.batch_rows.sequences[applied.rows[index]]
        end = end_of(sequence, int(tokens[index]), int(lengths[index]))
        if end is not None:
            applied.ends.append((sequence, end))


def end_of(sequence: Sequence, token: int, num_tokens: int | None = None) -> End | None:
    """Returns the end if the sequence ends with this token, by default its last; `num_tokens` includes the token."""
    if token in sequence.request.stop_ids:
        return End(FinishReason.STOP, stop_token_id=token)
    if (len(sequence.tokens) if num_tokens is None else num_tokens) >= sequence.limit:
        return End(FinishReason.LENGTH)
    return None


def _apply_mixed(
    table: SlotTable,
    flight: InFlight,
    failed: dict[int, int],
    got: npt.NDArray[np.bool_],
    live: npt.NDArray[np.bool_],
    tokens: npt.NDArray[np.int32],
    now_s: float,
) -> AppliedResult:
    """Applies any mix of chunks, samples, stale and failed rows; `failed`: row -> status."""
    living = live.nonzero()[0]
    table.computed[flight.slots[living]] = flight.ends[living]
    index_of_token = flight.batch_rows.rows if len(tokens) == len(got) else np.cumsum(got) - 1
    rows = (live & got).nonzero()[0]
    applied = AppliedResult(flight, rows, tokens[index_of_token[rows]], flight.batch_rows.sequence_ids[rows])
    _append(table, flight.slots[rows], flight.known[rows], applied, now_s)
    late: list[int] = []
    stale = (~live).nonzero()[0].tolist() if len(living) < len(live) else []
    for row, sequence in waiting_rows(applied, sorted({*stale, *failed}), live, failed):
        if got[row]:
            append_late(sequence, [int(tokens[index_of_token[row]])], applied)
            late.append(row)
    if late:
        applied.rows = np.concatenate((rows, late))
        applied.tokens = np.concatenate((applied.tokens, tokens[index_of_token[late]]))
        applied.sequence_ids = np.concatenate((applied.sequence_ids, flight.batch_rows.sequence_ids[late]))
    return applied


def waiting_rows(
    applied: AppliedResult, rows: list[int], live: npt.NDArray[np.bool_], failed: Mapping[int, int]
) -> Iterator[tuple[int, Sequence]]:
    """Yields those of the stale or failed `rows` whose sequences wait and get the row's tokens, with the sequence.

    The rows of ended sequences are dropped, and the sequences of failed rows end; `failed`: row -> status.
    """
    for row in rows:
        sequence: Sequence = applied.flight.sequences[row]
        if sequence.phase is Phase.FINISHED:
            applied.dropped_rows += 1
            continue
        sequence.stale -= not live[row]
        if row not in failed:
            yield row, sequence
            continue
        status = failed[row]
        message = _MESSAGES.get(status, f"the runner answered with status {status}")
        applied.ends.append((sequence, End(FinishReason.ERROR, message=message)))


def append_late(sequence: Sequence, tokens: list[int], applied: AppliedResult) -> int:
    """Appends the tokens of a row planned before the preemption to a waiting sequence, up to its end; returns their
    number."""
    for count, token in enumerate(tokens, 1):
        sequence.log.append(token)
        end = end_of(sequence, token)
        if end is not None:
            applied.ends.append((sequence, end))
            return count
    return len(tokens)
