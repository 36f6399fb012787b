"""A faulty runner harms no request: it is held back and probed, and serves again once it works."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from roster_protos import engine_pb2, plan_pb2
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.execution.runner import Runner
from runner_svc.interface.step import StepBatch, StepOutput
from scheduler_svc.failure.probation import Probation
from scheduler_svc.failure.runner_illness import HELD_FROM
from scheduler_svc.link.runner_events import Loss
from scheduler_svc.model.sequence import FinishReason
from scheduler_svc.model.suspicion import STRIKES
from tests.support.hospital import FATAL, Hospital, served
from tests.support.thoroughness import count

# ---------------------------------------------------------------------- a faulty runner among others


def test_of_two_thousand_requests_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m bench.trust --only ill_runner` measures the same. Without probation it would be far off."""
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
def test_a_faulty_runner_gets_no_work_and_no_isolation(loss: Loss) -> None:
    hospital = Hospital("a", "b", "ill")
    hospital.ill["ill"] = loss
    requests = [hospital.submit(number, 20) for number in range(30)]
    hospital.run()
    assert served(*requests)
    assert set(hospital.losses) == {"ill"} and len(hospital.losses) < 8
    assert not hospital.engine.quarantine.active
    assert hospital.engine.requests.totals.recomputed <= 4, "only the requests of its first plan, once"


def test_a_held_back_runner_is_reported_and_serves_again_once_it_works() -> None:
    hospital = Hospital("a", "ill")
    hospital.ill["ill"] = Loss.FAULT
    requests = [hospital.submit(number) for number in range(8)]
    hospital.turns(4.0)
    assert served(*requests)
    (ill,) = hospital.engine.reports.status().held_back
    assert (ill.id, ill.present, ill.reason) == ("ill", True, "killed by the test")
    assert ill.losses >= HELD_FROM and 0 < ill.next_probe_s <= 4
    assert [runner.id for runner in hospital.engine.reports.status().runners] == ["a"]
    assert [one.id for one in hospital.engine.snapshots.take_snapshot().status.held_back] == ["ill"]
    del hospital.ill["ill"]
    hospital.turns(8.0)
    assert not hospital.engine.reports.status().held_back
    assert {runner.id for runner in hospital.engine.reports.status().runners} == {"a", "ill"}
    requests = [hospital.submit(number) for number in range(8)]
    hospital.run()
    assert served(*requests)
    hospital.lose("ill", Loss.GONE)
    hospital.turn()
    assert hospital.engine.probation.illness.of("ill") is None, "a plan that it finished resets its losses"


def test_a_runner_that_computes_probes_only_is_held_back_too() -> None:
    """Each plan of requests is lost: passed probes in between do not reset the count."""
    hospital = Hospital("a", "ill")
    losses_s: list[float] = []
    requests = [hospital.submit(number, 90) for number in range(18)]
    while not hospital.engine.requests.idle or hospital.stack.front.commands:
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


def test_a_faulty_machine_with_a_new_name_each_time_harms_no_request() -> None:
    """Like the pods of a Deployment: a runner that joins while plans are being lost is probed first."""

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
    assert hospital.engine.requests.totals.recomputed <= 4 and len(hospital.losses) > 9
    assert hospital.engine.requests.totals.refused == 0


class NotANumber(HashBackend):
    """A backend with non-finite logits: all of them, or (`picky`) those of sequences with the token `FATAL`."""

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
    """Runners that answer; the results of those in `broken` are not finite."""

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
def test_a_runner_whose_answers_are_not_finite_is_faulty(at_once: bool) -> None:
    """Also if each request is alone in its step, and might have caused it itself."""
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
    assert [runner.id for runner in hospital.engine.reports.status().held_back] == ["nan"]


@pytest.mark.parametrize("runners", [1, 2])
@pytest.mark.parametrize("number", [1, 3])
def test_requests_whose_answers_are_finite_nowhere_end_with_an_error(number: int, runners: int) -> None:
    """Not with INTERNAL: once a request alone in its step has failed on two runners, it ends and the second stays."""
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


# ---------------------------------------------------------------------- the probe


def on_probation(**settings: object) -> Hospital:
    """Returns one runner that has lost a plan and is back; its probe is in flight, and one request waits."""
    hospital = Hospital("only", **settings)
    hospital.submit()
    hospital.stack.step()
    hospital.lose("only", Loss.FAULT)
    hospital.stack.step()
    assert hospital.engine.probation.active and not hospital.engine.pool.schedulers
    return hospital


def test_a_probe_is_in_no_count() -> None:
    hospital = on_probation()
    engine, totals = hospital.engine, hospital.engine.requests.totals
    before = (totals.plans, totals.sampled_tokens, totals.prefill_tokens, totals.requests, totals.finished)
    (plan,) = hospital.stack.runners.plans[hospital.sessions["only"]]
    assert plan[0] == 1 and len(plan[1].admissions) == 1
    assert engine.requests.book.num_live == 1 and len(engine.requests.queue) == 1
    hospital.stack.runners.execute(hospital.sessions["only"])
    hospital.stack.runners.deliver(hospital.sessions["only"])
    hospital.stack.step()
    assert engine.pool.schedulers and not engine.probation.active
    engine.requests.measurements.count()
    assert engine.requests.measurements.step_s.state().total == 0 and not engine.requests.measurements.ends
    sent = sum(number > 2 for number, _ in hospital.stack.runners.plans[hospital.sessions["only"]])
    after = (totals.plans - sent, totals.sampled_tokens, totals.prefill_tokens, totals.requests, totals.finished)
    assert sent and after == before, "only the request's own plans, which were sent in the same turn"
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
    """For example, if the logits are not finite: the runner computes, but its result is useless."""
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
    assert hospital.engine.requests.totals.adopted == 0
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
    (before,) = hospital.engine.reports.status().held_back
    hospital.stack.runners.kill(hospital.sessions["only"], Loss.GONE)
    hospital.stack.step()
    (after,) = hospital.engine.reports.status().held_back
    assert after.losses == before.losses and before.present and not after.present


def test_a_cancelled_request_leaves_the_probe_alone() -> None:
    hospital = on_probation()
    hospital.stack.front.put(cancel=engine_pb2.Cancel(handle=1))
    hospital.run()
    hospital.turns(0.1)
    assert list(hospital.engine.pool.schedulers) == [hospital.sessions["only"]]
    hospital.stack.assert_clean()


def test_a_returning_runner_must_fit_those_that_joined_meanwhile() -> None:
    """Both are welcome while no runner serves; the first that passes its probe decides."""
    hospital = on_probation()
    hospital.connect("other", block_size=8)
    hospital.stack.step()
    assert not hospital.engine.pool.schedulers
    session = hospital.sessions["other"]
    hospital.stack.runners.execute(session)
    hospital.stack.runners.deliver(session)
    hospital.run()
    assert list(hospital.engine.pool.schedulers) == [session]
    assert "start all with the same --block-size" in hospital.stack.runners.rejected[hospital.sessions["only"]]
    assert served(*hospital.stack.requests.values())
