"""Overload, in process: tenant limits, fair shedding, early refusal, and bounds."""

from __future__ import annotations

import random
from collections import Counter

import grpc
import pytest

from roster_protos import engine_pb2
from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.model.sequence import FinishReason
from scheduler_svc.settings.tenant_limits import TenantLimits
from tests.support.in_process import Stack, Submitted

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


def stack_with_runner(slots: int = 2, **settings: object) -> tuple[Stack, int]:
    stack = Stack(**settings)
    backend = HashBackend(
        num_slots=slots, block_size=4, num_blocks=64, max_step_tokens=64, context_length=256, eos_probability=0
    )
    session = stack.add_runner(backend)
    stack.step()
    return stack, session


def finish(stack: Stack, session: int) -> None:
    for _ in range(3000):
        stack.advance(session)
        if stack.engine.requests.idle:
            return
    raise AssertionError("never idle")


def assert_refused(request: Submitted, *words: str) -> engine_pb2.Refused:
    refused = request.refused
    assert refused is not None and refused.code == EXHAUSTED and refused.retry_after_ms >= 500, refused
    assert all(word in refused.message for word in words), refused.message
    return refused


def test_a_tenant_may_have_so_much_waiting() -> None:
    limits = {"*": TenantLimits(waiting=2, tokens=None, running=None, weight=1), "big": {"tokens": 10}}
    stack, session = stack_with_runner(slots=1, tenant_limits=limits)
    running = stack.submit([1], 8, tenant="small")
    stack.advance(session)
    small = [stack.submit([1], 2, tenant="small") for _ in range(3)]
    pair = stack.submit([1], 2, tenant="other", n=3)
    big = [stack.submit([1] * 4, 2, tenant="big", n=2), stack.submit([1] * 3, 2, tenant="big")]
    stack.advance(session)
    assert [request.refused is None for request in [running, *small, *big]] == [True, True, True, False, True, False]
    assert_refused(small[2], "tenant 'small' is at its limit", "2 of its sequences are waiting, the limit is 2")
    assert_refused(big[1], "8 of its prompt tokens are waiting; 3 more would exceed 10")
    assert_refused(pair, "tenant 'other'")
    finish(stack, session)
    assert stack.engine.requests.shares.num_tenants == 0
    stack.submit([1], 2, tenant="small")
    stack.step()
    assert stack.requests[max(stack.requests)].refused is None


def test_a_tenant_may_run_so_many_and_others_pass_it() -> None:
    stack, session = stack_with_runner(slots=4, tenant_limits={"capped": {"running": 2}})
    capped = [stack.submit([1, 2, 3], 40, tenant="capped", request_id=f"c{i}") for i in range(5)]
    other = [stack.submit([1, 2, 3], 10, tenant="other", request_id=f"o{i}") for i in range(3)]
    stack.step()
    seen: Counter[str] = Counter()
    for _ in range(400):
        stack.advance(session)
        (scheduler,) = stack.engine.pool.schedulers.values()
        tenants = Counter(sequence.request.tenant for sequence in scheduler.table.running())
        assert tenants["capped"] <= 2
        seen |= tenants
        if stack.engine.requests.idle:
            break
    assert stack.engine.requests.idle and seen == {"capped": 2, "other": 2}
    for request in capped + other:
        assert request.first_sequence_id is not None
        end = stack.streams[request.first_sequence_id].end
        assert end is not None and end.reason == FinishReason.LENGTH
        assert stack.streams[request.first_sequence_id].tokens == request.expected(0, 0)
    assert stack.engine.requests.shares.num_tenants == 0


