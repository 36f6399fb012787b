"""Arrival times of turns: each begins its pause after the last request that it follows has ended."""

from __future__ import annotations

import math

from scheduler_svc.simulator.conversations.turn import Turn
from scheduler_svc.simulator.conversations.turn_times import TurnTimes


def turn(*after: int, pause_s: float = 0.0) -> Turn:
    return Turn("c", ((1, 4),), after=after, pause_s=pause_s)


def test_requests_without_turns_come_in_their_order() -> None:
    times = TurnTimes([0.5, 0.5, 2.0], [None, None, None])
    assert [(times.next_s, times.pop()) for _ in range(3)] == [(0.5, 0), (0.5, 1), (2.0, 2)]
    assert times.next_s == math.inf


def test_a_turn_waits_for_the_end_of_the_one_before() -> None:
    times = TurnTimes([1.0, 1.0], [turn(), turn(0, pause_s=3.0)])
    assert times.pop() == 0
    assert times.next_s == math.inf and math.isnan(times.arrival_s[1])
    times.ended(0, 7.5)
    assert times.next_s == times.arrival_s[1] == 10.5


def test_a_turn_waits_for_the_last_of_its_sub_agents() -> None:
    times = TurnTimes([0.0] * 4, [turn(), turn(0), turn(0), turn(1, 2, 2, pause_s=1.0)])
    times.pop()
    times.ended(0, 2.0)
    assert [times.pop(), times.pop()] == [1, 2]
    times.ended(2, 5.0)
    assert times.next_s == math.inf
    times.ended(1, 9.0)
    assert (times.next_s, times.pop()) == (10.0, 3)
    times.ended(3, 11.0)
    times.ended(3, 12.0)
    assert times.next_s == math.inf
