"""The simulation makes the same plans as a live engine that serves the requests over ZeroMQ on a real runner."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import zmq

from roster_client.commands.calibrate import started_runner
from roster_protos import engine_pb2, plan_pb2
from scheduler_svc.engine.engine import Engine
from scheduler_svc.link.runner_link import RunnerLink
from scheduler_svc.policy import PolicyGuard, load_policy
from scheduler_svc.simulator.calibration.calibration import RecordingLink
from scheduler_svc.simulator.simulated_front import SimulatedFront
from scheduler_svc.simulator.simulation import Setup, Simulation
from scheduler_svc.simulator.trace import Trace, TraceRequest
from scheduler_svc.simulator.virtual_clock import VirtualClock
from tests.support.simulated_cost import round_cost

SLOTS, KV_TOKENS, STEP_TOKENS, VOCAB_SIZE = 6, 640, 64, 512
SETUP = Setup(
    round_cost(), policy="fcfs", slots=SLOTS, kv_tokens=KV_TOKENS, step_tokens=STEP_TOKENS, depth=1, fast_forwards=False
)
"""One plan in flight: with two, a plan depends on which results happened to arrive together."""


def what_it_says(plan: plan_pb2.Plan) -> plan_pb2.Plan:
    """Returns the plan without process-specific values (ids, noise) and sampled tokens."""
    said = plan_pb2.Plan()
    said.CopyFrom(plan)
    for admission in said.admissions:
        for field in ("tokens", "sequence_id", "seed", "context"):
            admission.ClearField(field)
    return said


def simulated_plans(trace: Trace) -> list[plan_pb2.Plan]:
    simulation = Simulation(trace, SETUP)
    plans: list[plan_pb2.Plan] = []
    send = simulation.runners.send_plan

    def record(session: int, number: int, plan: plan_pb2.Plan) -> None:
        plans.append(what_it_says(plan))
        send(session, number, plan)

    simulation.runners.send_plan = record  # type: ignore[method-assign]
    outcome = simulation.run()
    assert outcome.counters.preemptions > 0, "the pool is to be tight"
    return plans


class _PlanRecorder(RecordingLink):
    """Records the plans."""

    def __init__(self, link: RunnerLink) -> None:
        super().__init__(link)
        self.plans: list[plan_pb2.Plan] = []

    def send_plan(self, session: int, number: int, plan: plan_pb2.Plan) -> None:
        self.plans.append(what_it_says(plan))
        super().send_plan(session, number, plan)


def live_plans(trace: Trace, endpoint: str) -> list[plan_pb2.Plan]:
    settings = SETUP.settings()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = RunnerLink(context, endpoint, silence_s=60, plan_timeout_s=60, clock=time.monotonic)
    recorder = _PlanRecorder(link)
    clock = VirtualClock()
    clock.now_s = -1.0  # no request arrives before the runner has connected
    front = SimulatedFront(trace, clock, 0.0, VOCAB_SIZE, real_prompts=True)
    engine = Engine(settings, PolicyGuard(load_policy("fcfs", {})), front, recorder)
    flags = {"device": "hash", "slots": SLOTS, "kv_tokens": KV_TOKENS, "max_step_tokens": STEP_TOKENS}
    try:
        with started_runner(endpoint, flags | {"test_backend": json.dumps({"vocab_size": VOCAB_SIZE})}) as alive:
            until_at = time.monotonic() + 120
            while not front.done and time.monotonic() < until_at:
                alive()
                if recorder.hello is not None:
                    clock.now_s = 1.0
                engine.step()
                link.sockets[0].poll(50)
    finally:
        link.close()
        context.term()
    assert front.done and not front.ended_early
    return recorder.plans


def test_the_same_plans_as_over_zeromq(tmp_path: Path) -> None:
    rng = random.Random(20)
    trace = Trace("at once", tuple(TraceRequest(0.0, rng.randint(1, 180), rng.randint(1, 90)) for _ in range(40)))
    simulated, live = simulated_plans(trace), live_plans(trace, f"ipc://{tmp_path}/link")
    assert len(simulated) > 300
    for number, (here, there) in enumerate(zip(simulated, live, strict=True), 1):
        assert here == there, f"plan {number}"


def test_messages_are_those_of_the_contract() -> None:
    """The simulated client sends a complete Submit, as a front worker does."""
    front = SimulatedFront(Trace("t", (TraceRequest(0.0, 7, 3),)), VirtualClock(), 0.0, VOCAB_SIZE, real_prompts=True)
    (_, hello), (_, command) = front.receive()
    assert hello.WhichOneof("command") == "hello"
    submit = engine_pb2.Submit.FromString(command.submit.SerializeToString())
    assert (submit.handle, submit.request_id, submit.n, submit.max_tokens) == (1, "0", 1, 3)
    assert len(submit.prompt) == 7 * 4
