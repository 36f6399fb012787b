"""On one GPU, in one run: our policies at several rates, transformers' continuous batching, and a giant prompt.

    python -m bench.gpu_comparison --shape llama-3.1-8b --rates 4 8 14 18 24 --out results-8b
    python -m bench.gpu_comparison --shape qwen3-0.6b --rates 15 30 55 80 120 --out results-0.6b
    python -m bench.gpu_comparison --device cpu --model smollm2 --rates 0.2 --seconds 20 --prompt-divisor 16
        --output-divisor 8 --giant 400 --slots 8 --kv-tokens 16384 --out trial                           (no GPU)

| policy | what its difference to `fcfs` shows |
|---|---|
| `fcfs` | prompts in chunks of `--step-tokens` beside decoding rows |
| `orca` | whole prompts: what chunks are for |
| `static` | request-level batches: what joining at any step is for |

Each policy serves the conversation trace at each rate (the same requests and prompts everywhere), then `--background`
requests a second of short chats while one prompt of `--giant` tokens comes in the middle. transformers' continuous
batching gets the same workloads in a process of its own once the runner is gone. Everything lands under `--out` as runs
of `roster bench`; `bench.compare` then sets them side by side, which is what the last lines printed are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.baselines.workload_file import write_workload
from bench.random_model import SHAPES, write_folder
from roster_client.bench.prompts import token_prompts
from roster_client.bench.record_file import read_run
from roster_client.bench.workload import Arrivals, make_workload, repeated
from roster_client.stack import Endpoints, Stack
from scheduler_svc.simulator.trace import Trace, TraceRequest, read_trace

TRACE = Path(__file__).parent / "traces" / "azure_conv_2023_busiest2000.csv"
POLICIES = ("fcfs", "orca", "static")
READY_TIMEOUT_S = 900.0
SEED, SALT = 1, 1
CHAT = (200, 200)
"""Prompt and output tokens of the chats that a giant prompt disturbs; divided as the trace is."""
DISTURBED_S = 10.0
"""Time after the giant prompt's arrival in which its neighbours' pauses are looked at."""


@dataclass(frozen=True, slots=True)
class Case:
    """One load, by name."""

    name: str
    trace: Trace
    rate: float | None
    """Of Poisson arrivals; None: those of the trace."""


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """The rates, then the giant prompt."""
    rows = read_trace(TRACE).divided(options.prompt_divisor, options.output_divisor)
    for rate in options.rates:
        yield Case(f"rate-{rate:g}", repeated(rows, max(16, round(rate * options.seconds))), rate)
    count = max(4, round(options.background * options.seconds))
    prompt, output = max(1, CHAT[0] // options.prompt_divisor), max(1, CHAT[1] // options.output_divisor)
    chats = [TraceRequest(number / options.background, prompt, output) for number in range(count)]
    giant = TraceRequest(giant_at_s(options), options.giant, 1)
    both = sorted([*chats, giant], key=lambda request: request.arrival_s)
    yield Case("giant", Trace("chats and a giant prompt", tuple(both)), None)


def giant_at_s(options: argparse.Namespace) -> float:
    """When the giant prompt comes."""
    return float(options.seconds) / 2


async def serve(options: argparse.Namespace, folder: str) -> int:
    """Our policies on one runner, one after another; returns the model's vocabulary."""
    runner: dict[str, object] = {"model": folder, "device": options.device}
    runner |= {"weights": "random"} if options.shape else {}
    runner |= {name: value for name in ("slots", "kv_tokens") if (value := getattr(options, name))}
    flags = [scheduling(options, policy) for policy in options.policies]
    async with Stack(Endpoints.free(), scheduler={"prefix_sharing": False, **flags[0]}, runner=runner) as stack:
        for number, policy in enumerate(options.policies):
            if number:
                await stack.swap_scheduler(**flags[number])
            model = await stack.wait_ready(READY_TIMEOUT_S)
            for case in cases(options):
                await asyncio.to_thread(bench_serve, options, case, policy, stack.endpoints)
    return int(model.vocab_size)


def scheduling(options: argparse.Namespace, policy: str) -> dict[str, object]:
    """The scheduler's flags; only `fcfs` is held to chunks, the others take whole prompts."""
    parameters = {"step_tokens": options.step_tokens} if policy == "fcfs" else {}
    return {"policy": policy, "policy_parameters": json.dumps(parameters)}


