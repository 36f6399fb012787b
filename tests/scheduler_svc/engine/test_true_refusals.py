"""Early refusals against the truth: the times of the same requests when they are admitted after all.

The bars: of all requests that meet their deadline (when admitted), at most 1% are refused. Of all that miss it, at
least 80% are. The RetryInfo of at least 95% is within a factor of 2 or half a second of the first time at which the
same request would have been accepted. Half of the refused clients retry at the promised time: requests accepted only
for that promise count as accepted, and most of them meet their deadlines. ROSTER_TEST_FULL=1 runs all of it.
"""

from __future__ import annotations

from typing import Any

import pytest

from roster_protos import engine_pb2
from runner_svc.backends.hash_backend import HashBackend
from tests.support.in_process import Stack
from tests.support.refusal_mixes import FORESEEABLE, MIXES
from tests.support.refusal_trials import trials
from tests.support.refusal_verdicts import is_true
from tests.support.thoroughness import FULL

CI_WORLDS, CI_SEEDS, CI_SECONDS = ["all"], range(3, 4), 60
"""Each world is the same in every run: one that meets all three bars shows what makes refusals worse."""


@pytest.mark.timeout(3600)
def test_refusals_are_true() -> None:
    report = trials(FORESEEABLE, range(4), 90) if FULL else trials(CI_WORLDS, CI_SEEDS, CI_SECONDS)
    print(report)
    assert report.wrongly <= 0.01 * report.met, report
    assert report.rightly >= 0.8 * report.missed > 0, report
    assert report.kept_met >= 0.8 * report.kept > 0, report
    assert report.true_times >= 0.95 * len(report.timed) > 0, report


def test_mixes_hold_every_kind_of_end() -> None:
    assert {end for mix in MIXES.values() for end in mix.ends} == {
        "length", "eos", "stop", "cancel", "disconnect", "error"
    }  # fmt: skip
    assert any(mix.takeover_s for mix in MIXES.values()) and any(mix.blocks < 100 for mix in MIXES.values())


def test_what_a_true_time_is() -> None:
    assert is_true(0.5, 0.0) and is_true(10, 5) and is_true(10, 20) and is_true(1.0, 0.6)
    assert not is_true(0.6, 0.0) and not is_true(10, 4.9) and not is_true(10, 20.1)


def test_a_report_tells_right_from_wrong() -> None:
    """The check can fail: a judge that refuses everything is wrong half of the time."""
    report = trials(["stop"], seeds=range(1), seconds=5, refuse_all=True)
    assert report.wrongly > 0.5 * report.met > 0, report


def stack_with_runner(**settings: Any) -> tuple[Stack, int]:
    stack = Stack(**settings)
    backend = HashBackend(
        num_slots=2, block_size=4, num_blocks=256, max_step_tokens=64, context_length=256, eos_probability=0
    )
    session = stack.add_runner(backend)
    stack.step()
    return stack, session


@pytest.mark.parametrize("end", ["cut", "cancel", "disconnect", "deadline"])
def test_ends_that_no_result_brings_count(end: str) -> None:
    """Sequences with a limit of 200 tokens end after a few, though no result says so: the next ones wait briefly."""
    stack, session = stack_with_runner()
    refused = 0
    for _ in range(40):
        timeout_ms = 500 if end == "deadline" else 5_000
        asked = [stack.submit([1, 2], 200, timeout_ms=timeout_ms) for _ in range(4)]
        patient = stack.submit([1, 2], 200, timeout_ms=5_000)
        stack.advance(session, turns=2, turn_s=0.1)
        for request in [*asked, patient]:
            if request.refused is not None:
                refused += request is patient or end != "deadline"
            elif end == "cut" and request.first_sequence_id is not None and request.streams[0].tokens:
                cut = engine_pb2.Cut(sequence_id=request.first_sequence_id, num_tokens=1, stop_string="x")
                stack.front.put(cut=cut)
            elif end != "deadline" or request is patient:
                if end == "disconnect":
                    stack.front.put(disconnect=engine_pb2.Disconnect(handle=request.handle))
                else:
                    stack.front.put(cancel=engine_pb2.Cancel(handle=request.handle))
        stack.advance(session, turns=5 if end == "deadline" else 1, turn_s=0.1)
    assert refused == 0
    assert stack.engine.requests.rate.ended_early > 5 and stack.engine.requests.rate.gave_up > 5


def test_what_a_limit_holds_back_is_passed() -> None:
    """A tenant that waits for its own limit delays no other tenant, and waits itself for as long as that takes."""
    stack, session = stack_with_runner(tenant_limits={"capped": {"running": 1}})
    for _ in range(60):
        stack.submit([1, 2], 40, tenant="capped")
    stack.advance(session, turns=60, turn_s=0.1)
    other = stack.submit([1, 2], 40, tenant="other", timeout_ms=5_000)
    own = stack.submit([1, 2], 40, tenant="capped", timeout_ms=5_000)
    stack.step()
    assert other.refused is None and own.refused is not None


def test_a_free_slot_means_no_wait() -> None:
    """Whatever its duration: a client decides which output before its deadline is enough."""
    stack, session = stack_with_runner()
    for _ in range(30):
        stack.submit([1, 2], 100)
    stack.advance(session, turns=800, turn_s=0.1)
    assert stack.engine.requests.idle and stack.engine.requests.rate.known
    pair = [stack.submit([1, 2], 100, timeout_ms=1_000) for _ in range(2)]
    third = stack.submit([1, 2], 100, timeout_ms=1_000)
    stack.step()
    assert [request.refused is None for request in [*pair, third]] == [True, True, False]
    assert third.refused is not None and is_true(third.refused.retry_after_ms / 1000, 5.0)  # until a slot is free


def test_a_full_queue_says_when_there_is_room() -> None:
    stack, session = stack_with_runner(max_waiting_requests=4)
    for _ in range(15):
        for _ in range(2):
            stack.submit([1, 2], 100)
        stack.advance(session, turns=55, turn_s=0.1)
    assert stack.engine.requests.idle
    for _ in range(6):
        stack.submit([1, 2], 100)
        stack.advance(session, turn_s=0.1)
    late = stack.submit([1, 2], 100)
    stack.step()
    assert late.refused is not None and "the queue is full" in late.refused.message
    begin_at, waiting = stack.now_s, len(stack.engine.requests.queue)
    while len(stack.engine.requests.queue) == waiting:
        stack.advance(session, turn_s=0.1)
    assert is_true(late.refused.retry_after_ms / 1000, stack.now_s - begin_at)