def test_held_sequences_survive_a_change_of_policy_and_can_be_cancelled() -> None:
    from scheduler_svc.policy import load_policy

    stack, session = stack_with_runner(slots=4, tenant_limits={"capped": {"running": 1}})
    requests = [stack.submit([1, 2], 12, tenant="capped") for _ in range(4)]
    stack.advance(session)
    stack.engine.change_policy(load_policy("priority", {}))
    stack.front.put(cancel=engine_pb2.Cancel(handle=requests[1].handle))
    for _ in range(200):
        stack.advance(session)
        assert sum(s.table.num_running for s in stack.engine.pool.schedulers.values()) <= 1
    assert stack.engine.requests.idle and stack.engine.requests.shares.num_tenants == 0
    ends = [stack.streams[r.first_sequence_id].end for r in requests if r.first_sequence_id is not None]
    assert [end.reason for end in ends if end] == [
        FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.LENGTH
    ]  # fmt: skip


def test_the_tenant_with_most_of_a_full_queue_gives_way() -> None:
    stack, session = stack_with_runner(slots=1, max_waiting_requests=8)
    stack.submit([1], 60, tenant="greedy")
    stack.advance(session)
    greedy = [stack.submit([1], 2, tenant="greedy") for _ in range(8)]
    stack.step()
    more = stack.submit([1], 2, tenant="greedy")
    stack.step()
    assert_refused(more, "the queue is full (8 sequences")
    modest = [stack.submit([1], 2, tenant="modest") for _ in range(6)]
    stack.step()
    # The greedy tenant's newest were shed until both had equal shares; then the modest tenant is refused as well.
    assert [request.refused is None for request in greedy] == [True] * 4 + [False] * 4
    for request in greedy[4:]:
        assert_refused(request, "tenant 'greedy' has the largest share of it")
    assert [request.refused is None for request in modest] == [True] * 4 + [False] * 2
    late = stack.submit([1], 2, tenant="late")
    stack.step()
    assert late.refused is None
    finish(stack, session)
    assert stack.engine.requests.shares.num_tenants == 0


def test_weights_say_what_is_fair() -> None:
    limits = {"heavy": {"weight": 3}}
    stack, session = stack_with_runner(slots=1, max_waiting_requests=8, tenant_limits=limits)
    stack.submit([1], 60, tenant="heavy")
    stack.advance(session)
    heavy = [stack.submit([1], 2, tenant="heavy") for _ in range(8)]
    light = [stack.submit([1], 2, tenant="light") for _ in range(8)]
    stack.step()
    assert sum(request.refused is None for request in heavy) == 6
    assert sum(request.refused is None for request in light) == 2


def test_a_request_that_runs_is_never_shed() -> None:
    stack, session = stack_with_runner(slots=4, max_waiting_requests=4)
    running = [stack.submit([1], 60, tenant="greedy") for _ in range(4)]
    stack.advance(session)
    waiting = [stack.submit([1], 2, tenant="modest", n=2) for _ in range(2)]
    rival = stack.submit([1], 2, tenant="rival")
    big_rival = stack.submit([1], 2, tenant="big", n=3)
    stack.step()
    assert all(request.refused is None for request in [*running, waiting[0], rival])
    assert_refused(waiting[1], "tenant 'modest' has the largest share")
    assert_refused(big_rival, "the queue is full (3 sequences")  # its tenant would have more than the one it sheds


def test_a_deadline_that_can_not_be_met_is_refused_at_once() -> None:
    stack, session = stack_with_runner(slots=2)
    for _ in range(60):
        stack.submit([1, 2], 10)
    early = stack.submit([1, 2], 10, timeout_ms=200)
    stack.step()
    assert early.refused is None  # nothing is known yet: it is accepted
    stack.advance(session, turns=80, turn_s=0.1)
    assert stack.engine.requests.rate.known
    left = sum(s.limit - len(s.tokens) for r in stack.engine.requests.book.live() for s in r.sequences)
    needed_s = 0.05 * left / 2 + 0.5  # two slots, two tokens a turn; plus its own ten
    assert len(stack.engine.requests.queue) > 20 and needed_s > 5
    hopeless = stack.submit([1, 2], 10, timeout_ms=1000)
    patient = stack.submit([1, 2], 10, timeout_ms=int(needed_s * 1500))
    stack.step()
    refused = assert_refused(hopeless, "longer than its deadline")
    # By then the backlog is as short as the deadline allows.
    assert refused.retry_after_ms == pytest.approx(1000 * (needed_s - 1), rel=0.3)
    assert patient.refused is None


