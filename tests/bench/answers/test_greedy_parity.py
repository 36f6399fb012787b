"""First differences between two devices' answers, and whether they are near ties."""

from __future__ import annotations

from bench.answers.greedy_parity import Answer, differences

A, B, C = 1, 2, 3


def answer(*places: list[tuple[int, float]]) -> Answer:
    return Answer([place[0][0] for place in places], list(places))


def test_only_the_first_difference_counts() -> None:
    certain = [(A, -0.1), (B, -3.0)]
    reference = answer(certain, [(A, -0.70), (B, -0.72)], certain)
    here = answer(certain, [(B, -0.71), (A, -0.73)], [(C, -0.1), (A, -2.0)])
    (found,) = differences([reference], [here])
    assert (found.question, found.place) == (0, 1)
    assert found.is_near_tie
    assert "1: -0.7000, 2: -0.7200 | here 2: -0.7100" in found.line() and "near tie" in found.line()


def test_no_tie_where_the_reference_was_sure_or_had_another_second() -> None:
    sure, other = [(A, -0.1), (B, -2.0)], [(A, -0.70), (C, -0.72)]
    here = answer([(B, -0.5), (A, -0.9)])
    assert not differences([answer(sure)], [here])[0].is_near_tie
    assert not differences([answer(other)], [here])[0].is_near_tie
    assert differences([answer(sure)], [answer(sure)]) == []
