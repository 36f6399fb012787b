"""Reproduces published factors of continuous batching, each under its own conditions, with Roster's policies.

    python -m bench.policies.claims [--cost h200-llama-3.1-8b] [--claims orca anyscale hugging-face vllm] [--json FILE]

Everything runs on the simulator: the production engine on a virtual clock, with a cost model fitted to an H200. The
numbers are therefore the same on every machine and do not depend on better kernels. docs/claims.md lists the source and
conditions of each claim and explains the numbers.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.provenance import provenance, write_results
from roster_common.logs import configure_logs
from scheduler_svc.simulator.cost_model import CostModel, load_cost_model
from scheduler_svc.simulator.outcome import Outcome
from scheduler_svc.simulator.simulation import Setup, simulate
from scheduler_svc.simulator.trace import Trace, TraceRequest

Lengths = list[tuple[int, int]]
"""(prompt, output) tokens of each request."""
LIMIT = 4
"""Limit of vLLM's comparison, as a multiple of an unloaded system's latency per token."""
RATE_TOLERANCE = 1.06
"""Rates are determined to within this factor."""
FIRST_RATE = 4.0
FEWEST, SHORTEST_S = 120, 10.0
"""Minimum requests and arrival span of a run at a rate, so that a growing queue becomes visible."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One claim under one condition: the baseline's and Roster's number, in `unit`."""

    claim: str
    condition: str
    unit: str
    baseline: float
    ours: float

    @property
    def ratio(self) -> float:
        """Ratio ours / baseline; for both units larger is better."""
        return self.ours / self.baseline


class Bench:
    """Comparisons with one cost model, each printed as soon as it is made."""

    def __init__(self, cost: CostModel, requests: int) -> None:
        """`requests` is the number that arrive at once; with more of them, the tail at the end counts less."""
        self.cost = cost
        self.requests = requests
        self.comparisons: list[Comparison] = []

    def setup(self, policy: str, slots: int, kv_tokens: int | None = None) -> Setup:
        """Returns a runner with the cost model's speed."""
        return Setup(self.cost, policy=policy, slots=slots, kv_tokens=kv_tokens)

    def compare(self, claim: str, condition: str, unit: str, baseline: float, ours: float) -> None:
        """Records and prints a comparison."""
        one = Comparison(claim, condition, unit, round(baseline, 3), round(ours, 3))
        self.comparisons.append(one)
        print(f"{claim:10} {condition:62} {baseline:9.2f} {ours:9.2f} {unit:9}{one.ratio:6.1f}×", flush=True)


def drawn(draw_prompt: Any, draw_output: Any, count: int) -> Lengths:
    """Returns `count` requests with lengths drawn by the two functions from a generator with a fixed seed."""
    rng = random.Random(1)
    return [(max(1, round(draw_prompt(rng))), max(1, round(draw_output(rng)))) for _ in range(count)]


def run(lengths: Lengths, arrivals_s: Iterable[float], setup: Setup) -> Outcome:
    """Runs the requests at these times. Raises RuntimeError if one does not fit the runner."""
    rows = (TraceRequest(at_s, *tokens) for at_s, tokens in zip(arrivals_s, lengths, strict=True))
    outcome = simulate(Trace("", tuple(rows)), setup)
    if outcome.refusals:
        raise RuntimeError(f"{len(outcome.refusals)} requests do not fit the runner: {outcome.refusals}")
    return outcome


def tokens_per_s(lengths: Lengths, setup: Setup) -> float:
    """Returns output tokens per second if all requests are present from the start."""
    outcome = run(lengths, [0.0] * len(lengths), setup)
    return float(outcome.tokens.sum() / outcome.last_token_at.max())


def normalized_latency_s(lengths: Lengths, rate: float, setup: Setup, mean: bool) -> float:
    """Returns the median or mean of (arrival to end) / output tokens over requests with Poisson arrivals.

    `FEWEST` and `SHORTEST_S` determine the number of requests; the lengths are repeated if there are fewer.
    """
    rng = random.Random(2)
    count = max(FEWEST, math.ceil(rate * SHORTEST_S))
    longer = [lengths[number % len(lengths)] for number in range(count)]
    outcome = run(longer, accumulate(rng.expovariate(rate) for _ in longer), setup)
    ratios = outcome.e2e_s / outcome.tokens
    return float(ratios.mean() if mean else np.median(ratios))


def highest_rate(lengths: Lengths, limit_s: float, setup: Setup, mean: bool = False) -> float:
    """Returns the highest rate (requests per second) at which the normalized latency keeps the limit, by bisection."""

    def kept(rate: float) -> bool:
        return normalized_latency_s(lengths, rate, setup, mean) <= limit_s

    low = high = FIRST_RATE
    if kept(high):
        while kept(high := 2 * high):
            low = high
    else:
        while not kept(low := low / 2):
            high = low
    while high / low > RATE_TOLERANCE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low


def alone_s(lengths: Lengths, setup: Setup) -> float:
    """Returns the median normalized latency of requests that run alone."""
    few = lengths[:32]
    outcome = run(few, [60.0 * number for number in range(len(few))], setup)
    return float(np.median(outcome.e2e_s / outcome.tokens))


