"""The counts behind tenants' limits are rebuilt by each of any number of successive takeovers.

After every step `check` compares the shares with a count over all sequences.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import grpc
import pytest

from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.constrained.process.compiler import grammar_text
from scheduler_svc.model.sequence import FinishReason
from scheduler_svc.plan.plan_draft import pack
from tests.support.constraints import allowed_after
from tests.support.in_process import Stack, Submitted
from tests.support.lockstep import advance, advance_until_idle
from tests.support.thoroughness import in_turn

REGEX = ("regex", "[a-d]{20,30}")


def backend(slots: int = 4) -> HashBackend:
    return HashBackend(
        num_slots=slots, block_size=4, num_blocks=128, max_step_tokens=64, context_length=256, eos_probability=0.0
    )


def stack_with_runners(*slots: int, **settings: Any) -> Stack:
    stack = Stack(**settings)
    for count in slots:
        stack.add_runner(backend(count))
    stack.step()
    return stack


def sampling(kind: str) -> plan_pb2.Sampling:
    made = plan_pb2.Sampling(temperature=0, top_p=1, repetition_penalty=1)
    if kind == "structured":
        made.stop_ids = pack([IM_END_ID])
    elif kind == "logprobs":
        made.logprobs = 1
    elif kind == "prompt logprobs":
        made.prompt_logprobs = 0
    return made


def submit(stack: Stack, kind: str, number: int, **fields: Any) -> Submitted:
    if kind == "structured":
        fields["grammar"] = grammar_text(*REGEX)
    request = stack.submit([1, 2, number], 40, sampling=sampling(kind), tenant="capped", seed=number, **fields)
    if kind == "structured":
        request.allowed = allowed_after(backend().model, *REGEX, stop_ids=[IM_END_ID])
    return request


def with_a_lowered_limit() -> tuple[Stack, list[Submitted]]:
    """Returns four sequences that ran, and a new scheduler whose tenant may run one."""
    stack = stack_with_runners(4)
    requests = [submit(stack, "plain", number) for number in range(4)]
    advance(stack, 10)
    stack.settings = stack.settings.model_copy(update={"tenant_limits": {"capped": _limits(running=1)}})
    stack.restart_scheduler()
    return stack, requests


def most_running(stack: Stack) -> int:
    return sum(scheduler.table.num_running for scheduler in stack.engine.pool.schedulers.values())


def assert_whole(requests: list[Submitted]) -> None:
    for request in requests:
        for index, stream in enumerate(request.streams):
            assert stream.tokens == request.expected(index, 0.0)
            assert stream.end is not None and stream.end.reason in (FinishReason.LENGTH, FinishReason.STOP)


@pytest.mark.parametrize(
    ("kind", "choices"),
    in_turn(product(("plain", "logprobs", "prompt logprobs", "structured"), (1, 3)), in_ci=3),
)
def test_a_tenant_runs_as_many_as_it_may_over_takeovers(kind: str, choices: int) -> None:
    stack = stack_with_runners(3, 3, tenant_limits={"capped": {"running": 2}})
    requests = [submit(stack, kind, number, n=choices) for number in range(5)]
    for takeover in range(4):
        for _ in range(6):
            advance(stack)
            assert most_running(stack) <= 2, f"after {takeover} takeovers"
        assert most_running(stack) == 2
        stack.restart_scheduler()
    while not stack.engine.requests.idle:
        advance(stack)
        assert most_running(stack) <= 2
    advance_until_idle(stack)
    assert_whole(requests)
    assert stack.engine.requests.shares.num_tenants == 0
    stack.assert_clean()


def test_a_limit_that_was_lowered_holds_at_once() -> None:
    """A sequence beyond the limit keeps its tokens, and waits."""
    stack, requests = with_a_lowered_limit()
    assert most_running(stack) == 1
    live = [sequence for request in stack.engine.requests.book.live() for sequence in request.sequences]
    assert len(live) == 4 and all(sequence.num_generated > 5 for sequence in live)
    advance_until_idle(stack)
    assert_whole(requests)


def test_a_late_runner_does_not_add_to_what_runs() -> None:
    """Its sequence must wait, because another choice of the request has started under the limit by then."""
    stack = stack_with_runners(1, 1, 1, tenant_limits={"capped": {"running": 2}})
    request = submit(stack, "plain", 7, n=3)
    advance(stack, 8)
    running = {s: scheduler for s, scheduler in stack.engine.pool.schedulers.items() if scheduler.table.num_running}
    assert len(running) == 2
    session = max(running)
    late = stack.runners.dismiss(session)
    assert late is not None
    stack.restart_scheduler()
    advance(stack, 3)
    assert most_running(stack) == 2
    stack.runners.connect(99, late, former=session, holds=True)
    while not stack.engine.requests.idle:
        advance(stack)
        assert most_running(stack) <= 2
    advance_until_idle(stack)
    assert_whole([request])
    stack.assert_clean()


def test_what_waits_counts_against_its_limits() -> None:
    """Choices that start again wait, and count against the limit for a new request of the tenant."""
    limits = {"capped": {"waiting": 3, "running": 1}}
    stack = stack_with_runners(4, tenant_limits=limits)
    first = submit(stack, "logprobs", 1, n=3)
    advance(stack, 6)
    for number in (2, 4):
        assert stack.engine.requests.shares.waiting("capped") == 2
        late = submit(stack, "plain", number, n=2)
        stack.step()
        assert late.refused is not None and late.refused.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        stack.restart_scheduler()
    last = submit(stack, "plain", 5)
    advance_until_idle(stack)
    assert_whole([first, last])


def test_what_runs_is_charged_to_its_tenant() -> None:
    """The ledger starts with the tokens already served to the sequences that resume."""
    stack = stack_with_runners(4)
    for number in range(2):
        submit(stack, "plain", number)
    advance(stack, 10)
    before = stack.engine.ledger.account("capped")
    stack.restart_scheduler()
    after = stack.engine.ledger.account("capped")
    assert before.prompt_tokens == after.prompt_tokens == 6
    assert 0 < before.sampled_tokens <= after.sampled_tokens <= before.sampled_tokens + 4  # and those not sent yet
    advance_until_idle(stack)
    assert stack.engine.ledger.account("capped").sampled_tokens == 80


def test_a_runner_that_comes_back_charges_nothing_twice() -> None:
    """To the scheduler that has charged what its sequences were served before the runner was lost."""
    stack = stack_with_runners(4)
    requests = [submit(stack, "plain", number) for number in range(2)]
    advance(stack, 10)
    (session,) = stack.runners.runners
    survivor = stack.runners.kill(session)
    stack.step()
    stack.runners.connect(99, survivor, former=session, holds=True)
    stack.step()
    stack.step()  # with its snapshot
    assert most_running(stack) == 2
    advance_until_idle(stack)
    assert_whole(requests)
    account = stack.engine.ledger.account("capped")
    assert (account.prompt_tokens, account.sampled_tokens) == (6, 80)


def test_what_keeps_its_tokens_but_waits_is_charged_for_them_too() -> None:
    stack, requests = with_a_lowered_limit()
    advance_until_idle(stack)
    assert_whole(requests)
    assert stack.engine.ledger.account("capped").sampled_tokens == 160


def test_what_was_taken_over_is_not_shed() -> None:
    """Its client has received tokens, though all its sequences wait."""
    stack = stack_with_runners(1, max_waiting_requests=2)
    request = submit(stack, "logprobs", 1)
    advance(stack, 6)
    stack.restart_scheduler()
    rivals = [stack.submit([1], 5, tenant=f"t{number}") for number in range(4)]
    advance_until_idle(stack)
    assert request.refused is None and any(rival.refused for rival in rivals)
    assert_whole([request])


def _limits(**limits: Any) -> Any:
    from scheduler_svc.settings.tenant_limits import TenantLimits

    return TenantLimits(**limits)
