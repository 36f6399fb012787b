"""A fast-forward gives exactly the same outcome as its turns taken one by one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from roster_protos import engine_pb2, plan_pb2
from scheduler_svc.engine.engine import Engine
from scheduler_svc.model.intake import build_request
from scheduler_svc.model.sequence import FinishReason
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.policy import StepReport
from scheduler_svc.simulator.fast_forward import FastForward, possible_fast_forward
from scheduler_svc.simulator.simulated_front import SimulatedFront
from scheduler_svc.simulator.simulation import Setup, Simulation
from scheduler_svc.simulator.trace import Trace, TraceRequest
from tests.support.random_traces import random_trace
from tests.support.simulated_cost import round_cost
from tests.support.thoroughness import choice, count

OBJECTS = ("tree", "order")
"""Parts of a pool that are compared by identity; only a retention policy uses them."""


class Recorded(Simulation):
    """A simulation that records its engine's output, with ids counted from the first one."""

    def __init__(self, trace: Trace, setup: Setup) -> None:
        super().__init__(trace, setup)
        self.plans: dict[int, bytes] = {}
        self.told: list[tuple[Any, ...]] = []
        self.turns_skipped = 0
        self.reports: list[tuple[Any, ...]] = []
        self._send_plan, self._send = self.runners.send_plan, self.front.send
        self._runners_fast_forward = self.runners.fast_forward
        self._observe = self.engine.policy.observe
        self.runners.send_plan = self._note_plan  # type: ignore[method-assign]
        self.runners.fast_forward = self._note_fast_forward  # type: ignore[method-assign]
        self.front.send = self._note_message  # type: ignore[method-assign]
        self.engine.policy.observe = self._note_report  # type: ignore[method-assign]

    def _note_plan(self, session: int, number: int, plan: plan_pb2.Plan) -> None:
        self._send_plan(session, number, plan)
        copy = plan_pb2.Plan.FromString(plan.SerializeToString())
        for admission in copy.admissions:
            admission.sequence_id, admission.context = 0, b""
        self.plans[number] = copy.SerializeToString()

    def _note_fast_forward(self, chance: FastForward, until_at: float, scheduler_s: float) -> list[float]:
        times_s = self._runners_fast_forward(chance, until_at, scheduler_s)
        self.turns_skipped += len(times_s)
        return times_s

    def _note_message(self, worker: bytes, message: engine_pb2.FromEngine) -> bool:
        ids = np.frombuffer(message.step.sequence_ids, np.uint64) - self.first_id
        ends = [(end.sequence_id - self.first_id, end.reason, end.num_tokens, end.queue_s) for end in message.step.ends]
        self.told.append((message.WhichOneof("message"), ids.tolist(), message.step.tokens, ends))
        return self._send(worker, message)

    def _note_report(self, report: StepReport) -> None:
        self.reports.append(report._replace(gaps_s=report.gaps_s.tolist()))
        self._observe(report)

    @property
    def first_id(self) -> int:
        known = self.front.first_ids[self.front.first_ids > 0]
        return int(known[0]) if len(known) else 0


def state(engine: Engine) -> dict[str, Any]:
    """The engine's counters and measurements, the policy's model, and the layout of blocks."""
    measured = engine.requests.measurements
    measured.count()
    (scheduler,) = engine.pool.schedulers.values()
    histograms = ("ttft_s", "itl_s", "e2e_s", "step_s", "step_rows", "step_positions")
    return {
        "totals": engine.requests.totals,
        "histograms": [getattr(measured, name).state() for name in histograms],
        "times": (measured.run_s, measured.idle_s, measured.ends),
        "accounts": [engine.ledger.account(tenant) for tenant in "ab"],
        "rate": vars(engine.requests.rate),
        "steps": (scheduler.last_plan, scheduler.preemptions, scheduler.prefill_tokens, scheduler.dropped_rows),
        "last_result_at": scheduler.timing._last_result_at,
        "blocks": {
            name: value for name, value in vars(scheduler.pool).items() if "_of" not in name and name not in OBJECTS
        },
    }


