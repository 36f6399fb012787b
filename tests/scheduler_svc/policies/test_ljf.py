"""`ljf` on the simulator: a batch that arrives all at once is done sooner."""

from __future__ import annotations

from dataclasses import replace

from bench.common.traces import TRACES
from scheduler_svc.simulator.cost_model import load_cost_model
from scheduler_svc.simulator.outcome import Outcome
from scheduler_svc.simulator.simulation import Setup, simulate
from scheduler_svc.simulator.trace import Trace, read_trace

REQUESTS = 200


def all_at_once() -> Trace:
    """An hour of conversations arriving at once, with prompts capped as a chat server caps them."""
    rows = read_trace(TRACES / "azure_conv_2023_busiest2000.csv", REQUESTS).requests
    capped = (replace(row, arrival_s=0.0, prompt_tokens=min(row.prompt_tokens, 4096)) for row in rows)
    return Trace("all at once", tuple(capped))


def done_s(outcome: Outcome) -> float:
    return float((outcome.arrival_s + outcome.e2e_s).max())


def test_a_batch_is_done_sooner() -> None:
    """While prompts take as long as the longest answer, no tail is left in which a few sequences decode alone."""
    cost = load_cost_model("h200-llama-3.1-8b")
    fcfs, ljf = (
        simulate(all_at_once(), Setup(cost, policy=policy, parameters={"step_tokens": 1024}))
        for policy in ("fcfs", "ljf")
    )
    print(done_s(fcfs), done_s(ljf))
    assert ljf.counters.policy_failures == 0
    assert done_s(ljf) < 0.95 * done_s(fcfs)
