"""Retention through the whole engine: what is kept for each tenant, swaps, and that streams never change."""

from __future__ import annotations

import random
import time

import grpc
import pytest

from roster_protos import admin_pb2, engine_pb2
from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.engine.engine import Engine
from scheduler_svc.policy import Load, Policy, PolicyGuard, PolicyParameters, PrefixView, load_retention
from scheduler_svc.tiers.offloads import Content
from tests.support.in_process import Stack, Submitted
from tests.support.thoroughness import count

BLOCK = 4
NO_EOS = 0.0


class Chosen(Policy):
    """Values the conversations that a test names."""

    name = "chosen"
    values: dict[str, float] = {}  # noqa: RUF012  (a test sets it)
    seen: list[PrefixView] = []  # noqa: RUF012

    def retain(self, prefix: PrefixView, load: Load) -> float:
        self.seen.append(prefix)
        assert load.blocks > 0
        return self.values.get(prefix.conversation, 0.5)


class Broken(Policy):
    """Fails."""

    name = "broken"

    def retain(self, prefix: PrefixView, load: Load) -> float:
        raise RuntimeError("no idea")


def stack_with(
    retention: Policy | str = "lru", num_blocks: int = 24, host_blocks: int = 0, seed: int = 1, **settings: object
) -> tuple[Stack, int]:
    stack = Stack(**settings)  # type: ignore[arg-type]
    policy = retention if isinstance(retention, Policy) else load_retention(retention, {})
    session = stack.add_runner(
        HashBackend(
            num_slots=3,
            block_size=BLOCK,
            num_blocks=num_blocks,
            max_step_tokens=32,
            context_length=256,
            eos_probability=NO_EOS,
        ),
        host_blocks,
        random.Random(seed),
        lost=0.1,
    )
    stack.step()
    stack.engine.change_retention(policy)
    return stack, session


def run(stack: Stack, tokens: list[int], output: int = 3, **fields: object) -> Submitted:
    """Serves one request to its end."""
    request = stack.submit(tokens, output, **fields)  # type: ignore[arg-type]
    stack.run(random.Random(0))
    assert request.first_sequence_id is not None
    assert stack.streams[request.first_sequence_id].tokens == request.expected(0, NO_EOS)
    return request


def cached(stack: Stack, session: int, tokens: list[int]) -> int:
    """Returns the tokens of the prompt that are cached."""
    before = stack.engine.pool.schedulers[session].cached_tokens
    run(stack, tokens, 1)
    return stack.engine.pool.schedulers[session].cached_tokens - before


def prompt(first: int, length: int = 20) -> list[int]:
    return [first] + [7] * (length - 1)


def test_the_policy_decides_which_conversation_stays() -> None:
    Chosen.values = {"keep": 2.0, "drop": 1.0}
    stack, session = stack_with(Chosen(PolicyParameters()))
    run(stack, prompt(1), conversation_id="keep")
    run(stack, prompt(2), conversation_id="drop")
    run(stack, prompt(3, 60), conversation_id="big")
    assert cached(stack, session, prompt(1)) == 16
    assert cached(stack, session, prompt(2)) < 16
    stack.assert_clean()


def test_lru_keeps_what_was_used_last_whatever_hints_say() -> None:
    stack, session = stack_with("lru")
    run(stack, prompt(1), conversation_id="keep", kv_retain_s=1000.0)
    run(stack, prompt(2), conversation_id="drop", kv_retain_s=0.0)
    run(stack, prompt(3, 60))
    assert cached(stack, session, prompt(2)) == 16
    stack.assert_clean()


def test_session_follows_hints() -> None:
    stack, session = stack_with("session")
    run(stack, prompt(1), conversation_id="keep", kv_retain_s=1000.0)
    run(stack, prompt(2), conversation_id="drop", kv_retain_s=0.0)
    run(stack, prompt(3, 60), conversation_id="big")
    assert cached(stack, session, prompt(1)) == 16
    stack.assert_clean()


