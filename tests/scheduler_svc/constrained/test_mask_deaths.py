"""Mask processes that die under an engine: the request at fault ends, all others get the tokens of their solo run.

This thread plays the processes (see `mask_handles`), so that each death happens at the intended frame.
"""

from __future__ import annotations

import json
import random
import signal
from collections import Counter

import grpc
import pytest

from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.constrained.columns import MaskAsk
from scheduler_svc.constrained.fork_server import MasksUnavailable
from scheduler_svc.constrained.mask_client import AwaitedRow
from scheduler_svc.constrained.mask_handle import Channel
from scheduler_svc.constrained.source import UnusableGrammar
from scheduler_svc.model.sequence import FinishReason
from tests.scheduler_svc.constrained.test_constraints import MODEL, assert_whole, backend, sampling, submit
from tests.support.constraints import CONSTRAINTS
from tests.support.in_process import Stack
from tests.support.lockstep import advance, advance_until_idle
from tests.support.mask_handles import LocalHandle, dies_once, local_client

DEADLY = "[ab]{3}[yz][ab]{9}"
SEGV, KILL = -signal.SIGSEGV, -signal.SIGKILL


def stack_of(num_runners: int = 1) -> Stack:
    stack = Stack()
    for _ in range(num_runners):
        stack.add_runner(backend())
    stack.step()
    return stack


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_frame(seed: int) -> None:
    """Kills both processes repeatedly, but not twice over the same frame, which would be attributed to it."""
    rng, spared = random.Random(seed), Counter[str]()

    def fate(role: str, channel: Channel, body: bytes) -> int | None:
        spared[role] -= 1
        if spared[role] > 0 or rng.random() > 0.4:
            return None
        spared[role] = 4  # two frames request a row; one of them opens its matcher
        return KILL

    stack = stack_of(num_runners=2)
    stack.fate = fate
    requests = []
    for index in range(10):
        kind, text = CONSTRAINTS[index % len(CONSTRAINTS)]
        fields = {"sampling": sampling(1.0, rng.choice([0, 4])), "n": rng.choice([1, 2])}
        requests.append(submit(stack, kind, text, seed=rng.randrange(1 << 60), max_tokens=25, **fields))
        advance(stack, rng.randrange(4))
    advance_until_idle(stack)
    assert_whole(requests)
    deaths = stack.engine.constraints.deaths
    assert deaths["masks"] > 3 and deaths["grammars"] > 0
    stack.assert_clean()


@pytest.mark.parametrize(("status", "deaths"), [(SEGV, 1), (-signal.SIGALRM, 1), (-signal.SIGABRT, 2), (1, 2)])
def test_a_grammar_that_breaks_the_library_is_refused(status: int, deaths: int) -> None:
    stack = stack_of()

    def fate(role: str, channel: Channel, body: bytes) -> int | None:
        return status if role == "grammars" and "deadly" in body.decode() else None

    stack.fate = fate
    bystander = submit(stack, "regex", "[ab]{12}")
    advance(stack, 3)
    bad = submit(stack, "json_schema", '{"const": "deadly"}', n=2)
    advance_until_idle(stack)
    assert_whole([bystander])
    assert bad.refused is not None and not bad.streams
    assert (bad.refused.code, bad.refused.field) == (
        grpc.StatusCode.INVALID_ARGUMENT.value[0],
        "constraint.json_schema",
    )
    assert stack.engine.constraints.deaths == {"grammars": deaths, "masks": 0}
    stack.assert_clean()


def test_a_process_that_was_killed_over_a_grammar_gets_one_more_try() -> None:
    stack = stack_of()
    stack.fate = dies_once("grammars")
    served = submit(stack, "regex", "[ab]{12}")
    advance_until_idle(stack)
    assert_whole([served])
    stack.fate = lambda role, channel, body: KILL if role == "grammars" else None
    bad = submit(stack, "regex", "a{3}")
    advance_until_idle(stack)
    assert bad.refused is not None and bad.refused.field == "constraint.regex"
    assert stack.engine.constraints.deaths == {"grammars": 3, "masks": 0}


def deadly_rows(stack: Stack, asked: bytes) -> bool:
    """Returns whether this frame advances a matcher by the letter z."""
    return any(ord("z") in tokens for tokens in MaskAsk.decode(asked).tokens)


def deadly_seed() -> int:
    """Returns a seed with which the text of DEADLY has a z."""
    for seed in range(100):
        trial = stack_of()
        request = submit(trial, "regex", DEADLY, seed=seed)
        advance_until_idle(trial)
        if ord("z") in request.streams[0].tokens:
            return seed
    raise AssertionError("no seed of 100 draws a z")