def orca(bench: Bench) -> None:
    """Compares as Orca (OSDI 2022), 36.9 over FasterTransformer: rates at one median latency per token, short outputs.

    Prompts U(32, 512), outputs U(1, 128), limit: twice what a request takes alone.
    """
    lengths = drawn(lambda rng: rng.randint(32, 512), lambda rng: rng.randint(1, 128), bench.requests)
    limit_s = alone_s(lengths, bench.setup("orca", 8))
    for factor in (2, 8):
        for slots in (8, 32):
            rates = [
                highest_rate(lengths, factor * limit_s, bench.setup(policy, slots)) for policy in ("static", "orca")
            ]
            bench.compare("Orca", f"{slots} slots, {factor} × the latency of a request alone", "req/s", *rates)


def anyscale(bench: Bench) -> None:
    """Compares as Anyscale (2023), 23 over static batches: tokens/s of 512-token prompts by the spread of output
    lengths.

    Outputs are exponential with mean 128, cut at a maximum for which static batches reserve memory. The card's cache
    holds 16,384 tokens, so the reservation limits the batches.
    """
    kv_tokens = 16_384
    for longest in (32, 128, 512, 1536):
        lengths = drawn(lambda _: 512, lambda rng, most=longest: min(most, rng.expovariate(1 / 128)), bench.requests)
        reserving = max(1, kv_tokens // (512 + longest))
        static = tokens_per_s(lengths, bench.setup("static", reserving, kv_tokens))
        same_slots = tokens_per_s(lengths, bench.setup("fcfs", reserving, kv_tokens))
        paged = tokens_per_s(lengths, bench.setup("fcfs", 256, kv_tokens))
        bench.compare(
            "Anyscale", f"outputs up to {longest}: {reserving} reserved slots, both", "tokens/s", static, same_slots
        )
        bench.compare(
            "Anyscale", f"outputs up to {longest}: paged against {reserving} reserved", "tokens/s", static, paged
        )
    one = tokens_per_s(lengths, bench.setup("static", 1, kv_tokens))
    bench.compare("Anyscale", "outputs up to 1536: paged against one at a time", "tokens/s", one, paged)


def hugging_face(bench: Bench) -> None:
    """Compares as vLLM's first report (2023), 14 to 24 over transformers: tokens/s of ShareGPT-like lengths, all at
    once.

    Prompts are lognormal with mean 161, outputs with mean 338 (the paper's ShareGPT), at most 1,024 each. Static
    batches of a few rows are compared with as many sequences as paged memory holds.
    """
    lengths = sharegpt(bench.requests)
    paged = tokens_per_s(lengths, bench.setup("fcfs", 256))
    for rows in (4, 8, 16, 32):
        static = tokens_per_s(lengths, bench.setup("static", rows))
        bench.compare("vLLM / HF", f"256 paged slots against static batches of {rows}", "tokens/s", static, paged)


def vllm(bench: Bench) -> None:
    """Compares as vLLM (SOSP 2023), 2 to 4 over FasterTransformer and Orca: both sides batch continuously, but the
    baseline reserves 2,048 tokens of KV memory for each sequence.

    Lengths are like ShareGPT's. The caches have 15,700 and 60,100 tokens, the paper's sizes for OPT-13B and 175B. The
    mean latency per token is at most `LIMIT` times that of an unloaded system.
    """
    lengths = sharegpt(bench.requests)
    limit_s = alone_s(lengths, bench.setup("orca", 8))
    for kv_tokens in (15_700, 60_100):
        reserving = kv_tokens // 2048
        reserved, paged = (
            highest_rate(lengths, LIMIT * limit_s, bench.setup("orca", slots, kv_tokens), mean=True)
            for slots in (reserving, 256)
        )
        condition = f"{kv_tokens:,} tokens: paged against {reserving} reserved slots"
        bench.compare("vLLM", condition, "req/s", reserved, paged)


def sharegpt(count: int) -> Lengths:
    """Returns lengths like ShareGPT's: lognormal with sigma 1, means 161 and 338, at most 1,024 each."""
    return drawn(
        lambda rng: min(1024, rng.lognormvariate(math.log(161) - 0.5, 1)),
        lambda rng: min(1024, rng.lognormvariate(math.log(338) - 0.5, 1)),
        count,
    )


CLAIMS: dict[str, Callable[[Bench], None]] = {
    "orca": orca,
    "anyscale": anyscale,
    "hugging-face": hugging_face,
    "vllm": vllm,
}


def compared(claim: str, cost: str, requests: int) -> list[Comparison]:
    """Returns one claim's comparisons; runs in a separate process."""
    configure_logs("console", "error")
    bench = Bench(load_cost_model(cost), requests)
    CLAIMS[claim](bench)
    return bench.comparisons


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", default="h200-llama-3.1-8b", help="cost model: the name of a shipped one, or a file")
    parser.add_argument(
        "--requests", type=int, default=300, help="requests that arrive at once, where tokens/s are compared"
    )
    parser.add_argument("--claims", nargs="+", choices=sorted(CLAIMS), default=list(CLAIMS))
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    load_cost_model(options.cost)  # fails here once rather than in each process below
    print(f"{'claim':10} {'condition':62} {'baseline':>9} {'ours':>9} {'':9}{'ratio':>6}", flush=True)
    with ProcessPoolExecutor() as pool:
        works = [pool.submit(compared, claim, options.cost, options.requests) for claim in options.claims]
        comparisons = [one for work in works for one in work.result()]
    if options.json:
        rows = [asdict(one) | {"ratio": round(one.ratio, 2)} for one in comparisons]
        source = provenance("bench.policies.claims", ("numpy",))
        write_results(options.json, source, {"cost": options.cost, "comparisons": rows})


if __name__ == "__main__":
    main()