def random_setup(seed: int, policy: str) -> Setup:
    rng = random.Random(seed)
    scheduler_s = rng.choice([0.0, 150e-6, 0.005, 0.02])
    cost = round_cost(
        sequence_s=0.0003, context_s=1e-6, link_s=rng.choice([0.0, 0.0007]), front_s=rng.choice([0.0, 0.003])
    )
    return Setup(
        cost,
        policy=policy,
        kv_tokens=rng.choice([1024, 4096, 16384]),
        depth=rng.randint(1, 3),
        slots=rng.choice([3, 16]),
        block_size=rng.choice([4, 16]),
        scheduler_s=scheduler_s,
        spread=rng.choice([0.0, 0.1]),
        prefix_sharing=rng.random() < 0.3,
        seed=seed,
    )


BUILT_IN = ("adaptive", "deadline", "fair", "fcfs", "orca", "prefix", "priority", "sjf", "static")


@pytest.mark.parametrize("policy", choice(BUILT_IN, in_ci=("deadline", "fcfs", "prefix", "priority", "static")))
def test_the_same_as_turn_by_turn(policy: str) -> None:
    first = random.SystemRandom().randrange(1 << 32)
    skipped = 0
    for seed in range(first, first + count(30, in_ci=1)):
        print(f"seed {seed}")
        setup, trace = random_setup(seed, policy), random_trace(seed, 25, stops=seed % 2 == 1)
        if seed == first:  # here fast_forwards are possible for sure
            setup, trace = replace(setup, scheduler_s=150e-6), random_trace(seed, 25, stops=False)
        fast, slow = Recorded(trace, setup), Recorded(trace, replace(setup, fast_forwards=False))
        quick, twin = fast.run(), slow.run()
        assert quick.token_times_s.tobytes() == twin.token_times_s.tobytes()
        assert quick.offsets.tolist() == twin.offsets.tolist()
        assert fast.told == slow.told
        assert fast.reports == slow.reports
        assert fast.plans.items() <= slow.plans.items()
        assert len(fast.plans) + fast.turns_skipped == len(slow.plans)
        assert state(fast.engine) == state(slow.engine)
        assert fast.runners.tallies == slow.runners.tallies
        assert not slow.turns_skipped
        skipped += fast.turns_skipped
    assert skipped or policy == "static", "no turn was skipped"


def before_steady_turns(**fields: Any) -> Simulation:
    """Two sequences that decode, with no further request."""
    trace = Trace("two", (TraceRequest(0.0, 10, 60, tenant="a"), TraceRequest(0.0, 40, 60, tenant="b")))
    simulation = Simulation(trace, Setup(round_cost(), policy="priority", **fields))
    for _ in range(8):
        simulation.turn()
        simulation._advance()
    return simulation


def test_how_far_a_fast_forward_goes() -> None:
    """It ends when a sequence has all its tokens planned, and starts from the last plan's row counts and positions."""
    simulation = before_steady_turns()
    chance = possible_fast_forward(simulation.engine)
    assert chance is not None
    (scheduler,) = simulation.engine.pool.schedulers.values()
    last = scheduler.in_flight[-1]
    assert chance.turns == min(70 - int(last.known[0]), 100 - int(last.known[1]))
    assert (chance.num_rows, chance.context_tokens) == (2, int(last.ends.sum()))


def watch(engine: Engine) -> None:
    engine.watchers.of_steps.add(b"somebody")


def ask_for_the_roster(engine: Engine) -> None:
    engine.watchers.roster_queries.append((b"somebody", 1))


def load_a_policy(engine: Engine) -> None:
    engine.commands.policies._background._open = 1


def make_masks(engine: Engine) -> None:
    engine.constraints._masking._open = 1


