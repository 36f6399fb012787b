"""`auto` on the simulator: its ITL target, the makespan of a batch at once, and the bound of each request's wait."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from roster_protos import plan_pb2
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.policies.auto import Auto, AutoParameters
from scheduler_svc.policy import Load, RequestView
from scheduler_svc.simulator.cost_model import load_cost_model
from scheduler_svc.simulator.outcome import Outcome
from scheduler_svc.simulator.simulation import Setup, simulate
from scheduler_svc.simulator.trace import Trace, TraceRequest
from scheduler_svc.step_times.step_time_model import StepTimeModel
from tests.support.arrivals import merged, poisson
from tests.support.step_costs import Rows, costs_of
from tests.support.thoroughness import choice

SHAPES = {"8b": "h200-llama-3.1-8b", "0.6b": "h200-qwen3-0.6b"}
ROW_S = 0.004


def conversations(rate: float, count: int, seed: int = 1) -> Trace:
    """Prompts and outputs about as long as those of real conversations; all at once if `rate` is 0."""
    rng, at = random.Random(seed), 0.0
    requests = []
    for _ in range(count):
        prompt = min(4000, int(rng.lognormvariate(6.8, 0.8)) + 1)
        requests.append(TraceRequest(at, prompt, min(600, int(rng.lognormvariate(4.8, 0.8)) + 1)))
        at += rng.expovariate(rate) if rate else 0.0
    return Trace("conversations", tuple(requests))


def run(trace: Trace, policy: str = "auto", shape: str = "8b", **parameters: Any) -> Outcome:
    cost = load_cost_model(SHAPES[shape])
    outcome = simulate(trace, Setup(cost, policy=policy, parameters=parameters, slots=512, spread=0.03, seed=2))
    assert outcome.counters.policy_failures == 0
    return outcome


def itl_p99_ms(outcome: Outcome) -> float:
    return float(np.percentile(outcome.itl_s, 99)) * 1000


@pytest.mark.parametrize(
    ("shape", "rate", "target_ms"), choice([("8b", 15.0, 35.0), ("0.6b", 90.0, 7.0)], in_ci=[("0.6b", 90.0, 7.0)])
)
def test_it_keeps_the_default_target_and_first_tokens_come_no_later_than_first_come_first_served(
    shape: str, rate: float, target_ms: float
) -> None:
    trace = conversations(rate, 150)
    auto, fcfs = run(trace, shape=shape), run(trace, "fcfs", shape=shape)
    assert itl_p99_ms(auto) <= target_ms < itl_p99_ms(fcfs)
    assert np.median(auto.ttft_s) <= 1.1 * np.median(fcfs.ttft_s)


def test_a_request_with_a_tighter_target_is_decoded_within_it() -> None:
    trace = conversations(12.0, 80)
    strict = tuple(
        TraceRequest(r.arrival_s, r.prompt_tokens, r.output_tokens, itl_target_ms=18) for r in trace.requests
    )
    assert itl_p99_ms(run(Trace("strict", strict))) <= 18 < itl_p99_ms(run(trace))


@pytest.mark.parametrize("target_ms", [20.0, 0.0])
def test_the_targets_parameter(target_ms: float) -> None:
    outcome = run(conversations(12.0, 80), itl_target_ms=target_ms)
    assert itl_p99_ms(outcome) <= target_ms if target_ms else itl_p99_ms(outcome) > 40


def test_the_attention_of_a_long_prompt_counts() -> None:
    """Its last chunks of 1,024 positions take twice as long as its first ones."""
    rng = random.Random(3)
    chats = [TraceRequest(t, 200, 250) for t in poisson(rng, 4.0, 0, 6)]
    trace = merged(chats, [TraceRequest(2.0 + n, 20_000, 2) for n in range(3)])
    auto, chunks = run(trace), run(trace, "fcfs", step_tokens=1024)
    assert itl_p99_ms(auto) <= 36 < itl_p99_ms(chunks)


@pytest.mark.parametrize("shape", choice(list(SHAPES), in_ci=["8b"]))
def test_a_batch_at_once_is_done_as_soon_as_under_the_tuned_policy(shape: str) -> None:
    trace = conversations(0.0, 400)
    tuned = min(
        run(trace, "ljf", shape, step_tokens=step_tokens, prompt_weight=0).last_token_at.max()
        for step_tokens in (1024, 4096)
    )
    assert run(trace, shape=shape).last_token_at.max() <= 1.03 * tuned


def test_delays_that_smaller_steps_do_not_avoid_do_not_make_them_smaller() -> None:
    """Results and plans that are 4 ms on their way, with a target of 5.9 ms: the budget must not shrink to nothing."""
    cost = load_cost_model(SHAPES["0.6b"]).model_copy(update={"link_s": 0.004})
    trace = conversations(60.0, 250)
    auto, fcfs = (
        simulate(trace, Setup(cost, policy=policy, slots=512, spread=0.03, profile="balanced", scheduler_s=0.001))
        for policy in ("auto", "fcfs")
    )
    assert auto.counters.policy_failures == 0
    assert np.median(auto.ttft_s) < 1.2 * np.median(fcfs.ttft_s)
    assert np.percentile(auto.ttft_s, 99) < 4 * np.percentile(fcfs.ttft_s, 99)


# ---------------------------------------------------------------------- keys and budgets


def seconds_of(decode: Rows, chunks: Rows) -> float:
    positions = len(decode) + sum(count for _, count in chunks)
    return ROW_S + 2e-5 * max(0, positions - 1) + 4e-8 * sum(start for start, _ in decode)


def model(on_gpu: bool = False, slower: float = 1.0) -> StepTimeModel:
    return StepTimeModel(1, on_gpu, costs_of(lambda *one: slower * seconds_of(*one)))


def load(**fields: Any) -> Load:
    usual = {"running": 4, "decoding": 4, "slots": 64, "waiting": 1, "waiting_tokens": 500, "free_blocks": 900}
    usual |= {"blocks": 1000, "block_size": 16, "max_step_tokens": 8192, "context": 4000}
    return Load(**(usual | {"step_times": model()} | fields))


def auto(**parameters: Any) -> Auto:
    return Auto(AutoParameters(**parameters))


def request(arrival_s: float, prompt_tokens: int, max_tokens: int = 100) -> RequestView:
    return RequestView("r", "t", arrival_s, 0, prompt_tokens, max_tokens, 1)


def test_the_default_target_is_eight_rows_within_bounds() -> None:
    """A step may fill 8 x 4 ms, or 35 ms of a slow GPU; a CPU may take longer, and no target is below 5 ms."""

    def most_s(times: StepTimeModel) -> float:
        budget = auto().budget(load(step_times=times, decoding=1, context=256))
        return times.seconds(budget.prefill_tokens + budget.overflow, 1, 256) + times.delay_s(0.92)

    assert most_s(model()) == pytest.approx(8 * ROW_S, rel=0.03)
    assert most_s(model(slower=4)) == pytest.approx(32 * ROW_S, rel=0.03)
    assert most_s(model(on_gpu=True, slower=4)) == pytest.approx(0.035, rel=0.03)
    assert most_s(model(on_gpu=True, slower=10)) == pytest.approx(2 * 10 * ROW_S, rel=0.03)
    assert most_s(model(slower=0.1)) == pytest.approx(0.005, rel=0.05)


def test_budgets() -> None:
    policy = auto()
    usual = policy.budget(load())
    assert 64 < usual.prefill_tokens < usual.prefill_tokens + usual.overflow < 2000
    busy = policy.budget(load(waiting_tokens=10_000))
    whole = usual.prefill_tokens + usual.overflow
    assert busy.prefill_tokens == whole and not busy.overflow, "no time is kept for a prompt's end"
    assert policy.budget(load(waiting_tokens=40_000, queue_runners=4)) == busy, "each runner has a fourth of the queue"
    assert policy.budget(load(waiting_tokens=10_000, queue_runners=20)) == usual
    tight = policy.budget(load(itl_target_s=0.001))
    assert 150 < tight.prefill_tokens + tight.overflow < 250, "decoding alone misses the target: prompts get as much"
    assert policy.budget(load(itl_target_s=0.0055)).prefill_tokens == 64
    alone = policy.budget(load(decoding=0, context=0))
    assert alone.prefill_tokens + alone.overflow == 8192 and alone.prefill_tokens < 2000
    assert policy.budget(load(service_itl_target_s=0.0)).prefill_tokens == 8192 - 4
    assert policy.budget(load(service_itl_target_s=0.01)).prefill_tokens < usual.prefill_tokens
    assert policy.budget(load(step_times=StepTimeModel())).prefill_tokens == 512
    assert policy.budget(load(step_times=None)).prefill_tokens == 512
    deep = policy.budget(load(waiting_tokens=1_000_000, context=2_000_000, decoding=60))
    assert deep.prefill_tokens > 3000, "as long as the decoding rows"
    assert policy.budget(load(waiting_tokens=1_000_000, decoding=0)).prefill_tokens == 8192
    bound = auto(step_tokens=300, finish_tokens=400).budget(load())
    assert (bound.prefill_tokens, bound.overflow) == (296, 100)


@pytest.mark.parametrize("delay_s", [0.001, 0.002, 0.004, 0.008, 0.1])
def test_a_backlog_makes_steps_grow_whatever_the_delays_and_the_fit_say(delay_s: float) -> None:
    """All steps seen were small and took as long as their launch: their fit knows no time per position."""
    times, rng = model(on_gpu=True, slower=0.2), random.Random(5)
    for _ in range(2000):
        count = rng.randint(60, 200)
        starts, counts = np.array([[500] * 16 + [0], [1] * 16 + [count]], np.int32)
        times.note(starts, counts, 16, 0.0028 + delay_s * rng.random(), 0.0028)
        times.position_s  # noqa: B018  (noted steps are used when a policy asks)
    least = times.efficient_prefill
    assert least >= 1024
    few = auto().budget(load(step_times=times, decoding=16, context=8000, waiting_tokens=100))
    many = auto().budget(load(step_times=times, decoding=16, context=8000, waiting_tokens=700_000))
    assert many.prefill_tokens >= least - 16
    assert many.prefill_tokens >= few.prefill_tokens >= 64
    grown = auto().budget(load(step_times=times, decoding=16, waiting_tokens=33 * few.prefill_tokens + 10_000))
    assert grown.prefill_tokens >= least - 16


def test_a_deep_queue_of_a_mixture_of_experts_gets_steps_of_one_size() -> None:
    """About what 30B-A3B takes on an H200. The overhead of a step is reading the experts: twelve times that would be
    steps of 8,192 positions, beside which long outputs wait."""
    alone = {64: 6.5, 256: 9.0, 1024: 22.6, 2048: 31.0, 4096: 51.0}
    rows = {1: 2.3, 8: 2.9, 64: 7.0, 256: 12.0}  # few of both less than in service: what is measured has one context
    costs = [
        *(plan_pb2.StepCost(prompt_positions=count, step_ns=round(ms * 1e6)) for count, ms in alone.items()),
        *(plan_pb2.StepCost(decode_rows=n, context=256 * n, step_ns=round(ms * 1e6)) for n, ms in rows.items()),
    ]
    hello = plan_pb2.Hello(tile_tokens=64, device="cuda:0", step_costs=costs, has_experts=True)
    times = StepTimeModel.of(hello)
    assert times.is_sparse and times.efficient_prefill == 2048
    assert not model(on_gpu=True).is_sparse
    hello.device = "cpu"
    assert not StepTimeModel.of(hello).is_sparse
    for decoding in (1, 40, 200):
        one = load(step_times=times, decoding=decoding, context=1500 * decoding, waiting_tokens=700_000)
        assert auto().budget(one).prefill_tokens == 2048 - decoding
    ledger = Ledger()
    ledger.step_times = times
    for waiting, longer_goes_first in ((10_000, False), (20_000, True)):
        ledger.count_waiting = lambda waiting=waiting: waiting  # type: ignore[misc]
        long, short = (auto().key(request(1.0, 1000, output), ledger) for output in (700, 20))
        assert (long < short) == longer_goes_first


def test_requests_that_a_client_sends_at_once_are_ordered_by_their_outputs() -> None:
    """Though it takes half a second until the service has read them all."""
    ledger = Ledger()
    ledger.step_times, ledger.runners = model(), 1
    ledger.count_waiting = lambda: 1_000_000
    first_and_short, last_and_long = (auto().key(request(*one), ledger) for one in ((1.0, 1000, 90), (1.5, 1000, 700)))
    assert last_and_long < first_and_short


def test_no_request_is_overtaken_by_one_that_arrives_later_than_its_bound() -> None:
    ledger, policy, rng = Ledger(), auto(), random.Random(4)
    ledger.step_times, ledger.runners = model(), 1
    position_s = ledger.step_times.position_s
    keys = []
    for number in range(400):
        waiting = 1_000_000 if number % 2 else 0
        ledger.count_waiting = lambda waiting=waiting: waiting  # type: ignore[misc]
        one = request(rng.uniform(0, 20), rng.randint(1, 8000), rng.choice([10, 1000, 100_000]))
        bound_s = policy.parameters.ageing_s if waiting else policy.parameters.patience * one.prompt_tokens * position_s
        keys.append((policy.key(one, ledger), one, bound_s))
    for key, one, bound_s in keys:
        assert one.arrival_s <= key <= one.arrival_s + bound_s + 1e-9
    short, long = (policy.key(request(1.0, tokens), Ledger()) for tokens in (1, 8000))
    assert short == long == 1.0, "in order of arrival while nothing is known"


def test_in_a_deep_queue_long_outputs_go_first_and_several_runners_share_it() -> None:
    ledger, policy = Ledger(), auto()
    ledger.step_times = model()
    ledger.count_waiting = lambda: 80_000

    def key(prompt: int, output: int) -> float:
        return policy.key(request(1.0, prompt, output), ledger)

    ledger.runners = 1
    assert key(100, 1000) < key(100, 10) and key(100, 500) == key(4000, 500)
    ledger.runners = 4
    assert key(100, 1000) == key(100, 10) and key(100, 500) < key(4000, 500)
    ledger.itl_target_s = 0.0
    assert key(100, 1000) < key(100, 10), "throughput alone counts"
    assert math.isfinite(key(1, 1 << 40))
