"""The command line, which both processes of the comparison read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.common.random_model import SHAPES
from bench.gpu_comparison.loads import GIANT, TRANSFORMERS, parse_cases
from roster_client.bench.records.summary import Targets

SHAPE_LOADS = {
    "llama-3.1-8b": ("fcfs=giant,4,10,16,22", "orca=giant,10,16", "static=4,10", "transformers=4,giant,10"),
    "qwen3-0.6b": ("fcfs=giant,15,50,80,110", "orca=giant,50,80", "static=15,50", "transformers=15,giant,50"),
}
"""From what one H200 serves easily to more than it serves; the most telling first, as the budget may end."""
GPU_SCHEDULER_FLAGS = ("busy_poll_us=3000", "plan_lead_ms=3", "flush_ms=2")
"""For a runner on the same machine, with cores to spare."""


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """`loads` become a list of `Case` in `cases`."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_comparison", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape")
    what.add_argument("--model", help="a model's folder or name; needs --loads")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="folder of runs.jsonl.gz; reports come there too")
    parser.add_argument("--budget", type=float, default=270.0, help="seconds for everything; what is left out is said")
    parser.add_argument("--reserve", type=float, default=80.0, help="seconds of these kept for transformers")
    loads = parser.add_argument_group("loads")
    loads.add_argument("--loads", nargs="+", metavar="SYSTEM=RATE,RATE,giant", help="default: by shape")
    loads.add_argument("--seconds", type=float, default=10.0, help="of arrivals at each rate")
    loads.add_argument("--drain", type=float, default=8.0, help="seconds after the last arrival, then all is given up")
    loads.add_argument("--background", type=float, default=4.0, help="chats a second beside the giant prompt")
    loads.add_argument("--giant", type=int, default=12_000, help="tokens of the giant prompt")
    loads.add_argument("--giant-seconds", type=float, default=6.0, help="of chats, before and after the giant prompt")
    loads.add_argument("--prompt-divisor", type=int, default=1, help="prompts of the trace this much shorter")
    loads.add_argument("--output-divisor", type=int, default=1, help="outputs likewise")
    loads.add_argument("--ttft-target-ms", type=float, default=1000.0, help="for goodput")
    loads.add_argument("--itl-target-ms", type=float, default=50.0, help="for goodput: mean of a request")
    sizes = parser.add_argument_group("sizes, the same for all systems")
    sizes.add_argument("--step-tokens", type=int, default=1024, help="chunks of fcfs, and transformers' steps")
    sizes.add_argument("--slots", type=int, default=256)
    sizes.add_argument("--kv-tokens", type=int, default=250_000)
    sizes.add_argument("--page-tokens", type=int, default=256, help="of a page of transformers' cache")
    sizes.add_argument("--threads", type=int, default=0, help="of torch on a CPU, 0: all cores")
    sizes.add_argument("--scheduler-flag", action="append", metavar="NAME=VALUE", help="instead of those for a GPU")
    options = parser.parse_args(arguments)
    given = options.loads or SHAPE_LOADS.get(options.shape or "", ())
    if not given:
        parser.error(f"--model needs --loads, for example --loads fcfs=1,2,{GIANT} {TRANSFORMERS}=1")
    try:
        options.cases = [case for text in given for case in parse_cases(text)]
    except ValueError as error:
        parser.error(str(error))
    return options


def targets(options: argparse.Namespace) -> Targets:
    """Of the goodput."""
    return Targets(options.ttft_target_ms / 1e3, options.itl_target_ms / 1e3)


def records_file(options: argparse.Namespace) -> Path:
    """The one file of all runs."""
    path: Path = options.out / "runs.jsonl.gz"
    return path