def bench_serve(options: argparse.Namespace, case: Case, policy: str, endpoints: Endpoints) -> None:
    """One case through `roster bench serve`."""
    trace = options.out / f"{case.name}.csv"
    rows = [f"{one.arrival_s:.6f},{one.prompt_tokens},{one.output_tokens}" for one in case.trace.requests]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    command = [sys.executable, "-m", "roster_client.cli", "bench", "serve", f"--server={endpoints.listen}"]
    command += [f"--admin={endpoints.admin_listen}", f"--trace={trace}", f"--requests={len(rows)}", f"--name={policy}"]
    command += [f"--seed={SEED}", f"--prompt-salt={SALT}", f"--out={options.out / case.name / policy}"]
    command += [f"--rate={case.rate}"] if case.rate else []
    subprocess.run(command, check=True)


def baseline(options: argparse.Namespace, folder: str, vocab_size: int) -> None:
    """transformers' continuous batching over the same cases."""
    for case in cases(options):
        arrivals = Arrivals(rate=case.rate) if case.rate else Arrivals()
        workload = make_workload(case.trace, arrivals, token_prompts(vocab_size, SALT), seed=SEED)
        file = options.out / f"{case.name}.workload.jsonl"
        write_workload(file, workload)
        command = [sys.executable, "-m", "bench.baselines", "continuous", f"--workload={file}", f"--model={folder}"]
        command += [f"--device={options.device}", f"--seed={SEED}", f"--step-tokens={options.step_tokens}"]
        command += [f"--slots={options.slots or 256}", f"--kv-tokens={options.kv_tokens or 500_000}"]
        command += [f"--out={options.out / case.name / 'transformers' / 'run.jsonl.gz'}"]
        subprocess.run(command, check=True)


def disturbance(options: argparse.Namespace) -> None:
    """Prints the chats' longest pauses beside the giant prompt, and without it."""
    at_s = giant_at_s(options)
    print(
        f"pauses of the chats, ms: before a prompt of {options.giant:,} tokens, and in the {DISTURBED_S:g} s after it"
    )
    for path in sorted((options.out / "giant").glob("*/*.jsonl.gz")):
        before, after = [], []
        for request in read_run(path).requests:
            for moment, gap in zip(request.message_s[1:], request.gaps_s, strict=True):
                (before if moment < at_s else after if moment < at_s + DISTURBED_S else []).append(gap * 1e3)
        numbers = (f"p99 {np.percentile(gaps, 99):7.1f}, longest {max(gaps):8.1f}" for gaps in (before, after) if gaps)
        print(f"  {path.parent.name:14} {';   '.join(numbers)}")


def model_folder(options: argparse.Namespace) -> str:
    """What the runner and transformers load: a shape without weights, or the model that was named."""
    if options.shape is None:
        return str(options.model)
    folder: Path = options.out / options.shape
    write_folder(options.shape, folder)
    return str(folder)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape")
    what.add_argument("--model", help="a model's folder or name")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--rates", type=float, nargs="+", required=True, help="requests a second, one after another")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load")
    parser.add_argument("--step-tokens", type=int, default=1024, help="chunks of `fcfs`, and transformers' steps")
    parser.add_argument("--background", type=float, default=4.0, help="chats a second beside the giant prompt")
    parser.add_argument("--giant", type=int, default=16_000, help="tokens of the giant prompt")
    parser.add_argument("--prompt-divisor", type=int, default=1)
    parser.add_argument("--output-divisor", type=int, default=1)
    parser.add_argument("--slots", type=int, help="of the runner; default: its own choice")
    parser.add_argument("--kv-tokens", type=int, help="of the runner; default: what fits")
    parser.add_argument("--out", type=Path, required=True, help="folder of all runs")
    return parser.parse_args()


def main() -> None:
    """Everything, then how to look at it."""
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    folder = model_folder(options)
    vocab_size = asyncio.run(serve(options, folder))
    baseline(options, folder, vocab_size)
    disturbance(options)
    for case in cases(options):
        print(f"python -m bench.compare {options.out / case.name}/*/*.jsonl.gz --plot {options.out / case.name}.png")


if __name__ == "__main__":
    main()
