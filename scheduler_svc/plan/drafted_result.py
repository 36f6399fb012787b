"""Applies the result of a plan with rows that bring runs of tokens, because of drafts or forced tokens.

A row that drafted brings the drafts that equal the model's draws, and the draw after them. A row with forced tokens
brings these, which the result does not repeat, and the draw after them. A run is cut behind the first token that ends
the sequence, so that nothing behind an end reaches a stream, the log or the cache. The upper bounds in the slot table,
`known` and `planned`, are then lowered by the drafts that were not accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roster_protos import plan_pb2
from scheduler_svc.model.sequence import End, FinishReason, Sequence
from scheduler_svc.plan.applied_result import OK, AppliedResult, MalformedResult, append_late, waiting_rows
from scheduler_svc.plan.in_flight import InFlight
from scheduler_svc.plan.plan_draft import Column, pack
from scheduler_svc.plan.slot_table import IntColumn, SlotTable, run_of

_NO_IDS = np.zeros(0, np.uint64)
_NO_IDS.setflags(write=False)
_ONE = np.array(1, np.int32)


@dataclass(slots=True)
class _Columns:
    """The columns of a result, checked against its plan; one entry per row, except `tokens`."""

    statuses: npt.NDArray[np.uint8]
    counts: Column
    """Tokens that the runner kept, and forced ones."""
    firsts: Column
    """Index of each row's first token."""
    tokens: Column
    most: Column
    """Tokens that the runner was allowed to draft."""
    drafted: Column
    """Those that it drafted and verified."""
    accepted: Column
    """Those that were right; -1 for a row without tokens."""
    forced: Column
    """Number of forced tokens, which come before the others."""
    undisturbed: bool
    """Whether every row has tokens."""


def apply_runs(table: SlotTable, flight: InFlight, result: plan_pb2.Result, now_s: float) -> AppliedResult:
    """Applies `result`, received at `now_s`, to the counters of the rows of `flight`, some of which may have drafts or
    forced tokens.

    Raises MalformedResult, changing nothing.
    """
    columns = _checked(flight, result)
    if flight.forced:
        _insert_forced(flight, columns)
    if columns.undisturbed and flight.batch_rows.is_seated(table):
        kept, applied = _apply_all(table, flight, columns, now_s)
    else:
        kept, applied = _apply_mixed(table, flight, columns, now_s)
    applied.sequence_ids = flight.batch_rows.sequence_ids[applied.rows]
    if flight.forced:
        applied.num_forced = int(np.add.reduce(np.minimum(columns.forced, kept)))
    if flight.drafts is not None:
        applied.drafted, applied.accepted = columns.drafted, columns.accepted
    for logprobs in result.logprobs:
        _split(logprobs, columns, kept, applied)
    applied.prompt_logprobs = [(flight.sequences[logprobs.row], logprobs) for logprobs in result.prompt_logprobs]
    return applied


def _apply_all(table: SlotTable, flight: InFlight, columns: _Columns, now_s: float) -> tuple[Column, AppliedResult]:
    """Applies a result in which every row is live and has tokens, as nearly all do; returns the number of tokens that
    each row keeps, too."""
    kept = columns.counts
    ends: list[tuple[Sequence, End]] = []
    if flight.fills or table.stops:
        kept = kept.copy()
        ends = _cut(table, flight, columns, kept)
    rows = np.repeat(flight.batch_rows.rows, kept)
    cut = len(rows) != len(columns.tokens)
    tokens, firsts = _runs(columns, flight.batch_rows.rows, kept) if cut else (columns.tokens, columns.firsts)
    applied = AppliedResult(flight, rows, tokens, _NO_IDS, ends, now_s=now_s)
    _advance(table, flight, columns, slice(None), kept, firsts, applied)
    return kept, applied


def _apply_mixed(table: SlotTable, flight: InFlight, columns: _Columns, now_s: float) -> tuple[Column, AppliedResult]:
    """Applies any mix of runs, chunks, stale and failed rows; returns the number of tokens that each row keeps, too."""
    live = table.epoch[flight.slots] == flight.epochs
    kept = columns.counts * live
    ends = _cut(table, flight, columns, kept)
    rows = kept.nonzero()[0]
    tokens, firsts = _runs(columns, rows, kept)
    applied = AppliedResult(flight, np.repeat(rows, kept[rows]), tokens, _NO_IDS, ends, now_s=now_s)
    _advance(table, flight, columns, rows, kept, firsts, applied)
    table.computed[flight.slots[live & ~flight.sample]] = flight.ends[live & ~flight.sample]
    _apply_others(columns, live, kept, applied)
    columns.accepted = np.maximum(columns.accepted, 0)
    return kept, applied


