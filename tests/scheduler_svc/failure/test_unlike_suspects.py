"""Lost or faulty runners of different sizes: requests are isolated where they fit, none hangs or is refused wrongly."""

from __future__ import annotations

import grpc
import pytest

from roster_protos import plan_pb2
from runner_svc.backends.hash_backend import expected_tokens
from runner_svc.execution.runner import Runner
from scheduler_svc.link.runner_events import Loss
from scheduler_svc.model.sequence import FinishReason
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.scheduler.policy_views import request_view
from tests.scheduler_svc.runners.test_unlike_pools import (
    LARGE,
    NO_EOS,
    NO_RUNNER_S,
    SMALL,
    add,
    end_of,
    finish,
    running,
    stack_of,
)
from tests.support.in_process import Submitted
from tests.support.lockstep import advance, advance_until_idle
from tests.support.policies import policy_named
from tests.support.unlike_pools import JudgedStack, pool_backend

# ---------------------------------------------------------------------- quarantined requests


def suspect(stack: JudgedStack, requests: list[Submitted], sizes: list[int]) -> None:
    """Loses a runner twice with the requests in flight, so that they are quarantined, and adds runners of `sizes`."""
    for size in sizes:
        session = next(s for s, scheduler in stack.engine.pool.schedulers.items() if scheduler.table.num_running)
        assert len(running(stack, session)) == len(requests)
        stack.runners.kill(session)
        compute_probe(stack, add(stack, size))
        stack.step()
        stack.step()
    assert all(stack.engine.requests.book.by_handle(r.handle).suspicion.is_held for r in requests)  # type: ignore[union-attr]


def compute_probe(stack: JudgedStack, session: int) -> None:
    """Computes the probe of a runner that joined after a loss, so that it serves; the others do nothing."""
    stack.step()
    assert session not in stack.engine.pool.schedulers
    stack.runners.execute(session)
    stack.runners.deliver(session)
    stack.step()
    assert session in stack.engine.pool.schedulers


def test_a_request_is_isolated_on_a_runner_that_can_hold_it() -> None:
    stack = stack_of(LARGE)
    long = stack.submit([1] * 20, 100)
    advance(stack, 5)
    add(stack, SMALL)
    stack.step()
    suspect(stack, [long], [LARGE, LARGE])
    assert stack.engine.quarantine.active
    finish(stack, long)


def test_a_quarantined_request_that_no_runner_can_hold_blocks_no_isolation() -> None:
    stack = stack_of(LARGE)
    long, short = stack.submit([1] * 20, 100), stack.submit([2], 30)
    advance(stack, 5)
    suspect(stack, [long, short], [LARGE, SMALL])
    advance(stack, 40)
    assert short.streams[0].tokens == short.expected(0, NO_EOS) and short.streams[0].end is not None
    assert long.streams[0].end is None and stack.engine.quarantine.num_waiting == 1
    stack.now_s += NO_RUNNER_S + 1
    finish(stack, short)
    assert end_of(long).reason == FinishReason.UNAVAILABLE and not stack.engine.quarantine.active


def test_a_quarantined_request_that_no_runner_can_hold_is_isolated_when_one_joins() -> None:
    stack = stack_of(LARGE)
    long = stack.submit([1] * 20, 100)
    advance(stack, 5)
    suspect(stack, [long], [LARGE, SMALL])
    advance(stack, 5)
    stack.now_s += NO_RUNNER_S / 2
    advance(stack, 5)
    add(stack, LARGE)
    finish(stack, long)
    assert not stack.engine.quarantine.active


@pytest.mark.parametrize("left", [0, 1])
def test_a_quarantined_request_is_as_long_as_its_waiting_choices(left: int) -> None:
    """One choice has ended when the other is shortened to the capacity of nearly equal runners."""
    stack = stack_of(LARGE)
    sampling = plan_pb2.Sampling(temperature=1, top_p=1, repetition_penalty=1)
    alone = [
        expected_tokens([1] * 20, 30, temperature=1, seed=5, sample_index=index, eos_probability=NO_EOS)
        for index in range(2)
    ]
    stop = next(token for token in alone[1 - left][3:8] if token not in alone[left])
    sampling.stop_ids = pack([stop])
    open_ended = stack.submit([1] * 20, 141, open_ended=True, n=2, seed=5, sampling=sampling)
    advance(stack, 14)
    assert [stream.end is None for stream in open_ended.streams] == [left == 0, left == 1]
    for size in (LARGE, LARGE - 3):
        (session,) = stack.runners.runners
        stack.runners.kill(session)
        compute_probe(stack, add(stack, size))
        stack.step()
    advance_until_idle(stack)
    assert end_of(open_ended, left).reason in (FinishReason.LENGTH, FinishReason.STOP)
    stack.assert_clean()


