"""An ill runner harms no request; a request that ends runners is still found; and both are told what happened."""

from __future__ import annotations

from itertools import pairwise

import grpc
import numpy as np
import pytest

from protos import engine_pb2, plan_pb2
from runner_svc.backend import StepBatch, StepOutput
from runner_svc.hash_model import HashBackend
from runner_svc.runner import Runner
from scheduler_svc.failure.probation import Probation
from scheduler_svc.failure.runner_illness import HELD_FROM
from scheduler_svc.failure.suspicion import LONE_LOSSES, PARDONS, STRIKES
from scheduler_svc.link.runner_events import Loss
from scheduler_svc.metrics.snapshot import take_snapshot
from scheduler_svc.operation.status import model_state, status
from scheduler_svc.sequence import FinishReason
from tests.support.in_process import Stack, Submitted
from tests.support.thoroughness import count

INTERNAL = grpc.StatusCode.INTERNAL.value[0]
FATAL = 99
"""Token that no runner here survives where a test says so."""


class Hospital:
    """Runners by name, in one process on the stack's clock; what each does with its next plan is the test's to say."""

    def __init__(self, *names: str, **settings: object) -> None:
        self.stack = Stack(**settings)
        self.engine = self.stack.engine
        self.sessions: dict[str, int] = {}
        self.ill: dict[str, Loss] = {}
        """Runners that lose whatever they are sent."""
        self.fatal: Loss | None = None
        """What a plan with `FATAL` in it does to each runner."""
        self.losses: list[str] = []
        self._num_sessions = 0
        for name in names:
            self.connect(name)
        self.stack.step()

    def connect(self, name: str, former: int = 0, block_size: int = 4) -> None:
        self._num_sessions += 1
        self.sessions[name] = self._num_sessions
        backend = HashBackend(num_slots=4, block_size=block_size, num_blocks=64, context_length=128, eos_probability=0)
        self.stack.runners.connect(self._num_sessions, Runner(backend, name), former)

    def lose(self, name: str, loss: Loss) -> None:
        """The runner is lost, and back at once as a new process."""
        self.losses.append(name)
        self.stack.runners.kill(self.sessions[name], loss)
        self.connect(name)

    def turn(self) -> None:
        """Each runner does one plan; a hundredth of a second passes."""
        self.stack.step()
        for name, session in list(self.sessions.items()):
            plans = self.stack.runners.plans.get(session)
            if not plans:
                continue
            is_fatal = any(FATAL in column(one.tokens) for one in plans[0][1].admissions)
            loss = self.ill.get(name) or (self.fatal if is_fatal else None)
            if loss is not None:
                self.lose(name, loss)
            else:
                self.stack.runners.execute(session)
                self.stack.runners.deliver(session)
        self.stack.now_s += 0.01

    def turns(self, seconds: float) -> None:
        until_s = self.stack.now_s + seconds
        while self.stack.now_s < until_s:
            self.turn()

    def run(self, most_s: float = 300.0) -> None:
        until_s = self.stack.now_s + most_s
        while not self.engine.idle or self.stack.front.commands:
            assert self.stack.now_s < until_s, "it never ends"
            self.turn()
        self.stack.step()

    def submit(self, number: int = 0, tokens: int = 6, **fields: object) -> Submitted:
        return self.stack.submit([number % 70, 3, 5], tokens, **fields)

    def fatal_request(self) -> Submitted:
        return self.stack.submit([1, FATAL, 2], 8)


def column(packed: bytes) -> set[int]:
    return set(memoryview(packed).cast("i").tolist())


def served(*requests: Submitted) -> bool:
    return all(r.refused is None and r.streams[0].tokens == r.expected(0, 0.0) for r in requests)


# ---------------------------------------------------------------------- an ill runner among others