def _checked(flight: InFlight, result: plan_pb2.Result) -> _Columns:
    """Returns the columns of the result. Raises MalformedResult if they do not fit the plan."""
    statuses, counted = np.frombuffer(result.statuses, np.uint8), np.frombuffer(result.token_counts, np.uint8)
    num_rows = len(flight.flags)
    most = np.zeros(num_rows, np.int32) if flight.drafts is None else flight.drafts
    verified = np.frombuffer(result.drafted, np.uint8) if flight.num_drafts else np.zeros(num_rows, np.uint8)
    num_tokens = int(np.add.reduce(counted))
    if {len(statuses), len(counted), len(verified)} != {num_rows} or num_tokens * 4 != len(result.tokens):
        raise MalformedResult(f"result of plan {flight.number}: the columns do not fit {num_rows} rows")
    counts, drafted = counted.astype(np.int32), verified.astype(np.int32)
    accepted = counts - _ONE
    undisturbed = flight.samples == num_rows and result.statuses == bytes(num_rows) and 0 not in result.token_counts
    fits = undisturbed or np.logical_and.reduce((counts > 0) == (flight.sample & (statuses == OK)))
    if not fits or b"\1" in ((accepted > drafted) | (drafted > most)).tobytes():
        raise MalformedResult(f"result of plan {flight.number}: tokens, drafts and sampling rows do not match")
    for logprobs in (*result.logprobs, *result.prompt_logprobs) if result.logprobs or result.prompt_logprobs else ():
        if logprobs.row >= num_rows:
            raise MalformedResult(
                f"result of plan {flight.number}: log-probabilities for a row that is not in the plan"
            )
    for logprobs in result.logprobs:
        if len(logprobs.values) != 4 * counts[logprobs.row]:
            raise MalformedResult(
                f"result of plan {flight.number}: log-probabilities for tokens that a row does not have"
            )
    firsts, tokens = np.add.accumulate(counts) - counts, np.frombuffer(result.tokens, "<i4")
    return _Columns(statuses, counts, firsts, tokens, most, drafted, accepted, np.zeros_like(counts), undisturbed)


def _insert_forced(flight: InFlight, columns: _Columns) -> None:
    """Inserts the forced tokens of the rows that have tokens before those of the result."""
    forced = columns.forced = flight.forced_counts * (columns.counts > 0)
    runs = [flight.forced[row - flight.num_decode] for row in forced.nonzero()[0].tolist()]
    tokens = np.array([token for run in runs for token in run], np.int32)
    columns.tokens = np.insert(columns.tokens, np.repeat(columns.firsts, forced), tokens)
    columns.counts = columns.counts + forced
    columns.firsts = np.add.accumulate(columns.counts) - columns.counts


def _cut(table: SlotTable, flight: InFlight, columns: _Columns, kept: Column) -> list[tuple[Sequence, End]]:
    """Cuts `kept`, the number of tokens of each live row, behind the first token that ends the sequence; returns the
    ends."""
    slots, sequences = flight.slots, flight.sequences
    ends: dict[int, End] = {}
    rows = kept.nonzero()[0]
    if flight.fills:
        np.minimum(kept, table.limit[slots] - table.length[slots], out=kept, where=kept > 0)
    if table.stops and (places := table.stops.places(columns.tokens)):
        row_of_token = np.repeat(flight.batch_rows.rows, columns.counts)
        for place in places:
            row, token = int(row_of_token[place]), int(columns.tokens[place])
            count = place - int(columns.firsts[row]) + 1
            if count <= kept[row] and row not in ends and token in sequences[row].request.stop_ids:
                kept[row], ends[row] = count, End(FinishReason.STOP, stop_token_id=token)
    if flight.fills:
        full = rows[(table.length[slots[rows]] + kept[rows] >= table.limit[slots[rows]]).nonzero()[0]]
        for row in full.tolist():
            ends.setdefault(row, End(FinishReason.LENGTH))
    return [(sequences[row], ends[row]) for row in sorted(ends)]


