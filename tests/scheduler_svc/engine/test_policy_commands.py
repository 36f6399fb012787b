"""ListPolicies and SetPolicy at the engine: refusals, counters, and streams that are not affected."""

from __future__ import annotations

import json
import random
import time

import grpc
import pytest

from roster_protos import admin_pb2, engine_pb2
from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.policy import available_policies, import_policy
from scheduler_svc.policy.catalog import describe_policies
from tests.support.in_process import Stack

NO_EOS = 0.0


def stack_with_runner() -> tuple[Stack, int]:
    stack = Stack()
    backend = HashBackend(
        num_slots=3, block_size=4, num_blocks=24, max_step_tokens=32, context_length=256, eos_probability=NO_EOS
    )
    session = stack.add_runner(backend)
    stack.step()
    return stack, session


def ask(stack: Stack, **command: object) -> engine_pb2.FromEngine:
    """Returns the answer to a command that is executed in the background."""
    before = len(stack.others)
    stack.front.put(**command)
    deadline = time.monotonic() + 30
    while len(stack.others) == before:
        assert time.monotonic() < deadline
        stack.step()
        time.sleep(0.001)
    return stack.others[-1]


def change(stack: Stack, name: str, parameters: str = "") -> engine_pb2.FromEngine:
    policy = admin_pb2.SetPolicyRequest(name=name, parameters=parameters)
    return ask(stack, policy_change=engine_pb2.PolicyChange(handle=77, policy=policy))


def test_a_policy_is_put_in_force_and_everything_is_ranked_anew() -> None:
    stack, session = stack_with_runner()
    requests = [stack.submit([1, 2, number], 20) for number in range(8)]
    for _ in range(3):
        stack.step()
        stack.runners.execute(session)
        stack.runners.deliver(session)
    stack.step()
    prefilled = stack.engine.pool.schedulers[session].prefill_tokens
    answer = change(stack, "fcfs", '{"step_tokens": 5}')
    changed = answer.policy_changed
    assert changed.handle == 77
    assert (changed.change.former_policy, changed.change.policy) == ("auto", "fcfs")
    assert json.loads(changed.change.policy_parameters)["step_tokens"] == 5
    assert json.loads(changed.change.former_parameters)["itl_target_ms"] is None
    assert (changed.change.running, changed.change.waiting) == (3, 5)
    orca = change(stack, "orca").policy_changed.change
    assert (orca.former_policy, orca.policy) == ("fcfs", "orca")
    now = stack.engine.reports.status()
    assert (now.policy, now.totals.policy_changes) == ("orca", 2)
    assert stack.engine.pool.schedulers[session].prefill_tokens == prefilled, "nothing is computed again"
    stack.run(random.Random(1))
    for request in requests:
        assert request.first_sequence_id is not None
        assert stack.streams[request.first_sequence_id].tokens == request.expected(0, NO_EOS)
    stack.assert_clean()


@pytest.mark.parametrize(
    ("name", "parameters", "code", "field", "sentence"),
    [
        ("fcsf", "", grpc.StatusCode.NOT_FOUND, "name", "installed are:"),
        ("", "", grpc.StatusCode.NOT_FOUND, "name", "fcfs"),
        ("fcfs", '{"tokens": 3}', grpc.StatusCode.INVALID_ARGUMENT, "parameters", "It knows:"),
        ("fcfs", '{"step_tokens": 0}', grpc.StatusCode.INVALID_ARGUMENT, "parameters", "greater than or equal to 1"),
        ("fcfs", "[1]", grpc.StatusCode.INVALID_ARGUMENT, "parameters", "JSON object"),
        ("fcfs", "{", grpc.StatusCode.INVALID_ARGUMENT, "parameters", "not JSON"),
    ],
)
def test_what_can_not_be_put_in_force_is_refused_and_nothing_changes(
    name: str, parameters: str, code: grpc.StatusCode, field: str, sentence: str
) -> None:
    stack, _ = stack_with_runner()
    stack.front.put(
        policy_change=engine_pb2.PolicyChange(
            handle=5, policy=admin_pb2.SetPolicyRequest(name=name, parameters=parameters)
        )
    )
    deadline = time.monotonic() + 30
    refusals: list[engine_pb2.Refused] = []
    while not refusals:
        assert time.monotonic() < deadline
        stack.engine.step()
        refusals = [m.refused for _, m in stack.front.messages if m.WhichOneof("message") == "refused"]
        time.sleep(0.001)
    assert (refusals[0].handle, refusals[0].code, refusals[0].field) == (5, code.value[0], field)
    assert sentence in refusals[0].message
    assert (stack.engine.reports.status().policy, stack.engine.requests.totals.policy_changes) == ("auto", 0)


def test_changes_are_carried_out_in_the_order_in_which_they_came() -> None:
    stack, _ = stack_with_runner()
    names = ["orca", "static", "fcfs", "auto", "orca"]
    for handle, name in enumerate(names):
        policy = admin_pb2.SetPolicyRequest(name=name)
        stack.front.put(policy_change=engine_pb2.PolicyChange(handle=handle, policy=policy))
    deadline = time.monotonic() + 30
    while len(stack.others) < len(names):
        assert time.monotonic() < deadline
        stack.step()
    answers = [message.policy_changed for message in stack.others]
    assert [(answer.handle, answer.change.policy) for answer in answers] == list(enumerate(names))
    assert [answer.change.former_policy for answer in answers] == ["auto", *names[:-1]]


def test_the_installed_policies_are_listed_with_their_parameters() -> None:
    stack, _ = stack_with_runner()
    reply = ask(stack, policies_query=engine_pb2.PoliciesQuery(handle=3)).policies_reply
    policies = {policy.name: policy for policy in reply.policies.policies}
    assert reply.handle == 3 and reply.policies.policy == "auto" and sorted(policies) == available_policies()
    assert "step_tokens" in json.loads(reply.policies.policy_parameters)
    (parameter,) = [p for p in policies["fcfs"].parameters if p.name == "step_tokens"]
    assert parameter.default_value == "null" and "positions per step" in parameter.description
    assert {"type": "integer", "minimum": 1} in json.loads(parameter.schema)["anyOf"]
    for policy in describe_policies():
        assert policy.distribution == "roster-serve"
        assert policy.problem or (policy.summary.endswith(".") and all(p.description for p in policy.parameters))


def test_a_policy_that_can_not_be_imported_is_listed_with_its_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(entry: object) -> type:
        if entry.name == "orca":  # type: ignore[attr-defined]
            raise ImportError("no module named 'numbers2'")
        return import_policy(entry)  # type: ignore[arg-type]

    monkeypatch.setattr("scheduler_svc.policy.catalog.import_policy", broken)
    policies = {policy.name: policy for policy in describe_policies()}
    assert "numbers2" in policies["orca"].problem and not policies["fcfs"].problem
