"""Measures padding: the share of computed positions that hold no token, in padded batches and in packed steps.

    python -m bench.policies.packed_prefill [--trace FILE ...] [--limit N] [--json FILE] [--plot FILE]

**Padded*: a batch's prompts take rows × longest prompt positions. `arrival` takes requests as they come. `sorted` first
sorts the whole trace by length, which is impossible online, and so bounds the gain from sorting. `windowed` sorts
`WINDOW` batches at a time, for which their requests must wait. *to the end* continues to the batch's last
token: finished rows are computed until the longest is done.

*Packed*: the plans of the production engine (`fcfs`, chunked prefill) on the simulator, for a runner of the H200's
size. A packed step computes only positions with tokens; the waste is what preemption computes twice. *in graphs* pads
the steps as the CUDA backend does, whose graphs have fixed sizes: decode steps to the next bucket of rows, mixed steps
of up to `MIXED_GRAPHS` positions to the next bucket of positions.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.common.provenance import provenance, write_results
from bench.common.traces import TRACES
from roster_common.logs import configure_logs
from runner_svc.gpu.graphs import bucket_sizes, token_sizes
from scheduler_svc.simulator.cost_model import StepWork, load_cost_model
from scheduler_svc.simulator.simulation import Setup, Simulation
from scheduler_svc.simulator.step_tallies import StepTallies
from scheduler_svc.simulator.trace import Trace, TraceRequest, read_trace

BATCHES = (2, 4, 8, 16, 32, 64)
WINDOW = 16
"""Number of batches that `windowed` sorts at a time."""
COST_MODEL = "h200-llama-3.1-8b"
MIXED_GRAPHS = 2048
"""Positions of the largest mixed step in a graph, as start-up timing chose for the 8B shape on an H200."""


@dataclass(frozen=True, slots=True)
class Waste:
    """Shares of the computed positions that held no token of a request, or a token that was computed before."""

    way: str
    batch: int | None
    """Rows of a batch; None for packed steps."""
    prefill: float
    """Share while prompts are computed."""
    to_the_end: float
    """Share until the last token of every request."""


def batches_of(requests: Sequence[TraceRequest], size: int) -> Iterator[Sequence[TraceRequest]]:
    """Yields consecutive batches; the last may be smaller."""
    return (requests[start : start + size] for start in range(0, len(requests), size))


def by_length(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Returns the requests sorted by prompt length, then output length."""
    return sorted(requests, key=lambda request: (request.prompt_tokens, request.output_tokens))


def windowed(requests: Sequence[TraceRequest], window: int) -> list[TraceRequest]:
    """Returns the requests sorted within each group of `window` consecutive ones."""
    return [request for part in batches_of(requests, window) for request in by_length(part)]


def padded(way: str, requests: Sequence[TraceRequest], size: int) -> Waste:
    """Returns the waste of batches of `size` consecutive requests."""
    prompts = sum(request.prompt_tokens for request in requests)
    outputs = sum(request.output_tokens - 1 for request in requests)  # the prompt's last position gives the first one
    prefill = decode = 0
    for batch in batches_of(requests, size):
        prefill += len(batch) * max(request.prompt_tokens for request in batch)
        decode += len(batch) * (max(request.output_tokens for request in batch) - 1)
    return Waste(way, size, 1 - prompts / prefill, 1 - (prompts + outputs) / (prefill + decode))


class PaddingTallies(StepTallies):
    """Tallies that also count the positions of steps padded to CUDA graphs, where a graph of their size exists."""

    def __init__(self, slots: int, step_tokens: int) -> None:
        super().__init__()
        self._rows = bucket_sizes(slots)
        self._tokens = [size for size in token_sizes(step_tokens) if size <= MIXED_GRAPHS]
        self.mixed_tokens = 0
        """Positions in steps that computed prompts."""
        self.in_graphs = 0
        self.mixed_in_graphs = 0

    def add(self, work: StepWork, seconds: float) -> None:
        """Adds one step."""
        super().add(work, seconds)
        mixed = work.tokens > work.sequences
        padded_to = _bucket(self._tokens if mixed else self._rows, work.tokens)
        self.in_graphs += padded_to
        if mixed:
            self.mixed_tokens += work.tokens
            self.mixed_in_graphs += padded_to


