"""A step takes forced tokens only where they pay for all of its rows."""

from __future__ import annotations

import pytest

from scheduler_svc.constrained.process.compiler import grammar_text
from scheduler_svc.step_times.step_time_model import StepTimeModel
from tests.support.by_hand import ByHand
from tests.support.plans import AWAIT


@pytest.mark.parametrize(("mixed_s", "taken"), [(1.0, True), (1.9, True), (2.1, False)])
def test_runs_are_taken_where_they_make_more_tokens_a_second(
    mixed_s: float, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows, one of which has two forced tokens left: twice as many tokens as without them."""

    def seconds(times: StepTimeModel, prefill_tokens: float, decode_rows: int, context: int, start: int = 0) -> float:
        return mixed_s if prefill_tokens else 1.0

    monkeypatch.setattr(StepTimeModel, "known", True)
    monkeypatch.setattr(StepTimeModel, "seconds", seconds)
    hand = ByHand(7, depth=1)
    hand.decoding([1] * 5, 60, no_speculation=True)
    tied = hand.submit([3] * 5, 20, grammar=grammar_text("regex", "[ab]ccc[ab]"))
    appended = []
    for _ in range(20):
        sent = hand.take()
        appended += list(sent.plan.extent_forced)
        draws = {
            row.slot: [b"accca"[len(hand.tokens(tied)) + row.count - 1]] for row in sent.rows if row.flags == AWAIT
        }
        hand.answer(sent, draws)
        if len(hand.tokens(tied)) == 5:
            break
    assert bytes(hand.tokens(tied)) == b"accca" and sum(appended) == 2 * taken