def _runs(columns: _Columns, rows: IntColumn, kept: Column) -> tuple[Column, Column]:
    """Returns the kept tokens of these rows, each row's in order, and the index of each row's first one among them."""
    counts = kept[rows]
    firsts = np.add.accumulate(counts) - counts
    total = int(np.add.reduce(counts))
    if total == len(columns.tokens):
        return columns.tokens, firsts
    return columns.tokens[np.repeat(columns.firsts[rows] - firsts, counts) + np.arange(total)], firsts


def _advance(
    table: SlotTable,
    flight: InFlight,
    columns: _Columns,
    rows: IntColumn | slice,
    kept: Column,
    firsts: Column,
    applied: AppliedResult,
) -> None:
    """Appends the tokens of these live rows and advances their counters; `firsts`: index of each one's first token."""
    slots, counts, drafts, accepted = flight.slots[rows], kept[rows], columns.most[rows], columns.accepted[rows]
    where = run_of(slots)
    applied.previous_at = np.full(len(applied.tokens), applied.now_s)
    applied.previous_at[firsts] = table.last_token_at[where]
    lengths = table.length[where] + counts
    unused = drafts - accepted
    table.known[where] -= unused
    table.planned[where] -= unused
    table.spread[where] -= drafts
    table.computed[where] = lengths - _ONE
    table.drafted[where] += columns.drafted[rows]
    table.accepted[where] += np.minimum(accepted, counts)
    table.last_token_at[where] = applied.now_s
    table.append_runs(slots, applied.tokens, counts, firsts, lengths)


def _apply_others(columns: _Columns, live: npt.NDArray[np.bool_], kept: Column, applied: AppliedResult) -> None:
    """Applies stale and failed rows, and sets `kept` of stale ones whose sequences wait."""
    late = []
    failed = {row: int(columns.statuses[row]) for row in (columns.statuses != OK).nonzero()[0].tolist()}
    stale = (~live).nonzero()[0].tolist()
    for row, sequence in waiting_rows(applied, sorted({*stale, *failed}), live, failed):
        count = int(columns.counts[row])
        if count:
            first = int(columns.firsts[row])
            kept[row] = append_late(sequence, columns.tokens[first : first + count].tolist(), applied)
            sequence.drafted_tokens += int(columns.drafted[row])
            sequence.accepted_tokens += min(int(columns.accepted[row]), int(kept[row]))
            late.append(row)
    if late:
        rows = np.array(late)
        applied.tokens = np.concatenate((applied.tokens, _runs(columns, rows, kept)[0]))
        applied.rows = np.concatenate((applied.rows, np.repeat(rows, kept[rows])))


def _split(logprobs: plan_pb2.RowLogprobs, columns: _Columns, kept: Column, applied: AppliedResult) -> None:
    """Adds the log-probabilities of one row, one message for each of its tokens that were kept."""
    row = logprobs.row
    if not kept[row]:
        return
    first, num_forced = int((applied.rows == row).argmax()), int(columns.forced[row])
    for index in range(min(num_forced, int(kept[row]))):
        token = int(columns.tokens[columns.firsts[row] + index])
        applied.logprobs.append((first + index, certain(row, token, logprobs.top)))
    first += num_forced
    size = len(logprobs.top_ids) // int(columns.counts[row] - num_forced)
    for index in range(int(kept[row]) - num_forced):
        alone = plan_pb2.RowLogprobs(
            row=row,
            values=logprobs.values[4 * index : 4 * index + 4],
            top=logprobs.top,
            top_ids=logprobs.top_ids[size * index : size * (index + 1)],
            top_values=logprobs.top_values[size * index : size * (index + 1)],
        )
        applied.logprobs.append((first + index, alone))


def certain(row: int, token: int, top: int) -> plan_pb2.RowLogprobs:
    """Returns the log-probabilities of a token that is the only possible one, with the `top` likeliest: the token, and
    then the lowest ids, as a sampler orders what is equally likely."""
    others = [other for other in range(top) if other != token][: top - 1]
    ids = [token, *others] if top else []
    values = np.full(len(ids), -np.inf, "<f4")
    values[:1] = 0
    return plan_pb2.RowLogprobs(row=row, values=bytes(4), top=top, top_ids=pack(ids), top_values=values.tobytes())
