"""Constrained sequences among others, with engine and hash runner in one thread, checked token by token."""

from __future__ import annotations

import itertools
import json
import random

import grpc
import pytest

from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.link.runner_events import Loss
from scheduler_svc.model.refusal import RefusalReason
from scheduler_svc.model.sequence import FinishReason
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.scheduler.scheduler_check import check_scheduler
from tests.support.constraints import CONSTRAINTS, allowed_after
from tests.support.in_process import Stack, Submitted
from tests.support.lockstep import advance, advance_until_idle

EOS_PROBABILITY = 1 / 40


def backend(slots: int = 4, num_blocks: int = 64) -> HashBackend:
    return HashBackend(
        num_slots=slots,
        block_size=4,
        num_blocks=num_blocks,
        max_step_tokens=16,
        context_length=256,
        eos_probability=EOS_PROBABILITY,
    )


MODEL = backend().model


def sampling(temperature: float, min_tokens: int = 0, **fields: int) -> plan_pb2.Sampling:
    return plan_pb2.Sampling(
        temperature=temperature,
        top_p=1,
        repetition_penalty=1,
        stop_ids=pack([IM_END_ID]),
        min_tokens=min_tokens,
        **fields,  # type: ignore[arg-type]
    )


def submit(
    stack: Stack, kind: str, text: str, *, prompt: list[int] | None = None, max_tokens: int = 60, **fields: object
) -> Submitted:
    """Submits a constrained request."""
    fields.setdefault("sampling", sampling(1.0))
    request = stack.submit(prompt or [1, 2, 3], max_tokens, grammar=text, grammar_kind=kind, **fields)
    chosen = request.submit.sampling
    request.allowed = allowed_after(MODEL, kind, text, min_tokens=chosen.min_tokens, stop_ids=[IM_END_ID])
    return request