def _bucket(sizes: Sequence[int], size: int) -> int:
    """Returns the next larger bucket, or `size` itself if none is large enough."""
    place = bisect_left(sizes, size)
    return sizes[place] if place < len(sizes) else size


def packed(trace: Trace) -> list[Waste]:
    """Returns the waste of the engine's own plans, without and with the padding of CUDA graphs."""
    setup = Setup(load_cost_model(COST_MODEL), policy="fcfs")
    simulation = Simulation(trace, setup)
    tallies = simulation.runners.tallies = PaddingTallies(setup.shape.slots, setup.shape.step_tokens)
    outcome = simulation.run()
    if outcome.refusals:
        raise RuntimeError(f"{len(outcome.refusals)} requests do not fit the runner: {outcome.refusals}")
    useful = sum(request.prompt_tokens + request.output_tokens - 1 for request in trace.requests)
    again = tallies.tokens - useful
    return [
        Waste("packed", None, again / tallies.mixed_tokens, again / tallies.tokens),
        Waste(
            "packed, in graphs",
            None,
            1 - (tallies.mixed_tokens - again) / tallies.mixed_in_graphs,
            1 - useful / tallies.in_graphs,
        ),
    ]


def measure(trace: Trace) -> list[Waste]:
    """Measures all ways on a trace, and prints each as soon as it is known."""
    rows: list[Waste] = []

    def add(waste: Waste) -> None:
        print(f"  {waste.way:18}{waste.batch or '':>6}{waste.prefill:>10.1%}{waste.to_the_end:>12.1%}", flush=True)
        rows.append(waste)

    print(f"{trace.name}: {len(trace.requests):,} requests\n  {'way':18}{'batch':>6}{'prefill':>10}{'to the end':>12}")
    for size in BATCHES:
        add(padded("arrival", trace.requests, size))
        add(padded("windowed", windowed(trace.requests, WINDOW * size), size))
        add(padded("sorted", by_length(trace.requests), size))
    for waste in packed(trace):
        add(waste)
    return rows


def plot(path: Path, results: list[dict[str, Any]]) -> None:
    """Draws the padding of prompts over the batch size, one panel per trace."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(results), 3.6), layout="constrained")
    for axes, result in zip(figure.subplots(1, len(results), sharey=True, squeeze=False)[0], results, strict=True):
        axes.axhspan(0.3, 0.5, color="0.9", label="30 to 50%")
        for way, style in (("arrival", "o-"), ("windowed", "s--"), ("sorted", "^:")):
            rows = [row for row in result["rows"] if row["way"] == way]
            axes.plot([row["batch"] for row in rows], [row["prefill"] for row in rows], style, label=f"padded, {way}")
        for way, color in (("packed, in graphs", "C3"), ("packed", "k")):
            (row,) = [row for row in result["rows"] if row["way"] == way]
            axes.axhline(row["prefill"], color=color, label=way)
        axes.set(title=result["trace"], xscale="log", xlabel="rows of a batch", ylim=(-0.02, 1))
        axes.set_xticks(BATCHES, [str(size) for size in BATCHES])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("positions wasted while prompts are computed")
    figure.axes[0].legend(fontsize="x-small")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, nargs="+", default=sorted(TRACES.glob("*_full.csv.gz")))
    parser.add_argument("--limit", type=int, help="only the first requests of each trace")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--plot", type=Path, help="also draw them to this file (.png, .svg, .pdf)")
    options = parser.parse_args()
    configure_logs("console", "warning")
    results: list[dict[str, Any]] = []
    for path in options.trace:
        trace = read_trace(path, options.limit)
        rows = [asdict(waste) for waste in measure(trace)]
        name = trace.name.removesuffix(".gz").removesuffix(".csv").removesuffix("_full")
        results.append({"trace": name, "requests": len(trace.requests), "rows": rows})
    if options.json:
        source = provenance("bench.policies.packed_prefill", ("numpy",))
        write_results(options.json, source, {"cost_model": COST_MODEL, "results": results})
    if options.plot:
        plot(options.plot, results)


if __name__ == "__main__":
    main()
