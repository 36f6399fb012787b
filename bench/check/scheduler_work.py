"""The scheduler's work: steps of `bench.scheduler`, and whole requests through the engine on the simulator."""

from __future__ import annotations

from bench.check.work import Advance, Work
from bench.common.traces import CONVERSATIONS
from bench.scheduler.load import Load, scheduler_steps
from scheduler_svc.policy import PolicyGuard, load_policy
from scheduler_svc.simulator.cost_model import load_cost_model
from scheduler_svc.simulator.simulation import Setup, simulate
from scheduler_svc.simulator.trace import read_trace

MOST_STEPS = 2000
"""Steps for which the benchmark queues requests."""


def steps(policy: str, load: Load) -> Advance:
    """Sets up steps of `bench.scheduler`: apply a result, make and encode the next plan."""
    running = scheduler_steps(PolicyGuard(load_policy(policy, {})), load, MOST_STEPS)

    def advance(count: int) -> None:
        for _ in range(count):
            next(running)

    return advance


def simulated_requests(policy: str) -> Advance:
    """Sets up requests of a trace that pass through the whole engine: submitted, queued, planned, published, ended."""
    trace = read_trace(CONVERSATIONS).divided(16, 16)
    setup = Setup(load_cost_model("h200-llama-3.1-8b"), policy=policy, fast_forwards=False)

    def advance(count: int) -> None:
        if count:
            simulate(trace.first(count), setup)

    return advance


SCHEDULER_WORK = (
    Work("scheduler, 256 decode", "step", lambda: steps("fcfs", Load(256)), warm_up=40, counted=60),
    Work(
        "scheduler, 64 come and go",
        "step",
        lambda: steps("fcfs", Load(64, waiting=64, tenants=4, output_tokens=32)),
        warm_up=60,
        counted=100,
    ),
    Work("engine, simulated requests", "request", lambda: simulated_requests("fcfs"), warm_up=4, counted=24),
    Work("engine, policy auto", "request", lambda: simulated_requests("auto"), warm_up=4, counted=24),
)
