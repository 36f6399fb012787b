"""Policies whose `drafts` answers with nonsense: no row drafts more than it may, and no stream notices."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.policy import Load, Policy, PolicyGuard, PolicyParameters
from tests.support.by_hand import ByHand
from tests.support.thoroughness import choice


class Answers(Policy):
    """Answers with what the test says."""

    answer: Any = None

    def drafts(self, load: Load, rows: Any) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer(len(rows.most)) if callable(self.answer) else self.answer


HARMLESS = [lambda rows: [3] * rows, lambda rows: [1000] * rows, lambda rows: [2**40] * rows, lambda rows: [0] * rows]
NONSENSE = [
    lambda rows: [3] * (rows + 1),
    lambda rows: [-1] * rows,
    lambda rows: [2.5] * rows,
    ValueError("no"),
    lambda rows: [float("nan")] * rows,
    lambda rows: [None] * rows,
    lambda rows: [[1]] * rows,
    lambda rows: [2**70] * rows,
    lambda rows: {0: 1},
    None,
    3,
    "77",
    [],
    SystemExit(3),
]


@pytest.mark.parametrize(
    ("answer", "fails"),
    [(answer, False) for answer in HARMLESS] + [(answer, True) for answer in choice(NONSENSE, in_ci=NONSENSE[:4])],
)
def test_a_policy_that_answers_nonsense_costs_no_more_than_the_drafts(answer: Any, fails: bool) -> None:
    policy = Answers(PolicyParameters())
    guard = PolicyGuard(policy)
    hand = ByHand(guard=guard)
    hand.stack.drafts = None
    policy.answer = lambda rows: [0] * rows
    request = hand.decoding([1] * 5, 20)
    policy.answer = answer
    for _ in range(4):
        sent = hand.take()
        assert 0 <= sent.row.drafts <= 7 and sent.row.count == 1 + sent.row.drafts
        hand.answer(sent, {0: [3]})
    assert bool(guard.failures) == fails and not (fails and sent.row.drafts)
    hand.finish()
    assert len(hand.tokens(request)) == 20
