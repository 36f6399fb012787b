"""The model behind early refusals, on the test's clock."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scheduler_svc.requests.service_rate import LOAD_COUNTED, LONGEST_STEP_S, ServiceRate, Work

SLOTS = 8


def work(*tokens: int, prompt: int = 0) -> Work:
    return Work(np.full(len(tokens), prompt), np.array(tokens, np.int64))


TWENTY = work(20)


def steady(rate: ServiceRate, start_s: float, seconds: float, *, early: bool, step_s: float = 0.1) -> float:
    """Every slot decodes, and every tenth token ends a sequence, whose slot the next takes; returns the time then."""
    for step in range(round(seconds / step_s)):
        for _ in range(SLOTS if step % 10 == 9 else 0):
            rate.ended(in_slot=True, early=early)
            rate.seated(0)
        rate.stepped(start_s + (step + 1) * step_s, step_s, SLOTS, SLOTS, waiting=5)
    return start_s + seconds


def test_nothing_is_known_before_the_first_token() -> None:
    rate = ServiceRate()
    assert not rate.known
    rate.stepped(1.0, 0.1, 0, 3, 0)
    assert not rate.known
    rate.stepped(1.1, 0.1, 1, 3, 0)
    assert rate.known


def test_accepted_drafts_make_a_slot_faster() -> None:
    rate = ServiceRate()
    for step in range(9):
        rate.gained(6)
        rate.stepped(1.0 + step / 100, 0.1, 4, 4, 0)
    assert rate.token_s == pytest.approx(0.04)


@pytest.mark.parametrize("early", [False, True])
def test_a_slot_is_held_until_the_limit_or_as_long_as_others_held_it(early: bool) -> None:
    rate = ServiceRate()
    steady(rate, 100, 60, early=early)
    assert rate.token_s == pytest.approx(0.1)
    few, many = rate.hold_s(work(2, 1000))
    assert few == pytest.approx(0.2, rel=0.1)
    if early:
        assert many == pytest.approx(1.0, rel=0.1)  # ten tokens, whatever the limit
    else:
        assert many > 50


def test_what_was_known_for_long_needs_little_that_is_seen() -> None:
    """After the first few tokens answers are assumed to be short: no request is refused for lack of evidence."""
    rate = ServiceRate()
    rate.stepped(0.1, 0.1, 4, 4, 20)
    assert rate.hold_s(work(1000))[0] < 0.5


def test_prompts_take_their_part() -> None:
    rate = ServiceRate()
    for step in range(1, 400):
        rate.seated(50)
        rate.stepped(step / 10, 0.1, 4, 6, 0)  # two of six slots compute 50 prompt tokens
    assert rate.prompt_s == pytest.approx(0.2 / 50, rel=0.1)
    assert rate.hold_s(work(0, prompt=500))[0] == pytest.approx(2.0, rel=0.1)


def test_a_free_slot_means_no_wait_and_no_slot_means_no_end() -> None:
    rate = ServiceRate()
    steady(rate, 0, 60, early=True)
    running = work(*[100] * 6)
    assert rate.wait_s(running, 2, work(10), 0) == rate.wait_s(running, 2, work(10), 1) == 0
    assert rate.wait_s(running, 2, work(10, 10), 2) > 0
    assert rate.wait_s(work(), 0, work(), 0) == math.inf


def test_slots_that_end_together_serve_in_turns() -> None:
    rate = ServiceRate()
    steady(rate, 0, 600, early=False)  # all of them reach their limits
    running = work(*[5] * SLOTS)
    first_s = rate.wait_s(running, 0, TWENTY, 0)
    assert first_s == pytest.approx(0.5, rel=0.01) == rate.wait_s(running, 0, TWENTY, SLOTS - 1)
    assert rate.wait_s(running, 0, TWENTY, SLOTS) == pytest.approx(0.5 + 2.0 / SLOTS, rel=0.05)
    assert rate.wait_s(running, 0, TWENTY, 10 * SLOTS) == pytest.approx(0.5 + 20.0, rel=0.1)


def test_sequences_that_take_free_slots_now_hold_them_as_long_as_they_do() -> None:
    rate = ServiceRate()
    steady(rate, 0, 600, early=False)
    same = work(*[20] * SLOTS)
    assert rate.wait_s(work(), SLOTS, same, SLOTS) == pytest.approx(2.0, rel=0.02)  # they all end together


def test_a_long_row_does_not_hold_up_the_others() -> None:
    rate = ServiceRate()
    steady(rate, 0, 600, early=False)
    assert rate.wait_s(work(2, 2000, 2000), 0, work(10), 0) == pytest.approx(0.2, rel=0.01)
    assert rate.wait_s(work(2, 2000, 2000), 0, work(10), 5) == pytest.approx(5.2, rel=0.01)


def test_those_that_give_up_make_the_wait_shorter() -> None:
    """As far as they have yet to give up: those that have waited longer than any that gave up will stay."""
    patient, impatient, hasty = ServiceRate(), ServiceRate(), ServiceRate()
    for rate in (patient, impatient, hasty):
        steady(rate, 0, 30, early=True)
    for _ in range(15):  # a tenth of the waiting sequences, each second
        impatient.ended(in_slot=False, early=True, age_s=20.0)
        hasty.ended(in_slot=False, early=True, age_s=1.0)
    running = work(*[100] * SLOTS)
    wait_s = patient.wait_s(running, 0, work(10), 200)
    assert impatient.wait_s(running, 0, work(10), 200) < 0.6 * wait_s
    assert hasty.wait_s(running, 0, work(10), 200) == pytest.approx(0.9 * wait_s, rel=0.05)


def test_ends_of_every_kind_count_though_no_result_brings_them() -> None:
    """A stop string, a cancel or a deadline ends a sequence between two results."""
    rate = ServiceRate()
    for step in range(600):
        rate.stepped(step / 10, 0.1, SLOTS, SLOTS, waiting=0)
        if step % 10 == 5:
            for _ in range(SLOTS):
                rate.ended(in_slot=True, early=True)
    assert rate.hold_s(work(10_000))[0] == pytest.approx(1.0, rel=0.1)


def test_idle_times_and_outages_do_not_count() -> None:
    rate = ServiceRate()
    now_s = steady(rate, 0, 60, early=True)
    before_at = float(rate.hold_s(work(1000))[0])
    now_s = steady(rate, now_s + 3600, 0.1, early=True)  # an hour without requests
    assert rate.hold_s(work(1000))[0] == pytest.approx(before_at, rel=0.05)
    rate.stepped(now_s + 3600, 3600, SLOTS, SLOTS, waiting=5)  # a step that took an hour
    assert rate.token_s < LONGEST_STEP_S


def test_the_pace_is_that_of_the_last_seconds() -> None:
    rate = ServiceRate()
    now_s = steady(rate, 0, 60, early=True)
    steady(rate, now_s, 20, early=True, step_s=0.2)
    assert rate.token_s == pytest.approx(0.2, rel=0.05)


def test_a_burst_is_no_load_and_a_stream_is_one() -> None:
    burst, stream = ServiceRate(), ServiceRate()
    for rate in (burst, stream):
        steady(rate, 0, 60, early=True)
    for second in range(60):
        if second == 50:
            burst.accepted(work(*[1000] * 400), SLOTS)
        stream.accepted(work(*[1000] * 4), SLOTS)  # four seconds of eight slots
        for rate in (burst, stream):
            steady(rate, 60 + second, 1, early=True)
    assert stream.load == pytest.approx(0.5, rel=0.1)
    assert stream.until_shorter_s(10) == pytest.approx(10 / (1 - 0.5 * LOAD_COUNTED), rel=0.1)
    assert burst.load < 0.1 and burst.until_shorter_s(10) < 11.5
