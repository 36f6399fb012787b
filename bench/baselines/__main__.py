"""Runs a baseline over a workload's requests and writes the run, in the format of `roster bench`.

    python -m bench.baselines padded --workload requests.jsonl --out run.jsonl [--model smollm2] [--slots 8]
    python -m bench.baselines continuous --workload requests.jsonl --out run.jsonl --step-tokens 512 --kv-tokens 16384

`--workload` is a file written by `bench.baselines.workload_file.write_workload`, with the same token ids for every
system. Arrival times are kept (open loop): a request that arrives while the system is busy waits. Decoding is greedy,
without stop tokens, so each request gets exactly its output tokens. The first two requests are served before the run
with a few output tokens, and are not recorded.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from bench.baselines import IN_PROCESS
from bench.baselines.continuous_batching import BatchSizes, ContinuousBatching, continuous_batching
from bench.baselines.loading import load
from bench.baselines.padded_generate import PaddedGenerate
from bench.baselines.workload_file import read_workload
from bench.common.on_gpu import require_gpu
from roster_client.bench.load.workload import LoadRequest, Workload
from roster_client.bench.records.record import RequestRecord, Run, RunHeader
from roster_client.bench.records.record_file import write_run
from roster_client.bench.runs import provenance
from roster_client.bench.runs.run_header import run_header
from runner_svc.catalog.source import model_folder
from runner_svc.settings.runner_settings import default_cache_folder

NAMES = {"padded": "transformers, padded batches", "continuous": "transformers, continuous"}
WARM_UP_REQUESTS, WARM_UP_TOKENS = 2, 16
System = PaddedGenerate | ContinuousBatching


def started(options: argparse.Namespace, model: PreTrainedModel) -> AbstractContextManager[System]:
    """Returns the requested system."""
    if options.system == "padded":
        return nullcontext(PaddedGenerate(model, options.slots))
    return continuous_batching(model, BatchSizes(options.slots, options.step_tokens, options.kv_tokens))


def measured(options: argparse.Namespace, workload: Workload) -> list[RequestRecord]:
    """Runs the warm-up, then the workload; returns the workload's records."""
    torch.set_num_threads(options.threads)
    model = load(model_folder(options.model, default_cache_folder(), lambda *_: None), options.device)
    with started(options, model) as system:
        system.run(warm_up(workload))
        return system.run(workload.requests)


def warm_up(workload: Workload) -> list[LoadRequest]:
    """Returns the workload's first requests with at most `WARM_UP_TOKENS` output tokens each."""
    first = workload.requests[:WARM_UP_REQUESTS]
    return [replace(request, output_tokens=min(WARM_UP_TOKENS, request.output_tokens)) for request in first]


def header(options: argparse.Namespace, workload: Workload) -> RunHeader:
    """Returns the run's header."""
    settings = {
        "slots": options.slots,
        "threads": options.threads,
        "dtype": "float32" if options.device == "cpu" else "bfloat16",
    }
    if options.system == "continuous":
        settings |= {"step_tokens": options.step_tokens, "kv_tokens": options.kv_tokens}
    return run_header(
        NAMES[options.system],
        IN_PROCESS,
        workload,
        model=options.model,
        card=provenance.cpu_card() if options.device == "cpu" else provenance.gpu_card() or options.device,
        command=provenance.command_line("python -m bench.baselines"),
        seed=options.seed,
        warmup_requests=WARM_UP_REQUESTS,
        settings=settings,
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=sorted(NAMES))
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the run's file")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--slots", type=int, default=8, help="rows of a padded batch (padded), or concurrent sequences (continuous)"
    )
    parser.add_argument("--step-tokens", type=int, default=512, help="maximum positions per step (continuous)")
    parser.add_argument("--kv-tokens", type=int, default=16384, help="size of the KV cache in tokens (continuous)")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--seed", type=int, default=0, help="seed of the workload, for the run's header")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    require_gpu(options.device, kernels=False)
    workload = read_workload(options.workload)
    write_run(options.out, Run(header(options, workload), measured(options, workload)))


if __name__ == "__main__":
    main()
