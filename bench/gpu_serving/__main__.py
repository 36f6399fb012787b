"""Measures serving under the real scheduler: `roster-scheduler`, a runner and the clients are processes on one machine.

    python -m bench.gpu_serving --shape llama-3.1-8b --offline ljf:1024 --online 8:160:1024 14:260:1024 18:330:1024
        --policy sjf --policy-parameters '{"ageing_s":2,"prompt_weight":1,"finish_tokens":1152}'
        --scheduler-flag=--busy-poll-us=3000 --scheduler-flag=--plan-lead-ms=2 --scheduler-flag=--flush-ms=2
        --scheduler-flag=--runner-timeout-s=60
    python -m bench.gpu_serving --shape qwen3-0.6b --offline fcfs:8192,depth=3 ljf:8192,depth=3
        --online 30:300:1536 55:550:1536 --decode 64
        --policy sjf --policy-parameters '{"ageing_s":0.5,"prompt_weight":1}'
        --scheduler-flag=--busy-poll-us=3000 --scheduler-flag=--plan-lead-ms=3 --scheduler-flag=--flush-ms=2
        --scheduler-flag=--runner-timeout-s=60
    python -m bench.gpu_serving --device null --offline fcfs:512 --online 50:60:256 --decode 8 --requests 40    (no GPU)

Weights are random. Requests are the first rows of a conversation trace, with prompts capped at 4,096 tokens, greedy,
with exactly the trace's output lengths, sent over gRPC (Session). There are three kinds of load: all at once; Poisson
arrivals from an open-loop client (RATE:REQUESTS:STEP_TOKENS); and a full batch that decodes, to measure how long the
GPU idles between steps. TTFT counts from the time at which a request was due. A load may add settings after commas:
`depth`, `plan_lead_ms`, or any parameter of the policy (`8:160:1024,finish_tokens=1152`). Without STEP_TOKENS and
`--policy`, the scheduler's own policy plans; without REQUESTS, arrivals last `--seconds`. Each `--variant` repeats all
loads with other flags; all of them are measured on one runner. The scheduler is restarted between loads whose settings
differ; the runner keeps running. Results of `--profile` go to a separate file, NAME-profiled, beside that of `--json`.

    python -m bench.gpu_serving --shape llama-3.1-8b --online 8 14 18 --variant 'default:'
        --variant 'latency: --profile=latency' --variant 'fcfs: --policy fcfs --online 8::1024 14::1024'
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.common import quantization
from bench.common.provenance import provenance, write_results
from bench.common.random_model import ALL_SHAPES, write_folder
from bench.common.traces import CONVERSATIONS
from bench.gpu_serving import report
from bench.gpu_serving.client import ClientRecord
from bench.gpu_serving.loads import PROMPT_CAP, Load, add_options, loads_of
from bench.gpu_serving.service import NoService, Scheduling, Service, card_of
from bench.gpu_serving.step_record import StepRecord

CONTEXT_LENGTH = 8192
PROFILE_S = 0.4
WARM_UP = ("--requests=30", "--rate=30")
PACKAGES = ("grpcio", "protobuf", "uvloop", "pyzmq", "numpy")
GPU_PACKAGES = ("torch", "cupy")
TEST_VOCABULARY = 512
DEPTH = 2
"""Plans in flight for the times of the host's parts, if the profile decides."""
PROFILER_GAP = "profiler_gap_us"