def test_of_two_thousand_requests_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `python -m bench.trust --only ill_runner` measures; and without probation it would be far from it."""
    from bench.trust.lines.ill_runner import ILLNESSES, serve

    requests = count(2000, in_ci=100)
    healthy = serve(requests, None)
    assert not healthy.failed and not healthy.losses
    for illness in ILLNESSES:
        outcome = serve(requests, illness)
        assert not outcome.failed and outcome.losses >= 1
        assert outcome.tokens_per_s >= 0.9 * healthy.tokens_per_s, illness
    monkeypatch.setattr(Probation, "takes", lambda self, session, hello: False)
    outcome = serve(100, ILLNESSES[0])
    assert outcome.losses > 20 and outcome.tokens_per_s < 0.7 * healthy.tokens_per_s


@pytest.mark.parametrize("loss", [Loss.FAULT, Loss.GONE, Loss.HUNG, Loss.SILENT, Loss.UNSOUND, Loss.MEMORY])
def test_an_ill_runner_gets_no_work_and_no_trial(loss: Loss) -> None:
    hospital = Hospital("a", "b", "ill")
    hospital.ill["ill"] = loss
    requests = [hospital.submit(number, 20) for number in range(30)]
    hospital.run()
    assert served(*requests)
    assert set(hospital.losses) == {"ill"} and len(hospital.losses) < 8
    assert not hospital.engine.quarantine.active
    assert hospital.engine.totals.recomputed <= 4, "the requests of its first plan, once"


def test_who_is_held_back_is_told_and_serves_again_when_it_is_well() -> None:
    hospital = Hospital("a", "ill")
    hospital.ill["ill"] = Loss.FAULT
    requests = [hospital.submit(number) for number in range(8)]
    hospital.turns(4.0)
    assert served(*requests)
    (ill,) = status(hospital.engine).held_back
    assert (ill.id, ill.present, ill.reason) == ("ill", True, "killed by the test")
    assert ill.losses >= HELD_FROM and 0 < ill.next_probe_s <= 4
    assert [runner.id for runner in status(hospital.engine).runners] == ["a"]
    assert [one.id for one in take_snapshot(hospital.engine).status.held_back] == ["ill"]
    del hospital.ill["ill"]
    hospital.turns(8.0)
    assert not status(hospital.engine).held_back
    assert {runner.id for runner in status(hospital.engine).runners} == {"a", "ill"}
    requests = [hospital.submit(number) for number in range(8)]
    hospital.run()
    assert served(*requests)
    hospital.lose("ill", Loss.GONE)
    hospital.turn()
    assert hospital.engine.probation.illness.of("ill") is None, "what it has finished since ended the row"


def test_a_runner_that_computes_probes_only_is_held_back_too() -> None:
    """Each real plan is lost: the row goes on, whatever probes come back in between."""
    hospital = Hospital("a", "ill")
    losses_s: list[float] = []
    requests = [hospital.submit(number, 90) for number in range(18)]
    while not hospital.engine.idle or hospital.stack.front.commands:
        session = hospital.sessions["ill"]
        plans = hospital.stack.runners.plans.get(session)
        if plans and not any(not one.sequence_id for one in plans[0][1].admissions) and plans[0][1].extent_slots:
            hospital.lose("ill", Loss.FAULT)
            losses_s.append(hospital.stack.now_s)
        hospital.turn()
        assert hospital.stack.now_s < 200
    hospital.stack.step()
    assert served(*requests)
    gaps = [later - earlier for earlier, later in pairwise(losses_s)]
    assert len(gaps) >= 3 and all(gap >= 0.5 * 2**place for place, gap in enumerate(gaps[1:]))


def test_an_ill_machine_with_a_new_name_each_time_harms_nobody() -> None:
    """As the pods of a Deployment: what comes while plans are being lost is probed before it gets any."""

    class Deployment(Hospital):
        def lose(self, name: str, loss: Loss) -> None:
            super().lose(name, loss)
            if name.startswith("ill"):
                self.stack.runners.kill(self.sessions.pop(name), Loss.GONE)
                self.connect(anew := f"ill-{len(self.losses)}")
                self.ill[anew] = loss

    hospital = Deployment("a", "ill-0")
    hospital.ill["ill-0"] = Loss.GONE
    requests = [hospital.submit(number, 20) for number in range(20)]
    hospital.run()
    assert served(*requests)
    assert hospital.engine.totals.recomputed <= 4 and len(hospital.losses) > 9
    assert hospital.engine.totals.refused == 0


class NotANumber(HashBackend):
    """Its logits are not finite: none of them, or (`picky`) those of sequences with the token `FATAL`."""

    def __init__(self, picky: bool) -> None:
        super().__init__(num_slots=4, block_size=4, num_blocks=64, context_length=128, eos_probability=0)
        self._picky = picky

    def step(self, batch: StepBatch) -> StepOutput:
        output = super().step(batch)
        failing = batch.sample.copy()
        if self._picky:
            failing &= np.array([FATAL in state.tokens[: state.prompt_len] for state in batch.states])
        output.fail(failing)
        output.statuses[failing] = plan_pb2.ROW_STATUS_NOT_FINITE
        return output


class Arithmetic(Hospital):
    """Runners that answer; of some it is worth nothing."""

    def __init__(self, *names: str, broken: set[str], picky: bool = False) -> None:
        self.broken, self.picky = broken, picky
        super().__init__(*names)

    def connect(self, name: str, former: int = 0, block_size: int = 4) -> None:
        super().connect(name, former, block_size)
        if name in self.broken:
            session = self.sessions[name]
            self.stack.runners.runners[session] = Runner(NotANumber(self.picky), name)
            self.stack.runners.garbled.add(session)

    def turn(self) -> None:
        super().turn()
        for name in self.broken:
            if self.sessions[name] not in self.stack.runners.runners:
                self.losses.append(name)
                self.connect(name, self.sessions[name])


@pytest.mark.parametrize("at_once", [True, False])
def test_a_runner_whose_answers_are_not_finite_is_ill(at_once: bool) -> None:
    """Also where each request is alone in its step, and might be to blame itself."""
    hospital = Arithmetic("nan", "a", "b", broken={"nan"})
    requests = []
    for number in range(20):
        requests.append(hospital.submit(number, 12))
        if not at_once:
            hospital.run()
    hospital.run()
    assert served(*requests)
    assert 0 < len(hospital.losses) < 9
    hospital.turns(3.0)
    assert [runner.id for runner in status(hospital.engine).held_back] == ["nan"]


@pytest.mark.parametrize("runners", [1, 2])
@pytest.mark.parametrize("number", [1, 3])
def test_requests_whose_answers_are_finite_nowhere_end_with_an_error(number: int, runners: int) -> None:
    """Not with INTERNAL: the runner survives one that is alone, once that had a second opinion."""
    names = ("a", "b")[:runners]
    hospital = Arithmetic(*names, broken=set(names), picky=True)
    fatal = [hospital.fatal_request() for _ in range(number)]
    hospital.turns(0.5)
    beside = [hospital.submit(count) for count in range(6)]
    hospital.run()
    for request in fatal:
        (stream,) = request.streams
        assert request.refused is None and stream.end is not None and stream.end.reason == FinishReason.ERROR
        assert stream.end.message == "the model's logits were not finite"
    assert served(*beside)
    assert len(hospital.losses) <= STRIKES + number
    hospital.stack.assert_clean()


# ---------------------------------------------------------------------- one runner alone


@pytest.mark.parametrize("loss", [Loss.FAULT, Loss.GONE, Loss.SILENT, Loss.MEMORY])
def test_the_only_runner_is_ill_and_nobody_is_accused(loss: Loss) -> None:
    """Requests wait, readiness is gone, and both are back with the runner."""
    hospital = Hospital("ill")
    hospital.ill["ill"] = loss
    requests = [hospital.submit(number) for number in range(6)]
    late = hospital.submit(9, timeout_ms=2000)
    hospital.turns(20.0)
    assert not model_state(hospital.engine).model.ready and not hospital.engine.pool.progress(hospital.stack.now_s)
    assert late.streams[0].end is not None and late.streams[0].end.reason == FinishReason.DEADLINE
    assert all(request.refused is None and request.streams[0].end is None for request in requests)
    assert all(not live.suspicion.strikes for live in hospital.engine.book.live())
    assert len(hospital.losses) < 9
    del hospital.ill["ill"]
    hospital.run(40.0)
    assert served(*requests)
    assert model_state(hospital.engine).model.ready and hospital.engine.pool.progress(hospital.stack.now_s)
    hospital.stack.assert_clean()


def test_streams_end_in_time_where_all_runners_stay_ill() -> None:
    hospital = Hospital("ill", no_runner_s=20)
    hospital.ill["ill"] = Loss.FAULT
    request = hospital.submit()
    hospital.run(40.0)
    (stream,) = request.streams
    assert stream.end is not None and stream.end.reason == FinishReason.UNAVAILABLE
    assert stream.end.message == "the runners that are there lose every plan"


@pytest.mark.parametrize("neighbours", [0, 12])
@pytest.mark.parametrize("loss", [Loss.FAULT, Loss.GONE])
def test_one_runner_suffices_to_find_a_request_that_ends_it(loss: Loss, neighbours: int) -> None:
    """Where others wait they are computed between its trials; else the probe is."""
    hospital = Hospital("only")
    hospital.fatal = loss
    beside = [hospital.submit(number) for number in range(neighbours)]
    fatal = hospital.fatal_request()
    hospital.run(60.0)
    assert fatal.refused is not None and fatal.refused.code == INTERNAL
    assert served(*beside)
    assert len(hospital.losses) <= STRIKES + LONE_LOSSES + 2
    assert hospital.engine.probation.illness.of("only") is None, "its losses are explained"
    assert not status(hospital.engine).held_back
    hospital.stack.assert_clean()


def test_two_that_end_the_only_runner_do_not_shield_each_other() -> None:
    hospital = Hospital("only")
    hospital.fatal = Loss.FAULT
    fatal = [hospital.fatal_request(), hospital.fatal_request()]
    hospital.run(120.0)
    assert all(request.refused is not None and request.refused.code == INTERNAL for request in fatal)
    assert len(hospital.losses) <= STRIKES + 2 * LONE_LOSSES + 2


def test_two_runners_are_both_tried() -> None:
    """A conviction needs both, though one of them is emptier each time."""
    hospital = Hospital("a", "b")
    hospital.fatal = Loss.FAULT
    long = [hospital.submit(number, 60) for number in range(3)]
    fatal = hospital.fatal_request()
    while fatal.refused is None:
        hospital.turn()
    assert sorted(hospital.losses[-2:]) == ["a", "b"]
    hospital.run()
    assert served(*long)


def test_a_request_alone_with_a_lack_of_memory_waits_for_its_deadline() -> None:
    """The probe needs none: that it comes back proves nothing against the request."""
    hospital = Hospital("only")
    hospital.fatal = Loss.MEMORY
    request = hospital.stack.submit([1, FATAL, 2], 8, timeout_ms=100_000)
    hospital.run(150.0)
    assert request.refused is None and request.streams[0].end is not None
    assert request.streams[0].end.reason == FinishReason.DEADLINE
    assert len(hospital.losses) <= PARDONS + STRIKES + 8, "held back for longer each time"


def test_a_lack_of_memory_that_others_do_not_have_convicts() -> None:
    """The same, but others come: those are computed, between two losses of this one alone."""
    hospital = Hospital("only")
    hospital.fatal = Loss.MEMORY
    request = hospital.stack.submit([1, FATAL, 2], 8)
    beside = []
    for number in range(150):
        hospital.turns(1.0)
        beside.append(hospital.submit(number))
        if request.refused is not None:
            break
    assert request.refused is not None and request.refused.code == INTERNAL
    assert "ran out of memory" in request.refused.message
    hospital.run()
    assert served(*beside)


# ---------------------------------------------------------------------- what happened, in words


WORDS = {
    Loss.GONE: "the process that computed it ended, or its connection broke",
    Loss.SILENT: "fell silent",
    Loss.HUNG: "did not end its step in time",
    Loss.FAULT: "answered with a fault",
    Loss.MEMORY: "ran out of memory",
    Loss.REPLACED: "replaced by a new one",
    Loss.UNSOUND: "answered what can't be",
}


@pytest.mark.parametrize("loss", [loss for loss in Loss if loss is not Loss.LEFT])
def test_a_refusal_says_what_happened(loss: Loss) -> None:
    hospital = Hospital("a", "b", "c")
    hospital.fatal = loss
    request = hospital.fatal_request()
    hospital.run(120.0)
    assert request.refused is not None and request.refused.code == INTERNAL
    assert WORDS[loss] in request.refused.message
    assert not any(words in request.refused.message for other, words in WORDS.items() if other is not loss)


def test_a_refusal_says_both_things_that_happened() -> None:
    hospital = Hospital("a", "b", "c")
    request = hospital.fatal_request()
    while request.refused is None:
        hospital.fatal = Loss.FAULT if len(hospital.losses) < STRIKES + LONE_LOSSES - 1 else Loss.HUNG
        hospital.turn()
    assert WORDS[Loss.FAULT] in request.refused.message and WORDS[Loss.HUNG] in request.refused.message


@pytest.mark.parametrize(
    "reason",
    [
        "plan 3 failed in the backend: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
        "total capacity of 79.1 GiB of which 1.2 GiB is free. Process 4321 has 60.0 GiB memory in use.",
        "plan 3 failed in the backend: _ArrayMemoryError: Unable to allocate 8.00 GiB for an array",
        "plan 3 failed in the backend: RuntimeError: [enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 34359738368 bytes.",
        "plan 3 failed in the backend: AcceleratorError: CUDA error: out of memory",
        "plan 3 failed in the backend: RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
        "plan 3 failed in the backend: DriverError: CUDA_ERROR_OUT_OF_MEMORY",
    ],
)
def test_a_lack_of_memory_is_told_by_the_fault(reason: str) -> None:
    assert Loss.of_fault(reason) is Loss.MEMORY


@pytest.mark.parametrize(
    "reason", ["plan 2 can't follow plan 0", "KeyError: 'memory'", "RuntimeError: an illegal memory access"]
)
def test_other_faults_are_no_lack_of_memory(reason: str) -> None:
    assert Loss.of_fault(reason) is Loss.FAULT


# ---------------------------------------------------------------------- the probe


def on_probation(**settings: object) -> Hospital:
    """One runner that has lost a plan and is back; the probe is under way, and one request waits."""
    hospital = Hospital("only", **settings)
    hospital.submit()
    hospital.stack.step()
    hospital.lose("only", Loss.FAULT)
    hospital.stack.step()
    assert hospital.engine.probation.active and not hospital.engine.pool.schedulers
    return hospital


def test_a_probe_is_in_no_count() -> None:
    hospital = on_probation()
    engine, totals = hospital.engine, hospital.engine.totals
    before = (totals.plans, totals.sampled_tokens, totals.prefill_tokens, totals.requests, totals.finished)
    (plan,) = hospital.stack.runners.plans[hospital.sessions["only"]]
    assert plan[0] == 1 and len(plan[1].admissions) == 1
    assert engine.book.num_live == 1 and len(engine.queue) == 1
    hospital.stack.runners.execute(hospital.sessions["only"])
    hospital.stack.runners.deliver(hospital.sessions["only"])
    hospital.stack.step()
    assert engine.pool.schedulers and not engine.probation.active
    engine.measurements.count()
    assert engine.measurements.step_s.state().total == 0 and not engine.measurements.ends
    sent = sum(number > 2 for number, _ in hospital.stack.runners.plans[hospital.sessions["only"]])
    after = (totals.plans - sent, totals.sampled_tokens, totals.prefill_tokens, totals.requests, totals.finished)
    assert sent and after == before, "only the request's own plans, which left in the same turn"
    hospital.run()
    (request,) = hospital.stack.requests.values()
    assert served(request) and not hospital.stack.others
    (runner,) = hospital.stack.runners.runners.values()
    assert all(one.sequence_id for one in runner.snapshot().sequences)
    hospital.stack.assert_clean()


@pytest.mark.parametrize(
    "result",
    [
        plan_pb2.Result(),
        plan_pb2.Result(statuses=b"\1", token_counts=b"\0"),
        plan_pb2.Result(statuses=b"\0", token_counts=b"\1"),
        plan_pb2.Result(statuses=b"\0\0", token_counts=b"\1\1", tokens=bytes(8)),
    ],
)
def test_a_probe_without_a_token_is_lost(result: plan_pb2.Result) -> None:
    """Not a number, say: the runner computes, and what comes of it is worth nothing."""
    hospital = on_probation()
    runners, session = hospital.stack.runners, hospital.sessions["only"]
    runners.execute(session)
    runners.garbled.add(session)
    runners.results[session][0].result.CopyFrom(result)
    runners.deliver(session)
    hospital.stack.step()
    hospital.stack.step()
    assert not hospital.engine.pool.schedulers and hospital.engine.probation.illness.is_held("only")
    hospital.connect("only", former=session)
    hospital.run()
    assert served(*hospital.stack.requests.values())


def test_a_scheduler_that_dies_during_a_probe_leaves_nothing_on_the_runner() -> None:
    hospital = on_probation()
    hospital.stack.runners.execute(hospital.sessions["only"])
    (runner,) = hospital.stack.runners.runners.values()
    assert [one.sequence_id for one in runner.snapshot().sequences] == [0]
    hospital.stack.restart_scheduler()
    hospital.engine = hospital.stack.engine
    (hospital.sessions["only"],) = hospital.stack.runners.runners
    hospital.run()
    assert served(*hospital.stack.requests.values())
    assert hospital.engine.totals.adopted == 0
    hospital.stack.assert_clean()


def test_a_runner_may_leave_while_it_is_probed() -> None:
    hospital = on_probation()
    hospital.stack.runners.leave(hospital.sessions["only"])
    hospital.stack.step()
    assert not hospital.engine.probation.active and not hospital.stack.runners.runners
    assert hospital.engine.probation.illness.of("only") is not None, "it left; it has not recovered"
    hospital.connect("only")
    hospital.run()
    assert served(*hospital.stack.requests.values())


def test_a_runner_that_goes_while_it_is_held_loses_nothing_more() -> None:
    hospital = Hospital("only")
    hospital.ill["only"] = Loss.FAULT
    hospital.submit()
    hospital.turns(0.2)
    (before,) = status(hospital.engine).held_back
    hospital.stack.runners.kill(hospital.sessions["only"], Loss.GONE)
    hospital.stack.step()
    (after,) = status(hospital.engine).held_back
    assert after.losses == before.losses and before.present and not after.present


def test_a_cancelled_request_leaves_the_probe_alone() -> None:
    hospital = on_probation()
    hospital.stack.front.put(cancel=engine_pb2.Cancel(handle=1))
    hospital.run()
    hospital.turns(0.1)
    assert list(hospital.engine.pool.schedulers) == [hospital.sessions["only"]]
    hospital.stack.assert_clean()


def test_who_comes_back_must_fit_those_that_came_meanwhile() -> None:
    """Both are welcome while nobody serves; the first that has computed its probe decides."""
    hospital = on_probation()
    hospital.connect("other", block_size=8)
    hospital.stack.step()
    assert not hospital.engine.pool.schedulers
    session = hospital.sessions["other"]
    hospital.stack.runners.execute(session)
    hospital.stack.runners.deliver(session)
    hospital.run()
    assert list(hospital.engine.pool.schedulers) == [session]
    assert "start all with the same block_size" in hospital.stack.runners.rejected[hospital.sessions["only"]]
    assert served(*hospital.stack.requests.values())
