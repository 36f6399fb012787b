"""Prints every kernel's time, rate and share of the measured ceiling: `python -m bench.kernels`.

Times are medians over replays of CUDA graphs. The numbers go to bench/results/DATE-CARD-kernels.json.

Prefill attention is timed first and the card's ceilings last: after the ceilings, or after decode, some prefill cases
measure up to 12% slower in the same process (bench/NOTES.md, "Attention"). The reason is unknown.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch

from bench.common.gpu_timing import card
from bench.common.on_gpu import require_gpu
from bench.common.provenance import provenance, write_results
from bench.kernels import attention, small
from bench.kernels.attention_cases import PARTS as ATTENTION_PARTS
from bench.kernels.ceilings import ceilings, empty_node_microseconds
from bench.kernels.measurement import Measurement, as_json, row

_RESULTS = Path(__file__).parents[1] / "results"

SMALL = "small"
PARTS = (*ATTENTION_PARTS, SMALL)


def results_path(card_name: str) -> Path:
    """Returns bench/results/DATE-CARD-kernels.json, where CARD is the distinctive part of the card's name."""
    short = card_name.removeprefix("NVIDIA ").split()[0].lower()
    return _RESULTS / f"{datetime.now(UTC).date()}-{short}-kernels.json"


def measured(parts: Collection[str]) -> Iterator[Measurement]:
    """Measures the parts' cases: first prefill of all parts, then decode of all parts, then the small kernels."""
    of_attention = [ATTENTION_PARTS[part] for part in parts if part in ATTENTION_PARTS]
    for part in of_attention:
        yield from attention.prefill(part)
    for part in of_attention:
        yield from attention.decode(part)
    if SMALL in parts:
        yield from small.measurements()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, action="append", help="measure only this part; may be repeated")
    parser.add_argument("--output", type=Path, help="JSON file to write, instead of the default in bench/results")
    arguments = parser.parse_args()
    require_gpu()
    gpu = card()
    origin = provenance("bench.kernels", ["torch", "cupy"], gpu)
    print(f"{gpu['card']}, torch {torch.__version__}, {origin['date']}: {origin['command']}", flush=True)
    measurements = list(measured(arguments.part or PARTS))
    limits = ceilings()
    empty_node, launch = empty_node_microseconds(), small.eager_launch_microseconds()
    print(f"copy {limits['copy']:.2f} TB/s, read {limits['read']:.2f} TB/s, matmul {limits['matmul']:.0f} TFLOP/s")
    print(f"an empty graph node {empty_node:.2f} µs, a launch without a graph {launch:.2f} µs of the host")
    for measurement in measurements:
        print(row(measurement, limits))
    results = [as_json(measurement, limits) for measurement in measurements]
    path = arguments.output or results_path(gpu["card"])
    numbers = {"ceilings": limits, "empty_node_us": empty_node, "eager_launch_us": launch, "results": results}
    write_results(path, origin, numbers)
    print(f"written to {path}; repeat: {origin['command']}")


if __name__ == "__main__":
    main()