def runner_flags(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Returns the runner's settings."""
    flags: dict[str, object] = {"device": arguments.device, "slots": arguments.slots, "context_length": CONTEXT_LENGTH}
    flags |= {"max_step_tokens": arguments.max_step_tokens}
    if arguments.device == "cuda":
        write_folder(arguments.shape, folder / arguments.shape)
        flags |= {"model": folder / arguments.shape, "weights": "random", "gpu_memory": arguments.gpu_memory}
    else:
        flags |= {"kv_tokens": 1 << 20, "test_backend": json.dumps({"vocab_size": TEST_VOCABULARY, "step_ms": 2})}
    return flags | quantization.runner_flags(arguments) | dict(flag.split("=", 1) for flag in arguments.runner_flag)


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs all loads on one runner; reads the runner's record after it has ended."""
    vocab_size = ALL_SHAPES[arguments.shape]["vocab_size"] if arguments.device == "cuda" else TEST_VOCABULARY
    loads, records = loads_of(arguments), list[ClientRecord]()
    recorder = [f"--drafts-right={load.drafts_right}" for load in loads if load.drafts_right is not None][:1]
    recorder += ["--certain"] if arguments.certain else []
    profiled = arguments.profile and arguments.device == "cuda"
    service = Service(folder, runner_flags(arguments, folder), profiled, recorder)
    async with service:
        for number, load in enumerate(loads):
            new = number == 0 or load.scheduling != loads[number - 1].scheduling
            await service.schedule(load.scheduling)
            if new and load.batch is None:
                warm_up = [
                    *WARM_UP,
                    f"--vocab-size={vocab_size}",
                    f"--trace={CONVERSATIONS.name}",
                    f"--prompt={PROMPT_CAP}",
                ]
                await service.load("warm-up", warm_up)
            if load.drafts_right is not None:
                await service.draft_right(load.drafts_right)
            profiled = load.profiled and arguments.device == "cuda"
            flags = load.client_flags(vocab_size, arguments.sessions)
            records.append(await service.load(f"load-{number}", flags, PROFILE_S if profiled else 0.0))
            print(report.progress_line(load.name, records[-1]), flush=True)
    steps = service.steps()
    numbers = [numbers_of(load, record, steps) for load, record in zip(loads, records, strict=True)]
    for load, row in zip(loads, numbers, strict=True):
        if load.profiled and arguments.device == "cuda":
            times_us, names = service.kernels()
            gaps = report.boundary_gaps(times_us, names) if len(names) else times_us[:, 0]
            row |= {PROFILER_GAP: report.percentiles(gaps), "profiler_steps": len(gaps)}
    return {"ready_s": service.ready_s, "loads": numbers}


def numbers_of(load: Load, record: ClientRecord, steps: StepRecord) -> dict[str, Any]:
    """Returns all numbers of a load."""
    depth = load.scheduling.depth or DEPTH
    during = steps.between(int(record.due.min()), int(record.delta_times.max()))
    row = {"load": load.name, "rate": load.rate, "scheduler": vars_of(load.scheduling), **report.client_numbers(record)}
    row["runner"] = report.step_numbers(during, depth)
    if not load.profiled:
        row["sampled_steps"] = report.sampled_steps(during)
    if load.batch is not None:
        row["decode"] = report.decode_numbers(during, load.batch, depth)
    return row


def vars_of(scheduling: Scheduling) -> dict[str, Any]:
    return {"policy": scheduling.policy, "parameters": scheduling.policy_parameters, "depth": scheduling.depth}


def write_loads(path: Path, source: dict[str, Any], measured: dict[str, Any]) -> None:
    """Writes the loads; profiled ones go to a separate file, which a run without profiled loads leaves unchanged."""
    profiled = [load for load in measured["loads"] if PROFILER_GAP in load]
    others = [load for load in measured["loads"] if PROFILER_GAP not in load]
    write_results(path, source, {**measured, "loads": others})
    if profiled:
        write_results(path.with_stem(f"{path.stem}-profiled"), source, {**measured, "loads": profiled})


def print_tables(shape: str, loads: list[dict[str, Any]]) -> None:
    """Prints the tables, last so that they stay on the screen."""
    decode = [load for load in loads if "decode" in load]
    trace = [load for load in loads if "decode" not in load]
    report.print_offline(shape, [load for load in trace if not load["rate"]])
    report.print_online(shape, [load for load in trace if load["rate"]])
    report.print_decode(shape, decode)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="qwen3-0.6b")
    parser.add_argument(
        "--device",
        choices=("cuda", "hash", "null"),
        default="cuda",
        help="devices other than cuda are for trying out the script",
    )
    add_options(parser)
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="'NAME: --FLAG ...'",
        help="repeat the loads with these flags: those above, others are the scheduler's; can be given several times",
    )
    parser.add_argument("--profile", action="store_true", help="repeat the decode loads under torch's profiler")
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--max-step-tokens", type=int, default=8192)
    parser.add_argument("--gpu-memory", type=float, default=0.92)
    parser.add_argument("--sessions", type=int, default=4, help="gRPC streams that share the requests")
    parser.add_argument("--certain", action="store_true", help="random weights with certain texts")
    parser.add_argument("--runner-flag", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", type=Path)
    quantization.add_options(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    source = provenance("bench.gpu_serving", [*PACKAGES, *(GPU_PACKAGES if arguments.device == "cuda" else ())])
    try:
        with tempfile.TemporaryDirectory() as folder:
            measured = asyncio.run(measure(arguments, Path(folder)))
    except NoService as error:
        sys.exit(str(error))
    source |= {"card": card_of(arguments.device) or source["card"]}
    print(f"\n{source['command']}\n{source['card']}; ready in {measured['ready_s']:.1f} s")
    print_tables(arguments.shape, measured["loads"])
    if arguments.json:
        write_loads(arguments.json, source, {"shape": arguments.shape, **measured})


if __name__ == "__main__":
    main()