def test_early_refusal_knows_which_go_first_and_can_be_turned_off() -> None:
    for settings, refused in (({"policy": "priority"}, False), ({}, True), ({"early_refusal": False}, False)):
        stack, session = stack_with_runner(slots=2, **settings)
        for _ in range(60):
            stack.submit([1, 2], 10)
        stack.advance(session, turns=80, turn_s=0.1)
        urgent = stack.submit([1, 2], 10, timeout_ms=3000, priority=100)
        stack.step()
        assert (urgent.refused is not None) == refused, settings


def test_a_hundred_times_the_capacity_costs_no_memory_and_no_turn() -> None:
    """The number of waiting, known and accounted requests stays bounded; every request gets an answer."""
    rng = random.Random(7)
    stack, session = stack_with_runner(slots=4, max_waiting_requests=50, max_waiting_tokens=400)
    capacity = 54
    requests = []
    most_known = 0
    for number in range(100 * capacity):
        tenant = f"t{rng.randrange(10)}"
        requests.append(stack.submit([1] * rng.randrange(1, 12), rng.randrange(1, 6), tenant=tenant))
        if number % 20 == 19:
            stack.advance(session)
            engine = stack.engine
            assert len(engine.requests.queue) <= 50 and engine.requests.queue.num_tokens <= 400
            assert len(engine.requests.shares._order) <= 2 * 10 + 65
            most_known = max(most_known, engine.requests.book.num_live)
            assert engine.pool.schedulers and not engine.drain.begun  # the conditions of readiness
    finish(stack, session)
    assert most_known <= capacity
    answered = sum(request.refused is not None for request in requests)
    for request in requests:
        if request.refused is not None:
            assert request.refused.code == EXHAUSTED and request.refused.retry_after_ms >= 500
        else:
            assert request.first_sequence_id is not None
            assert stack.streams[request.first_sequence_id].tokens == request.expected(0, 0)
    assert answered > 0.5 * len(requests)
    assert stack.engine.requests.shares.num_tenants == 0 and not stack.engine.requests.shares._unstarted
    stack.assert_clean()


@pytest.mark.parametrize("seed", range(2))
def test_shares_agree_with_a_count(seed: int) -> None:
    """Random submissions, cancels and steps: the shares equal a count over all sequences."""
    rng = random.Random(seed)
    limits = {"a": {"running": 1}, "b": {"waiting": 5}, "*": {"running": 2, "tokens": 60}}
    stack, session = stack_with_runner(slots=3, max_waiting_requests=20, tenant_limits=limits)
    for _ in range(300):
        for _ in range(rng.randrange(3)):
            prompt, most = [1] * rng.randrange(1, 9), rng.randrange(1, 9)
            stack.submit(prompt, most, tenant=rng.choice("abcd"), n=rng.choice((1, 3)))
        if stack.requests and rng.random() < 0.3:
            stack.front.put(cancel=engine_pb2.Cancel(handle=rng.choice(list(stack.requests))))
        stack.advance(session)
        live = [s for r in stack.engine.requests.book.live() for s in r.sequences if s.phase.value != "finished"]
        shares = stack.engine.requests.shares
        for tenant in "abcd":
            unstarted = [s for s in live if s.request.tenant == tenant and s in shares._unstarted]
            assert shares.waiting(tenant) == len(unstarted)
            assert all(s.phase.value == "waiting" for s in unstarted)
    finish(stack, session)
    assert stack.engine.requests.shares.num_tenants == 0
    assert (
        not stack.engine.requests.shares._unstarted
        and not stack.engine.requests.shares._held
        and not stack.engine.requests.shares._entered
    )
