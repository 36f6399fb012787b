"""A new engine takes over the sequences of runners: every stream continues as if the old engine had never died."""

from __future__ import annotations

import copy
import random
import time
from itertools import product

import numpy as np
import pytest

from roster_protos import engine_pb2, plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.hash_backend import HashBackend, expected_tokens
from runner_svc.execution.runner import Runner
from runner_svc.interface.step import StepBatch, StepOutput
from scheduler_svc.failure.recovery import UnsoundSnapshot, read_snapshot
from scheduler_svc.model.sequence import FinishReason, Sequence
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.scheduler.scheduler_check import check_scheduler
from tests.support.in_process import Stack, Submitted
from tests.support.lockstep import advance, advance_until_idle
from tests.support.thoroughness import in_turn

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


@pytest.mark.parametrize(("sharing", "seed"), in_turn(product((False, True), range(12)), in_ci=10))
def test_streams_go_on_over_restarts_at_any_moment(seed: int, sharing: bool) -> None:
    """This includes tokens that were sampled but not sent, plans in flight, and choices that had ended or waited."""
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
    stack.step()  # a request that was never accepted must be sent again by its client
    for _ in range(5):
        for _ in range(rng.randrange(1, 40)):
            stack.turn(rng)
        stack.restart_scheduler()
        for scheduler in stack.engine.pool.schedulers.values():
            check_scheduler(scheduler)
    advance_until_idle(stack)
    assert_whole(requests)
    stack.assert_clean()


def test_what_runs_is_not_computed_again() -> None:
    stack = Stack()
    stack.add_runner(backend())
    request = stack.submit([1, 2, 3] * 20, 100, seed=3, sampling=sampling(1.0), no_speculation=True)
    advance(stack, 12)
    stack.restart_scheduler()
    advance(stack, 3)
    assert [known.speculates for known in stack.engine.requests.book.live()] == [False]
    advance_until_idle(stack)
    assert_whole([request])
    assert stack.engine.requests.totals.requests == 0, "it was sent again"
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


def test_no_client_attaches() -> None:
    """The request runs until its client's time to attach is over, then it is cancelled."""
    stack = Stack(attach_s=5.0)
    stack.add_runner(backend())
    stack.submit([1, 2, 3], 200, sampling=sampling(), seed=1)
    advance(stack, 3)
    stack.requests.clear()
    stack.restart_scheduler()
    assert stack.engine.requests.book.num_live == 1
    stack.now_s += 3.9
    stack.step()
    assert stack.engine.requests.book.num_live == 1
    stack.now_s += 0.2
    stack.step()
    assert stack.engine.requests.idle
    stack.assert_clean()


def test_time_goes_on() -> None:
    """Deadline and arrival keep their times."""
    stack = Stack()
    stack.add_runner(backend())
    stack.submit([1, 2, 3], 200, timeout_ms=60_000, keep_ms=7_000, tenant="t", priority=5, sampling=sampling())
    advance(stack, 3)
    (before,) = stack.engine.requests.book.live()
    before.arrival_unix_s = stack.wall_clock() - 20  # as if 20 s had passed since
    before.deadline_s = before.arrival_s + 60
    (sequence,) = before.sequences
    assert sequence.scheduler is not None
    sequence.scheduler.departures.preempt(sequence, stack.engine.requests.queue)
    advance(stack, 4)
    stack.restart_scheduler()
    (after,) = stack.engine.requests.book.live()
    assert after.arrival_s == pytest.approx(-20, abs=1)  # on the test's clock, which began at 0
    assert after.deadline_s == pytest.approx(40, abs=1)
    assert (after.tenant, after.priority, after.keep_s, after.digest) == ("t", 5, 7.0, before.digest)
    assert (after.seed, after.sampling, after.stop_ids, after.max_tokens) == (
        before.seed, before.sampling, before.stop_ids, before.max_tokens
    )  # fmt: skip


def test_a_runner_that_comes_later_is_not_computed_twice() -> None:
    """A request whose choices were on two runners is reassembled; the copy with fewer tokens is dropped."""
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


class Convoy:
    """A request with two choices on two one-slot runners, the second of which joins a new scheduler late."""

    def __init__(self, seed: int, **settings: object) -> None:
        self.stack = Stack(**settings)
        for _ in range(2):
            self.stack.add_runner(backend(slots=1))
        self.stack.step()
        self.request = self.stack.submit([5, 6, 7], 40, n=2, seed=seed, sampling=sampling(1.0))
        advance(self.stack, 2)
        sequences = self.stack.engine.requests.book.live()[0].sequences
        self.sessions = [self._session_of(sequence) for sequence in sequences]

    def _session_of(self, sequence: Sequence) -> int:
        (session,) = (key for key, value in self.stack.engine.pool.schedulers.items() if value is sequence.scheduler)
        return session

    def restart(self) -> Runner:
        """Starts a new scheduler with the first choice's runner only; returns the second's."""
        late = self.stack.runners.dismiss(self.sessions[1])
        assert late is not None
        self.stack.restart_scheduler()
        return late

    def arrives(self, late: Runner) -> None:
        self.stack.runners.connect(99, late, former=self.sessions[1], holds=True)
        self.stack.step()  # requests its snapshot
        self.stack.step()  # takes the snapshot


def test_a_sequence_placed_on_one_runner_is_not_resumed_on_another_too() -> None:
    """The late runner's sequence has been placed on a busy runner: it leaves that one's queue."""
    convoy = Convoy(seed=9)
    stack = convoy.stack
    stack.add_runner(backend(slots=2))
    neighbours = [stack.submit([1, 1, number], 50, seed=2) for number in range(2)]  # no stop tokens
    advance(stack, 3)
    late = convoy.restart()
    for _ in range(2):  # until it has the maximum number of plans in flight
        stack.step()
    stack.requests.pop(neighbours[0].handle)
    stack.front.put(cancel=engine_pb2.Cancel(handle=neighbours[0].handle))
    stack.step()
    assert stack.engine.placement.num_waiting == 1, "the case is not met"
    convoy.arrives(late)
    assert stack.engine.placement.num_waiting == 0
    advance_until_idle(stack)
    assert_whole([convoy.request, neighbours[1]])
    stack.assert_clean()


