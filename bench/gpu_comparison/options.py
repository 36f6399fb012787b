"""Command line of both processes of the comparison."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.common.random_model import ALL_SHAPES
from bench.gpu_comparison.loads import GIANT, TRANSFORMERS, parse_cases
from roster_client.bench.records.summary import Targets

SHAPE_LOADS = {
    "llama-3.1-8b": ("fcfs=giant,4,10,16,22", "orca=giant,10,16", "static=4,10", "transformers=4,giant,10"),
    "qwen3-0.6b": ("fcfs=giant,15,50,80,110", "orca=giant,50,80", "static=15,50", "transformers=15,giant,50"),
}
"""Loads from below to above the capacity of one H200; the most informative come first, as the budget may run out."""
GPU_SCHEDULER_FLAGS = ("busy_poll_us=3000", "plan_lead_ms=3", "flush_ms=2")
"""Scheduler flags for a runner on the same machine with spare cores."""


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line; `cases` is the list of `Case` that `loads` names."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_comparison",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="--peer vllm --help: the comparison with vLLM's server; --table FILE...: the tables of its records",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", choices=sorted(ALL_SHAPES), help="random weights of this shape")
    what.add_argument("--model", help="a model's folder or name; needs --loads")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs.jsonl.gz and the reports")
    parser.add_argument(
        "--budget", type=float, default=270.0, help="seconds for everything; skipped cases are reported"
    )
    parser.add_argument("--reserve", type=float, default=80.0, help="seconds of the budget reserved for transformers")
    loads = parser.add_argument_group("loads")
    loads.add_argument("--loads", nargs="+", metavar="SYSTEM=RATE,RATE,giant", help="default: by shape")
    loads.add_argument("--seconds", type=float, default=10.0, help="duration of arrivals at each rate")
    loads.add_argument(
        "--drain", type=float, default=8.0, help="seconds after the last arrival; then all requests are cancelled"
    )
    loads.add_argument("--background", type=float, default=4.0, help="chats per second in addition to the giant prompt")
    loads.add_argument("--giant", type=int, default=12_000, help="tokens of the giant prompt")
    loads.add_argument(
        "--giant-seconds", type=float, default=6.0, help="seconds of chats, with the giant prompt in the middle"
    )
    loads.add_argument("--prompt-divisor", type=int, default=1, help="divide the trace's prompt lengths by this")
    loads.add_argument("--output-divisor", type=int, default=1, help="outputs likewise")
    loads.add_argument("--ttft-target-ms", type=float, default=1000.0, help="for goodput")
    loads.add_argument("--itl-target-ms", type=float, default=50.0, help="goodput target: mean ITL of a request")
    sizes = parser.add_argument_group("sizes, the same for all systems")
    sizes.add_argument(
        "--step-tokens", type=int, default=1024, help="chunk size of fcfs, and step size of transformers"
    )
    sizes.add_argument("--slots", type=int, default=256)
    sizes.add_argument("--kv-tokens", type=int, default=250_000)
    sizes.add_argument("--page-tokens", type=int, default=256, help="tokens per page of transformers' cache")
    sizes.add_argument("--threads", type=int, default=0, help="torch threads on a CPU; 0: all cores")
    sizes.add_argument(
        "--scheduler-flag",
        action="append",
        metavar="NAME=VALUE",
        help="scheduler flags, instead of the defaults for a GPU",
    )
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
    """Returns the goodput targets."""
    return Targets(options.ttft_target_ms / 1e3, options.itl_target_ms / 1e3)


def records_file(options: argparse.Namespace) -> Path:
    """Returns the path of the file with all runs."""
    path: Path = options.out / "runs.jsonl.gz"
    return path