def test_hints_are_cut_to_the_settings() -> None:
    Chosen.values, Chosen.seen = {}, []
    stack, _ = stack_with(Chosen(PolicyParameters()), hint_longest_s=30.0, hint_share=0.1)
    run(stack, prompt(1), conversation_id="a", kv_retain_s=1000.0, next_turn_s=5.0)
    assert {(view.retain_s, view.next_turn_s) for view in Chosen.seen} == {(30.0, 5.0)}
    run(stack, prompt(2), conversation_id="b", tenant="other", kv_retain_s=10.0)
    Chosen.seen.clear()
    run(stack, prompt(4, 60), conversation_id="c", tenant="other")
    big = [view for view in Chosen.seen if view.tenant == "other" and view.tenant_share > 0.1]
    assert big and all(view.retain_s is None for view in big)


def test_a_swap_ranks_what_is_cached_while_streams_run() -> None:
    stack, session = stack_with("lru")
    run(stack, prompt(1), conversation_id="keep", kv_retain_s=1000.0)
    run(stack, prompt(2), conversation_id="drop", kv_retain_s=0.0)
    running = stack.submit(prompt(5, 8), 10)
    for _ in range(3):
        stack.step()
        stack.runners.execute(session)
        stack.runners.deliver(session)
    change = admin_pb2.SetPolicyRequest(name="session", retention=True)
    before = len(stack.others)
    stack.front.put(policy_change=engine_pb2.PolicyChange(handle=7, policy=change))
    deadline = time.monotonic() + 30
    while len(stack.others) == before:
        assert time.monotonic() < deadline
        stack.step()
    answer = stack.others[-1].policy_changed.change
    assert (answer.former_policy, answer.policy, answer.running) == ("lru", "session", 1)
    status = stack.engine.reports.status()
    assert (status.policy, status.retention, status.totals.policy_changes) == ("auto", "session", 1)
    run(stack, prompt(3, 50))
    assert running.first_sequence_id is not None
    assert stack.streams[running.first_sequence_id].tokens == running.expected(0, NO_EOS)
    assert cached(stack, session, prompt(1)) == 16
    stack.assert_clean()


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("fcfs", grpc.StatusCode.NOT_FOUND, "does not decide what the prefix cache keeps"),
        ("none", grpc.StatusCode.NOT_FOUND, "there is no policy 'none'"),
    ],
)
def test_a_policy_that_values_nothing_is_refused(name: str, code: grpc.StatusCode, words: str) -> None:
    stack, _ = stack_with("lru")
    change = admin_pb2.SetPolicyRequest(name=name, retention=True)
    before = len(stack.others)
    stack.front.put(policy_change=engine_pb2.PolicyChange(handle=7, policy=change))
    deadline = time.monotonic() + 30
    while len(stack.others) == before:
        assert time.monotonic() < deadline
        stack.step()
    refused = stack.others[-1].refused
    assert refused.code == code.value[0] and words in refused.message
    assert stack.engine.retention.policy.name == "lru"


def test_a_failing_policy_means_last_use_and_is_counted() -> None:
    stack, session = stack_with(Broken(PolicyParameters()))
    run(stack, prompt(1), conversation_id="a")
    run(stack, prompt(2), conversation_id="b")
    run(stack, prompt(3, 60))
    assert cached(stack, session, prompt(2)) == 16
    assert stack.engine.retention.failures > 0 and "no idea" in stack.engine.retention.last_failure
    assert stack.engine.reports.status().totals.policy_failures == stack.engine.retention.failures
    stack.assert_clean()


@pytest.mark.parametrize("retention", ["lru", "session"])
def test_a_forgotten_conversation_is_gone_and_only_its_tenants(retention: str) -> None:
    stack, session = stack_with(retention)
    run(stack, prompt(1), conversation_id="x", tenant="a")
    run(stack, prompt(2), conversation_id="x", tenant="b")
    before = len(stack.others)
    stack.front.put(forget=engine_pb2.Forget(handle=9, tenant="a", conversation_id="x"))
    stack.step()
    assert [one.forgotten.tokens for one in stack.others[before:]] == [20]
    assert cached(stack, session, prompt(1)) == 0
    assert cached(stack, session, prompt(2)) == 16
    stack.front.put(forget=engine_pb2.Forget(handle=9, tenant="a", conversation_id="unknown"))
    stack.step()
    assert stack.others[-1].forgotten.tokens == 0
    stack.assert_clean()