def suspect_a_request(engine: Engine) -> None:
    engine.quarantine._reserved = 1


def let_a_request_wait(engine: Engine) -> None:
    submit = engine_pb2.Submit(handle=9, request_id="9", prompt=pack([1]), n=1, max_tokens=5)
    engine.requests.queue.push(build_request(submit, b"", 9, 0.0).sequences[0])


def send_the_runner_away(engine: Engine) -> None:
    engine.pool.schedulers[1].leaving = True


def give_a_sequence_a_stop_token(engine: Engine) -> None:
    engine.pool.schedulers[1].table.stops.add([7])


def constrain_a_sequence(engine: Engine) -> None:
    engine.pool.schedulers[1].table.num_constrained = 1


def compute_a_shared_block(engine: Engine) -> None:
    engine.pool.schedulers[1].pool._pending.add(1)


def follow_the_caches(engine: Engine) -> None:
    engine.kv_feed.subscribe(b"somebody", engine_pb2.KvSubscribe(handle=1))


def take_a_plan_back(engine: Engine) -> None:
    engine.pool.schedulers[1].in_flight.pop()


def give_the_runner_a_drafter(engine: Engine) -> None:
    engine.pool.schedulers[1].drafting.max_drafts = 3


def leave_a_run_unanswered(engine: Engine) -> None:
    flight = engine.pool.schedulers[1].in_flight[0]
    flight.drafts = np.zeros(len(flight.flags), np.int32)


@pytest.mark.parametrize(
    "disturb",
    [
        watch,
        ask_for_the_roster,
        load_a_policy,
        make_masks,
        suspect_a_request,
        let_a_request_wait,
        send_the_runner_away,
        give_a_sequence_a_stop_token,
        constrain_a_sequence,
        compute_a_shared_block,
        follow_the_caches,
        take_a_plan_back,
        give_the_runner_a_drafter,
        leave_a_run_unanswered,
    ],
)
def test_no_fast_forward_where_a_turn_may_be_of_another_kind(disturb: Callable[[Engine], None]) -> None:
    engine = before_steady_turns().engine
    assert possible_fast_forward(engine) is not None
    disturb(engine)
    assert possible_fast_forward(engine) is None


@pytest.mark.parametrize("fields", [{"check": True}, {"plan_lead_ms": 1.0}, {"runners": 2}], ids=str)
def test_no_fast_forward_under_these_settings(fields: dict[str, Any]) -> None:
    assert possible_fast_forward(before_steady_turns(**fields).engine) is None


def test_a_fast_forward_ends_before_the_next_arrival() -> None:
    late = Trace("late", (TraceRequest(0.0, 10, 200), TraceRequest(0.5, 10, 5)))
    simulation = Recorded(late, Setup(round_cost()))
    outcome = simulation.run()
    assert simulation.turns_skipped > 150
    assert outcome.ttft_s[1] < 3 * 0.0111


def test_a_fast_forward_ends_before_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = SimulatedFront._submit

    def with_a_deadline(front: SimulatedFront, index: int) -> engine_pb2.Submit:
        message = submit(front, index)
        if index == 1:
            message.timeout_ms = 500
        return message

    monkeypatch.setattr(SimulatedFront, "_submit", with_a_deadline)
    trace = Trace("short of time", tuple(TraceRequest(0.0, 10, 200) for _ in range(2)))
    fast, slow = (Recorded(trace, Setup(round_cost(), fast_forwards=fast_forwards)) for fast_forwards in (True, False))
    for simulation in (fast, slow):
        with pytest.raises(RuntimeError, match="ended before they had their tokens"):
            simulation.run()
    assert fast.turns_skipped > 150
    assert fast.told == slow.told
    (end,) = [end for _, _, _, ends in fast.told for end in ends if end[1] == FinishReason.DEADLINE]
    assert end[0] == 1 and 0 < end[2] < 200
    assert state(fast.engine) == state(slow.engine)
