"""Lanes: spans by slot, and the share of used slots."""

from __future__ import annotations

from roster_client.timeline.lanes import Occupancy, lanes_of, num_columns, occupancy, request_order
from roster_client.timeline.recording import Recording, RowKind
from tests.support.recordings import drawn

RUN = drawn("fcfs", "A..", "aB.", "ab.", ".bA", ".b.")


def spans(recording: Recording) -> list[list[tuple[str, RowKind, int, int, int]]]:
    return [[(s.request, s.kind, s.first, s.last, s.tokens) for s in lane.spans] for lane in lanes_of(recording)]


def test_spans_end_where_the_sequence_or_its_kind_changes() -> None:
    prefill, decode = RowKind.PREFILL, RowKind.DECODE
    assert spans(RUN) == [
        [("a", prefill, 0, 0, 10), ("a", decode, 1, 2, 2)],
        [("b", prefill, 1, 1, 10), ("b", decode, 2, 4, 3)],
        [("a", prefill, 3, 3, 10)],
    ]
    span = lanes_of(RUN)[1].spans[1]
    assert (span.begin_s, span.end_s) == (3.0, 4.5)


def test_a_pause_of_a_sequence_splits_its_span() -> None:
    assert [(s.first, s.last) for s in lanes_of(drawn("x", "a", ".", "a"))[0].spans] == [(0, 0), (2, 2)]


def test_each_runner_has_columns_and_lanes_of_its_own() -> None:
    one, two = drawn("x", "ab", "ab", runner="1"), drawn("x", "c", "c", "c", runner="2")
    both = Recording("both", {}, [step for pair in zip(one.steps, two.steps, strict=False) for step in pair])
    both.steps.append(two.steps[2])
    assert [(lane.runner, lane.slot) for lane in lanes_of(both)] == [("1", 0), ("1", 1), ("2", 0)]
    assert [lane.spans[0].last for lane in lanes_of(both)] == [1, 1, 2]
    assert num_columns(both) == 3


def test_cells_are_counted() -> None:
    assert occupancy(RUN.steps) == Occupancy(15, 7, 0)
    waited = occupancy(drawn("static", "A.", "a.", "a.", waiting=2).steps)
    assert waited == Occupancy(6, 3, 3)
    assert waited.empty_share == waited.wasted_share == 0.5
    assert occupancy([]).empty_share == 0


def test_named_requests_come_first() -> None:
    named = drawn("x", "cab", b="B", a="A")
    assert request_order([named]) == ["b", "a", "c"]
    assert request_order([drawn("y", "c.", "ca"), named]) == ["b", "a", "c"]