def text_of(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode()


def assert_whole(requests: list[Submitted]) -> None:
    for request in requests:
        assert request.refused is None
        for index, stream in enumerate(request.streams):
            assert stream.end is not None and stream.tokens == request.expected(index, EOS_PROBABILITY)
            assert stream.end.reason in (FinishReason.STOP, FinishReason.LENGTH)


@pytest.mark.parametrize(("kind", "text"), CONSTRAINTS)
def test_what_comes_out_matches(kind: str, text: str) -> None:
    stack = Stack()
    stack.add_runner(backend())
    stack.step()
    requests = [submit(stack, kind, text, seed=seed, n=2) for seed in range(8)]
    advance_until_idle(stack)
    assert_whole(requests)
    ended = [s for r in requests for s in r.streams if s.end is not None and s.end.reason == FinishReason.STOP]
    assert len(ended) > 4
    for stream in ended:
        assert stream.end is not None and stream.end.stop_token_id == IM_END_ID
    if kind == "json_schema":
        for stream in ended:
            assert set(json.loads(text_of(stream.tokens))) <= {"name", "age", "tags"}
    stack.assert_clean()


@pytest.mark.parametrize("seed", range(5))
def test_any_interleaving_with_preemptions_and_restarts(seed: int) -> None:
    """Unconstrained and constrained sequences, several runners, too few blocks, runners and schedulers that die."""
    rng = random.Random(seed)
    stack = Stack(depth=rng.randrange(1, 4), policy=rng.choice(["fcfs", "priority"]))
    stack.late = rng if seed % 2 else None
    for _ in range(rng.randrange(1, 3)):
        stack.add_runner(backend(num_blocks=rng.randrange(32, 64)))
    stack.step()
    requests = []
    for _ in range(14):
        prompt = [rng.randrange(4) for _ in range(rng.randrange(1, 40))]
        options = {"n": rng.choice([1, 1, 3]), "seed": rng.randrange(1 << 60), "priority": rng.randrange(3)}
        chosen, max_tokens = sampling(rng.choice([0.0, 1.0])), rng.randrange(1, 60)
        if rng.random() < 0.6:
            kind, text = rng.choice(CONSTRAINTS)
            options |= {"sampling": sampling(chosen.temperature, rng.choice([0, 0, max_tokens // 2]))}  # type: ignore[dict-item]
            requests.append(submit(stack, kind, text, prompt=prompt, max_tokens=max_tokens, **options))
        else:
            requests.append(stack.submit(prompt, max_tokens, sampling=chosen, **options))
    stack.step()
    for _ in range(4):
        for _ in range(rng.randrange(1, 60)):
            stack.turn(rng)
        if rng.random() < 0.4:
            stack.runners.kill(rng.choice(list(stack.runners.runners)), Loss.LEFT)
            stack.add_runner(backend())
            stack.step()
        elif rng.random() < 0.6:
            stack.restart_scheduler()
        for scheduler in stack.engine.pool.schedulers.values():
            check_scheduler(scheduler)
    advance_until_idle(stack)
    assert_whole(requests)
    stack.assert_clean()


def test_others_go_on_at_full_depth() -> None:
    """At depth 2 a constrained sequence has a row in every other plan, the others in each."""
    stack = Stack(depth=2)
    session = stack.add_runner(backend())
    free = stack.submit([1, 2], 40, sampling=plan_pb2.Sampling(top_p=1, repetition_penalty=1))
    tied = submit(stack, "regex", "[ab]{50}", prompt=[3, 4], max_tokens=40)
    stack.step()
    flags = []
    for _ in range(12):
        if stack.runners.plans[session]:
            flags.append(bytes(stack.runners.plans[session][-1][1].extent_flags))
        stack.runners.execute(session)
        stack.runners.deliver(session)
        stack.step()
    assert sum(len(row) for row in flags) > len(flags), "the constrained sequence never ran beside the other"
    assert not any(a.count(3) and b.count(3) for a, b in itertools.pairwise(flags)), flags
    assert sum(3 in row for row in flags) >= 4
    assert len(free.streams[0].tokens) > len(tied.streams[0].tokens)


def test_constrained_sequences_alone_decode_in_one_step() -> None:
    """They arrived one after another, and would otherwise alternate in steps of their own."""
    stack = Stack(depth=2)
    session = stack.add_runner(backend())
    stack.step()
    for _ in range(4):
        submit(stack, "regex", "[ab]{50}", prompt=[3, 4], max_tokens=40)
        stack.step()
        stack.runners.execute(session)
    rows = []
    for _ in range(12):
        stack.runners.deliver(session)
        stack.step()
        rows += [len(plan.extent_flags) for _, plan in stack.runners.plans[session]]
        stack.runners.execute(session)
    assert set(rows[-4:]) == {4}, rows


def test_min_tokens_puts_the_end_off_only_while_something_else_may_follow() -> None:
    stack = Stack()
    stack.add_runner(backend())
    stack.step()
    longer = [submit(stack, "regex", "a{1,30}", seed=s, sampling=sampling(1.0, 20)) for s in range(4)]
    complete = submit(stack, "regex", "abc", sampling=sampling(1.0, 20))
    advance_until_idle(stack)
    assert_whole([*longer, complete])
    assert all(len(request.streams[0].tokens) >= 20 for request in longer)
    assert text_of(complete.streams[0].tokens) == "abc"


def test_received_tokens_are_the_beginning() -> None:
    stack = Stack()
    stack.add_runner(backend())
    stack.step()
    request = submit(stack, "regex", "[ab]{12}", received=pack(list(b"abba")))
    advance_until_idle(stack)
    (stream,) = request.streams
    assert list(b"abba") + stream.tokens == request.expected(0, EOS_PROBABILITY)
    assert len(text_of(stream.tokens)) == 8


def test_a_grammar_that_fails_is_refused_and_affects_no_other() -> None:
    stack = Stack()
    stack.add_runner(backend())
    stack.step()
    other = submit(stack, "regex", "[ab]{12}")
    broken = stack.submit([1], 10, grammar="(a", grammar_kind="regex", sampling=sampling(1.0))
    late = submit(stack, "regex", "[ab]{12}", received=pack(list(b"axb")))
    advance_until_idle(stack)
    assert_whole([other])
    for request, field, word in (
        (broken, "constraint.regex", "unclosed group"),
        (late, "received_token_ids[1]", "can't follow"),
    ):
        refused = request.refused
        assert refused is not None and refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert refused.field == field and refused.message.startswith(field) and word in refused.message
        assert not request.streams, "it was accepted before"
    assert stack.engine.requests.totals.refusals == {RefusalReason.CONSTRAINT: 2}
    assert stack.engine.requests.totals.requests == 1
    stack.assert_clean()


def test_a_request_that_is_cancelled_while_its_grammar_compiles_is_gone() -> None:
    stack = Stack()
    stack.add_runner(backend())
    stack.step()
    request = submit(stack, "regex", "[ab]{12}")
    stack.step()
    stack.front.put(cancel={"handle": request.handle})
    advance(stack, 1)
    advance_until_idle(stack)
    assert request.streams[0].end is not None and request.streams[0].end.reason == FinishReason.CANCELLED
    stack.assert_clean()