def test_tokens_sampled_after_an_end_are_not_sent() -> None:
    """The late runner has executed rows after a stop token; the choice has started again, and its client listens."""
    for seed in range(200):
        convoy = Convoy(seed, depth=3)
        expected = convoy.request.expected(1, EOS_PROBABILITY)
        if expected[-1] == IM_END_ID and 6 <= len(expected) <= 20:
            break
    stack, (_, session) = convoy.stack, convoy.sessions
    stream = convoy.request.streams[1]
    while len(stream.tokens) < len(expected) - 1:
        stack.step()
        stack.runners.execute(session)
        stack.runners.deliver(session)
    while stack.runners.execute(session):  # the end and the rows after it; no result is delivered
        pass
    late = convoy.restart()
    stack.step()
    assert len(late.snapshot().sequences[0].tokens) // 4 > 3 + len(expected), "the case is not met"
    convoy.arrives(late)
    assert stream.end is not None and stream.tokens == expected
    advance_until_idle(stack)
    assert_whole([convoy.request])
    stack.assert_clean()


class LosesPrecision(HashBackend):
    """A backend whose logits for one context are not finite."""

    def __init__(self, at_position: int) -> None:
        super().__init__(num_slots=4, block_size=4, num_blocks=64, context_length=256, eos_probability=0.0)
        self._at_position = at_position

    def step(self, batch: StepBatch) -> StepOutput:
        output = super().step(batch)
        failing = batch.starts + batch.counts > self._at_position
        output.fail(failing)
        output.statuses[failing] = plan_pb2.ROW_STATUS_NOT_FINITE
        return output


def test_a_sequence_that_failed_unheard_fails_again() -> None:
    """The old scheduler died before the status reached it. The new one must not wait for a row that never comes."""
    stack = Stack()
    stack.add_runner(LosesPrecision(at_position=8))
    request = stack.submit([1, 2, 3], 20, sampling=sampling())
    while len(request.streams[0].tokens if request.streams else []) < 5:
        advance(stack)
    stack.step()
    while stack.runners.execute(max(stack.runners.runners)):
        pass
    stack.restart_scheduler()
    advance_until_idle(stack)
    (stream,) = request.streams
    assert stream.end is not None and stream.end.reason == FinishReason.ERROR
    assert stream.tokens == expected_tokens([1, 2, 3], 20)[: len(stream.tokens)]
    stack.assert_clean()


def test_a_client_that_is_ahead_of_a_copy_that_is_lost() -> None:
    """It attached to a runner's stale copy, which is lost before it has caught up with the client. The client sends all
    its tokens, and the stream continues after them."""
    stack = Stack()
    session = stack.add_runner(backend())
    request = stack.submit([1, 2, 3], 40, seed=3, sampling=sampling(1.0))
    advance(stack, 4)
    stale = copy.deepcopy(stack.runners.runners[session])
    advance(stack, 3)
    stack.runners.dismiss(session)
    stack.runners.connect(50, stale)
    stack.restart_scheduler()
    stack.step()
    (stream,) = request.streams
    assert 0 < stream.at < len(stream.tokens), "the case is not met"
    stack.runners.dismiss(max(stack.runners.runners))
    stack.add_runner(backend())
    stack.restart_scheduler()
    advance_until_idle(stack)
    assert stack.engine.requests.totals.requests == 1, "it was not sent again"
    assert_whole([request])
    stack.assert_clean()


def test_an_id_that_was_used_again_is_the_later_request() -> None:
    """A runner that was unreachable still holds the request that the client has cancelled."""
    stack = Stack(no_runner_s=1e6)
    session = stack.add_runner(backend())
    former = stack.submit([1, 2, 3], 90, request_id="same", seed=3, sampling=sampling(1.0))
    advance(stack, 5)
    unreachable = stack.runners.kill(session)
    stack.front.put(cancel=engine_pb2.Cancel(handle=former.handle))
    stack.add_runner(backend())
    advance(stack, 2)
    later = stack.submit([4, 5, 6, 7], 90, request_id="same", seed=4, sampling=sampling(1.0))
    advance(stack, 5)
    second = stack.runners.dismiss(max(stack.runners.runners))
    assert second is not None
    stack.runners.connect(51, unreachable)
    stack.restart_scheduler()  # that runner is back, and is the first to send its snapshot
    stack.runners.connect(60, second, former=2, holds=True)
    advance_until_idle(stack)
    assert_whole([later])
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
    (request,) = stack.engine.requests.book.live()
    assert request.num_received == len(tokens) // 2
    advance_until_idle(stack)
    assert np.frombuffer(rest.submit.received, "<i4").tolist() + rest.streams[0].tokens == tokens


def test_ids_are_greater_than_those_of_a_scheduler_whose_clock_was_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two requests with one id, the one with the greater sequence ids is the later one."""
    stack = Stack()
    stack.add_runner(backend())
    request = stack.submit([1, 2, 3], 60, sampling=sampling(), seed=1)
    advance(stack, 3)
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() - 86_400 * 10**9)
    stack.restart_scheduler()
    later = stack.submit([4, 5], 5, sampling=sampling(), seed=2)
    advance_until_idle(stack)
    assert_whole([request, later])
    assert request.first_sequence_id is not None and later.first_sequence_id is not None
    assert later.first_sequence_id > request.first_sequence_id