def test_a_row_that_ends_the_process_ends_alone() -> None:
    """After its first token: its client gets the tokens up to there, and the others in its plan continue."""
    stack = Stack()
    stack.add_runner(HashBackend(num_slots=8, block_size=4, num_blocks=96, max_step_tokens=32, context_length=256))
    stack.step()

    def fate(role: str, channel: Channel, body: bytes) -> int | None:
        return SEGV if role == "masks" and channel is Channel.MASKS and deadly_rows(stack, body) else None

    stack.fate = fate
    others = [submit(stack, "regex", "[ab]{12}", seed=seed) for seed in range(5)]
    bad = submit(stack, "regex", DEADLY, seed=deadly_seed())
    free = stack.submit([5], 20)
    advance_until_idle(stack)
    for request in (*others, free):
        assert request.streams[0].tokens == request.expected(0, 0.0)
    (stream,) = bad.streams
    assert stream.end is not None and stream.end.reason == FinishReason.ERROR
    assert "crashes the grammar library" in stream.end.message
    assert stream.tokens == bad.expected(0, 0.0)[:4] and stream.tokens[3] == ord("z")
    assert stack.engine.constraints.deaths["masks"] == 2, "once with the others, once in isolation"
    stack.assert_clean()


def test_a_row_that_ends_the_process_before_its_first_token_is_refused() -> None:
    stack = stack_of()
    first = submit(stack, "regex", "[ab]{12}")
    advance(stack, 3)
    deadly = 2  # the matcher of the second request

    def fate(role: str, channel: Channel, body: bytes) -> int | None:
        return SEGV if channel is Channel.MASKS and deadly in MaskAsk.decode(body).ids else None

    stack.fate = fate
    bad = submit(stack, "regex", "a{5}")
    advance_until_idle(stack)
    assert_whole([first])
    assert bad.refused is not None and bad.refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert bad.refused.field == "constraint.regex" and not bad.streams[0].tokens
    stack.assert_clean()


def test_a_death_that_only_happens_beside_others_ends_no_request() -> None:
    """All rows of a plan together may take too much; in isolation each of them gets its mask."""
    stack = stack_of()

    def fate(role: str, channel: Channel, body: bytes) -> int | None:
        return SEGV if channel is Channel.MASKS and len(MaskAsk.decode(body).ids) > 1 else None

    stack.fate = fate
    requests = [submit(stack, "regex", "[ab]{12}", seed=seed) for seed in range(3)]
    advance_until_idle(stack)
    assert_whole(requests)


def test_a_matcher_made_again_stands_where_it_was() -> None:
    """This includes the count that defers stop tokens, and drafts."""
    fates = [dies_once("masks", after) for after in (1, 4)]
    for fate in fates:
        calm, shaken = local_client(MODEL, 1), local_client(MODEL, 1, fate)
        outputs = []
        for client in (calm, shaken):
            grammar, _ = client.check("regex", "[ab]{2,9}", [])
            outputs.append(client.open(grammar, 2, 4, [257]))
        for tokens in ([97], [98], [97, 97], [98]):
            made = [
                client.make([AwaitedRow(row, output, tokens, [97, 98]) for row, output in enumerate(each)], forced=True)
                for client, each in zip((calm, shaken), outputs, strict=True)
            ]
            assert made[0].masks == made[1].masks and not made[1].failures
            assert (made[0].ahead, made[0].forced) == (made[1].ahead, made[1].forced)
        assert shaken.deaths["masks"] == 1


def test_a_grammar_that_ends_the_other_process_alone_is_refused_too() -> None:
    """It passed in the first process, which differs from this one by its other data."""
    client = local_client(MODEL, 1, lambda role, channel, body: SEGV if role == "masks" else None)
    grammar, _ = client.check("regex", "a", [])
    with pytest.raises(UnusableGrammar, match="crashes the grammar library"):
        client.open(grammar, 1, 0, [])
    assert json.loads(grammar)


def test_if_no_process_can_be_started_no_request_is_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests end UNAVAILABLE, new ones are refused with it, and both work again once a process starts."""
    stack = stack_of()
    running = submit(stack, "regex", "[ab]{12}")
    advance(stack, 3)
    told = len(running.streams[0].tokens)
    assert told

    def fails(handle: LocalHandle) -> int:
        raise MasksUnavailable("no mask process can be started")

    with monkeypatch.context() as patch:
        patch.setattr(LocalHandle, "start", fails)
        patch.setattr(LocalHandle, "running", 0)
        refused = submit(stack, "regex", "a")
        advance_until_idle(stack)
    end = running.streams[0].end
    assert end is not None and end.reason == FinishReason.UNAVAILABLE
    assert running.streams[0].tokens == running.expected(0, 0.0)[: len(running.streams[0].tokens)]
    assert refused.refused is not None and refused.refused.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert refused.refused.retry_after_ms and not refused.refused.field
    served = submit(stack, "regex", "[ab]{12}")
    advance_until_idle(stack)
    assert_whole([served])
    stack.assert_clean()


def test_memory_that_others_used_up_is_no_requests_fault() -> None:
    """A process dies at its tenth frame, whatever it is; a fresh process answers it."""
    asked = Counter[str]()

    def fate(role: str, channel: Channel, body: bytes) -> int | None:
        asked[role] += 1
        return -signal.SIGABRT if asked[role] % 10 == 0 else None

    stack = stack_of()
    stack.fate = fate
    requests = [submit(stack, "regex", f"[ab]{{{number + 1}}}") for number in range(25)]
    advance_until_idle(stack)
    assert_whole(requests)
    deaths = stack.engine.constraints.deaths
    assert deaths["grammars"] >= 2 and deaths["masks"] >= 2