def test_a_conversation_is_forgotten_while_it_is_copied_to_the_host_pool() -> None:
    stack, session = stack_with("session", host_blocks=40)
    run(stack, prompt(1), conversation_id="x", next_turn_s=1.0)
    scheduler = stack.engine.pool.schedulers[session]
    assert scheduler.tiers is not None
    pool, tiers = scheduler.pool, scheduler.tiers
    names = pool.tree.names(pool.tree.find("", "x"))  # type: ignore[arg-type]
    assert len(names) == 5 and not tiers.offloads.line
    blocks = [block for name in names if (block := pool.ready_block(name)) is not None]
    tiers.flush()
    tiers.offloads.begin([Content(block, name, BLOCK) for block, name in zip(blocks, names, strict=True)])
    stack.engine.pool.wake(session)
    stack.front.put(forget=engine_pb2.Forget(handle=9, conversation_id="x"))
    stack.step()
    assert stack.others[-1].forgotten.tokens == 20 and not any(map(pool.has, names))
    stack.run(random.Random(1))
    assert not any(map(tiers.host.has, names)) and cached(stack, session, prompt(1)) == 0
    stack.assert_clean()


def test_what_runs_is_not_forgotten() -> None:
    stack, _ = stack_with("session")
    run(stack, prompt(1), conversation_id="x")
    running = stack.submit(prompt(1) + [9] * 4, 8, conversation_id="x")
    stack.step()
    stack.front.put(forget=engine_pb2.Forget(handle=9, conversation_id="x"))
    stack.step()
    assert stack.others[-1].forgotten.tokens < 20
    stack.run(random.Random(1))
    assert running.first_sequence_id is not None
    assert stack.streams[running.first_sequence_id].tokens == running.expected(0, NO_EOS)
    stack.assert_clean()


@pytest.mark.parametrize("host_blocks", [0, 20])
@pytest.mark.parametrize("seed", range(count(30, in_ci=3)))
def test_streams_do_not_depend_on_what_is_kept(seed: int, host_blocks: int) -> None:
    """Random conversations with hits, preemptions, several choices, copies and swaps in a tiny pool."""
    rng = random.Random(seed)
    stack, session = stack_with("session", 30, host_blocks, seed)
    contexts = {name: [rng.randrange(10), 5, 5, 5] for name in "abcde"}
    requests: list[Submitted] = []
    for turn in range(24):
        name = rng.choice("abcde")
        contexts[name] = (contexts[name] + [rng.randrange(10) for _ in range(rng.randrange(9))])[:60]
        fields: dict[str, object] = {"n": rng.choice((1, 1, 2)), "tenant": rng.choice(("", "t"))}
        if rng.random() < 0.7:
            fields["conversation_id"] = name
        if rng.random() < 0.3:
            fields["kv_retain_s"] = rng.choice((0.0, 5.0))
        if rng.random() < 0.3:
            fields["next_turn_s"] = rng.random() * 3
        requests.append(stack.submit(list(contexts[name]), rng.randint(1, 14), **fields))  # type: ignore[arg-type]
        if rng.random() < 0.2:
            stack.front.put(forget=engine_pb2.Forget(handle=1 << 50, tenant="t", conversation_id=name))
        if turn % 6 == 5:
            stack.engine.change_retention(load_retention(rng.choice(("lru", "session")), {}))
        for _ in range(rng.randrange(6)):
            stack.step()
            stack.runners.execute(session)
            stack.runners.deliver(session)
    stack.run(rng)
    for request in requests:
        assert request.first_sequence_id is not None
        for index in range(request.submit.n):
            assert stack.streams[request.first_sequence_id + index].tokens == request.expected(index, NO_EOS)
    assert stack.engine.ledger.awaited == {}
    assert stack.engine.retention.failures == 0
    tiers = stack.engine.pool.schedulers[session].tiers
    assert tiers is None or tiers.offloads.counts.blocks > 5
    stack.assert_clean()