def test_quarantined_requests_that_no_runner_can_hold_are_ranked_by_the_policy_in_force() -> None:
    stack = stack_of(LARGE, policy="fcfs")
    long = stack.submit([1] * 20, 100, priority=5)
    advance(stack, 5)
    suspect(stack, [long], [LARGE, SMALL])
    stack.engine.change_policy(policy_named("priority"))
    (live,) = stack.engine.requests.book.live()
    assert live.sequences[0].rank.key == stack.engine.policy.key(request_view(live), stack.engine.ledger)
    add(stack, LARGE)
    finish(stack, long)


def test_a_quarantined_request_that_no_runner_can_hold_is_cleared_when_its_runner_is_back() -> None:
    stack = stack_of(LARGE)
    long = stack.submit([1] * 20, 100)
    advance(stack, 5)
    stack.runners.kill(next(iter(stack.runners.runners)))
    session = add(stack, LARGE)
    compute_probe(stack, session)
    stack.step()
    runner = stack.runners.kill(session, Loss.SILENT)
    compute_probe(stack, add(stack, SMALL))
    assert stack.engine.quarantine.active
    stack.runners.connect(100, runner, former=session)
    stack.step()
    assert not stack.engine.quarantine.active and len(stack.engine.placement.misfits) == 1
    finish(stack, long)


@pytest.mark.parametrize("turns", range(1, 8))
def test_a_request_that_waits_for_the_runner_of_an_isolation_is_not_given_up_when_that_ends(turns: int) -> None:
    """Its time is up in any turn of the isolation, also in the one with the last token of the isolated request."""
    stack = stack_of(SMALL, LARGE)
    tried = stack.submit([1] * 40, 1)
    stack.step()
    suspect(stack, [tried], [LARGE, LARGE])
    waits = stack.submit([2] * 40, 5)
    advance(stack, turns)
    stack.now_s += NO_RUNNER_S + 1
    finish(stack, tried, waits)


def test_a_request_that_waits_for_a_larger_runner_blocks_no_isolation() -> None:
    """Others go first to a runner that was lost with the quarantined request, but only those that it can hold."""
    stack = stack_of(SMALL, policy="fcfs")
    session = 100
    fatal = stack.submit([1] * 20, 100, timeout_ms=60_000)
    longest = None
    while fatal.refused is None and stack.now_s < 20:
        if session not in stack.runners.runners:
            session += 1
            stack.runners.connect(session, Runner(pool_backend(LARGE, 2, 256), "large"))
        stack.step()
        scheduler = stack.engine.pool.schedulers.get(session)
        if scheduler is not None and scheduler.table.num_running:
            stack.runners.kill(session, Loss.FAULT)
        advance(stack, 1, turn_s=0.05)
        (live,) = [one for one in stack.engine.requests.book.live() if one.handle == fatal.handle] or (None,)
        if longest is None and live is not None and live.suspicion.lone_losses:
            ill = add(stack, 2 * LARGE)
            stack.step()
            longest = stack.submit([2] * 20, 200)
            stack.runners.plans[ill].clear()  # its probe is lost in transit
    assert longest is not None and longest.refused is None and stack.now_s < NO_RUNNER_S
    assert fatal.refused is not None and fatal.refused.code == grpc.StatusCode.INTERNAL.value[0]


# ---------------------------------------------------------------------- faulty runners


@pytest.mark.parametrize("recovers", [True, False])
def test_a_request_that_only_a_runner_on_probation_holds_waits_for_it(recovers: bool) -> None:
    stack = stack_of(SMALL, LARGE)
    small, large = stack.runners.runners
    advance(stack, 3)
    long = stack.submit([1] * 40, 60)
    stack.step()
    stack.runners.kill(large)
    ill = add(stack, LARGE)
    stack.step()
    assert list(stack.engine.pool.schedulers) == [small]
    assert stack.model is not None and (stack.model.pool_tokens, stack.model.usual_tokens) == (161, 33)
    later, too_long, short = stack.submit([2] * 40, 60), stack.submit([2] * 102, 60), stack.submit([3], 20)
    for _ in range(30):
        stack.whole_turn(small)
    assert later.refused is None and end_of(short).reason == FinishReason.LENGTH
    assert too_long.refused is not None and too_long.refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    if recovers:
        return finish(stack, long, later)
    stack.now_s += NO_RUNNER_S + 1
    stack.whole_turn(small)
    stack.step()
    for request in (long, later):
        assert end_of(request).reason == FinishReason.UNAVAILABLE
        assert "that can hold its 100 tokens (prompt and max_tokens) fails every plan" in end_of(request).message
    stack.runners.kill(ill)
    stack.step()
    assert stack.model.pool_tokens == 33
    return None
