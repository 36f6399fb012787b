"""A new engine takes over what runners hold: every stream goes on as if the old one had never died."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from protos import engine_pb2, plan_pb2
from runner_svc.byte_tokenizer import IM_END_ID
from runner_svc.hash_model import HashBackend
from scheduler_svc.plan_draft import pack
from scheduler_svc.recovery import UnsoundSnapshot, read_snapshot
from scheduler_svc.roster_check import check_roster
from scheduler_svc.sequence import FinishReason
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


def sampling(temperature: float = 0.0) -> plan_pb2.Sampling:
    return plan_pb2.Sampling(temperature=temperature, top_p=1, repetition_penalty=1, stop_ids=pack([IM_END_ID]))


def assert_whole(requests: list[Submitted]) -> None:
    for request in requests:
        assert request.refused is None
        for index, stream in enumerate(request.streams):
            assert stream.end is not None and stream.tokens == request.expected(index, EOS_PROBABILITY)
            assert stream.end.reason in (FinishReason.STOP, FinishReason.LENGTH)


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_streams_go_on_over_restarts_at_any_moment(seed: int, sharing: bool) -> None:
    """Also what was sampled and never told, plans that were under way, choices that had ended or were waiting."""
    rng = random.Random(seed)
    stack = Stack(depth=rng.randrange(1, 4), prefix_sharing=sharing)
    for _ in range(rng.randrange(1, 3)):
        stack.add_runner(backend())
    stack.step()
    requests = [
        stack.submit(
            [rng.randrange(4) for _ in range(rng.randrange(1, 40))],
            rng.randrange(1, 60),
            n=rng.choice([1, 1, 3]),
            seed=rng.randrange(1 << 60),
            sampling=sampling(rng.choice([0.0, 1.0])),
        )
        for _ in range(12)
    ]
    stack.step()  # what was never accepted is the client's to send again
    for _ in range(5):
        for _ in range(rng.randrange(1, 40)):
            stack.turn(rng)
        stack.restart_scheduler()
        for scheduler in stack.engine.pool.schedulers.values():
            check_roster(scheduler)
    advance_until_idle(stack)
    assert_whole(requests)
    stack.assert_clean()


def test_what_runs_is_not_computed_again() -> None:
    stack = Stack()
    stack.add_runner(backend())
    request = stack.submit([1, 2, 3] * 20, 100, seed=3, sampling=sampling(1.0))
    advance(stack, 12)
    stack.restart_scheduler()
    advance_until_idle(stack)
    assert_whole([request])
    assert stack.engine.totals.requests == 0, "it was sent again"
    (scheduler,) = stack.engine.pool.schedulers.values()
    assert scheduler.prefill_tokens == 0


def test_prefixes_are_found_after_a_restart() -> None:
    stack = Stack(prefix_sharing=True)
    stack.add_runner(backend())
    first = stack.submit([1, 2, 3, 4] * 8, 60, sampling=sampling())
    advance(stack, 6)
    stack.restart_scheduler()
    second = stack.submit([1, 2, 3, 4] * 8, 10, sampling=sampling())
    advance(stack, 3)
    (scheduler,) = stack.engine.pool.schedulers.values()
    assert scheduler.cached_tokens == 28
    advance_until_idle(stack)
    assert_whole([first, second])


def test_nobody_attaches() -> None:
    """The request runs for the time that its client has to come back, then it is cancelled."""
    stack = Stack(attach_s=5.0)
    stack.add_runner(backend())
    stack.submit([1, 2, 3], 200, sampling=sampling(), seed=1)
    advance(stack, 3)
    stack.requests.clear()
    stack.restart_scheduler()
    assert stack.engine.book.num_live == 1
    stack.now_s += 3.9
    stack.step()
    assert stack.engine.book.num_live == 1
    stack.now_s += 0.2
    stack.step()
    assert stack.engine.idle
    stack.assert_clean()


def test_time_goes_on() -> None:
    """A deadline stays where it was, and the arrival too."""
    stack = Stack()
    stack.add_runner(backend())
    stack.submit([1, 2, 3], 200, timeout_ms=60_000, keep_ms=7_000, tenant="t", priority=5, sampling=sampling())
    advance(stack, 3)
    (before,) = stack.engine.book.live()
    before.arrival_unix_s = time.time() - 20  # as if 20 s had passed since
    before.deadline_s = before.arrival_s + 60
    (sequence,) = before.sequences
    assert sequence.scheduler is not None
    sequence.scheduler._preempt(sequence, stack.engine.queue)
    advance(stack, 4)
    stack.restart_scheduler()
    (after,) = stack.engine.book.live()
    assert after.arrival_s == pytest.approx(-20, abs=1)  # on the test's clock, which began at 0
    assert after.deadline_s == pytest.approx(40, abs=1)
    assert (after.tenant, after.priority, after.keep_s, after.digest) == ("t", 5, 7.0, before.digest)
    assert (after.seed, after.sampling, after.stop_ids, after.max_tokens) == (
        before.seed, before.sampling, before.stop_ids, before.max_tokens
    )  # fmt: skip


def test_a_runner_that_comes_later_is_not_computed_twice() -> None:
    """A request whose choices were on two runners is put together again; the copy that knows less is dropped."""
    stack = Stack()
    stack.add_runner(backend(slots=2))
    stack.add_runner(backend(slots=2))
    stack.step()
    request = stack.submit([5, 6, 7], 80, n=4, seed=9, sampling=sampling(1.0))
    advance(stack, 4)
    runners = dict(stack.runners.runners)
    assert all(scheduler.table.num_running == 2 for scheduler in stack.engine.pool.schedulers.values())
    late_session, late = list(runners.items())[1]
    stack.runners.dismiss(late_session)
    stack.restart_scheduler()
    advance(stack, 2)
    stack.runners.connect(99, late, former=late_session, holds=True)
    advance_until_idle(stack)
    assert_whole([request])
    stack.assert_clean()


def snapshot_of(**changes: object) -> plan_pb2.Snapshot:
    context = engine_pb2.SequenceContext(submit=engine_pb2.Submit(request_id="r", n=1, max_tokens=9))
    entry = {
        "slot": 1, "sequence_id": 7, "tokens": pack([1, 2, 3]), "prompt_len": 2, "computed": 2, "blocks": pack([4]),
        "context": context.SerializeToString(),
    }  # fmt: skip
    return plan_pb2.Snapshot(sequences=[plan_pb2.ResidentSequence(**{**entry, **changes})])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"slot": 4}, {"prompt_len": 0}, {"prompt_len": 4}, {"computed": 4}, {"computed": 3, "blocks": b""},
        {"blocks": pack([0])}, {"blocks": pack([65])}, {"context": b"\xff"}, {"context": b""},
    ],
)  # fmt: skip
def test_a_snapshot_that_can_not_be_is_refused(changes: dict[str, object]) -> None:
    hello = plan_pb2.Hello(num_slots=4, num_blocks=64, block_size=4)
    assert len(read_snapshot(snapshot_of(), hello)) == 1
    with pytest.raises(UnsoundSnapshot):
        read_snapshot(snapshot_of(**changes), hello)
    twice = plan_pb2.Snapshot(sequences=[*snapshot_of().sequences, *snapshot_of().sequences])
    with pytest.raises(UnsoundSnapshot):
        read_snapshot(twice, hello)


def test_received_tokens_stay_received() -> None:
    stack = Stack()
    stack.add_runner(backend())
    whole = stack.submit([8, 9], 60, seed=4, sampling=sampling(1.0))
    advance_until_idle(stack)
    tokens = whole.streams[0].tokens
    rest = stack.submit([8, 9], 60, seed=4, sampling=sampling(1.0), received=pack(tokens[: len(tokens) // 2]))
    advance(stack, 4)
    stack.restart_scheduler()
    (request,) = stack.engine.book.live()
    assert request.num_received == len(tokens) // 2
    advance_until_idle(stack)
    assert np.frombuffer(rest.submit.received, "<i4").tolist() + rest.streams[0].tokens == tokens