class Host:
    """A host pool that records what is to be loaded."""

    def __init__(self) -> None:
        self.asked: list[list[bytes]] = []

    def prefetch(self, names: list[bytes]) -> int:
        self.asked.append(names)
        return len(names)


def test_a_conversation_is_loaded_before_it_comes_back() -> None:
    stack, session = stack_with(load_retention("session", {"lead_s": 1.0}))
    scheduler, host = stack.engine.pool.schedulers[session], Host()
    scheduler.retention._tiers = host  # type: ignore[assignment]
    run(stack, prompt(1), conversation_id="x", next_turn_s=10.0)
    run(stack, prompt(2), conversation_id="y", next_turn_s=0.0, kv_retain_s=0.0)
    engine: Engine = stack.engine
    due_at = engine.ledger.prefetch_at
    assert due_at == pytest.approx(engine.ledger.now_s + 9.0, abs=0.5) and engine.wake_at <= due_at
    names = scheduler.pool.tree.names(scheduler.pool.tree.find("", "x"))[::-1]  # type: ignore[arg-type]
    for name in names:
        scheduler.pool.tree.came(name, 1)
    scheduler.pool.purge(names[2:])
    stack.now_s = due_at - 0.1
    stack.step()
    assert host.asked == []
    stack.now_s = due_at + 0.1
    stack.step()
    assert host.asked == [names]
    assert engine.ledger.prefetch_at == float("inf")


class Later(Policy):
    """Expects each conversation when its hint says, and those without one never."""

    name = "later"

    def retain(self, prefix: PrefixView, load: Load) -> float:
        return 1.0

    def prefetch_s(self, prefix: PrefixView, load: Load) -> float | None:
        return float("inf") if prefix.next_turn_s is None else prefix.next_turn_s


def test_what_is_expected_never_or_later_than_hints_reach_takes_no_place_among_what_is() -> None:
    stack, session = stack_with(Later(PolicyParameters()))
    retention, host = stack.engine.pool.schedulers[session].retention, Host()
    retention._tiers = host  # type: ignore[assignment]
    for turn in range(3):
        run(stack, prompt(turn), conversation_id=f"never-{turn}")
    assert not retention._due and stack.engine.ledger.prefetch_at == float("inf")
    for _ in range(90):  # each turn says again when the next one comes
        run(stack, prompt(9), 1, conversation_id="x", next_turn_s=50.0)
    assert len(retention._last) == 1 and len(retention._due) < 80
    run(stack, prompt(9), 1, conversation_id="x")
    stack.now_s += 100.0
    stack.step()
    assert host.asked == [] and not retention._due


def test_a_request_for_an_idle_conversation_raises_its_value_at_once() -> None:
    """Its value is otherwise used for up to half a second."""
    stack, session = stack_with("session")
    run(stack, prompt(1), conversation_id="x")
    scheduler = stack.engine.pool.schedulers[session]
    prefix = scheduler.pool.tree.find("", "x")
    assert prefix is not None
    stack.engine.ledger.now_s += 120.0
    idle = scheduler.retention.value(prefix)
    stack.engine.ledger.now_s += 0.2
    assert scheduler.retention.value(prefix) == idle
    stack.engine.ledger.awaited["", "x"] = [stack.engine.ledger.now_s]
    assert scheduler.retention.value(prefix) > idle
    stack.engine.ledger.now_s += 0.5
    del stack.engine.ledger.awaited["", "x"]
    assert scheduler.retention.value(prefix) != idle


def test_the_guard_checks_answers() -> None:
    class Wrong(Policy):
        def retain(self, prefix: PrefixView, load: Load) -> float:
            return float("nan")

        def prefetch_s(self, prefix: PrefixView, load: Load) -> float | None:
            return "soon"  # type: ignore[return-value]

    guard = PolicyGuard(Wrong(PolicyParameters()))
    assert guard.retains and guard.prefetches
    view: PrefixView = None  # type: ignore[assignment]
    assert guard.retain(view, None) == 0.0 and guard.prefetch_s(view, None) is None  # type: ignore[arg-type]
    assert guard.failures == 2
