"""Runs transformers' continuous batching on the same cases, in a separate process because the runner's memory must be
free.

The process imports its libraries and makes its prompts while Roster's services start, then reports that it is prepared.
It touches the card only after it has read the remaining seconds from stdin. Its runs are appended to the same file.
"""

from __future__ import annotations

import argparse
import sys

import torch
from transformers import AutoConfig, PreTrainedModel

from bench.baselines import IN_PROCESS
from bench.baselines.continuous_batching import BatchSizes, ContinuousBatching, continuous_batching
from bench.baselines.loading import load
from bench.common.on_gpu import require_gpu
from bench.gpu_comparison.budget import Budget
from bench.gpu_comparison.loads import SEED, TRANSFORMERS, Case, warm_up, workloads
from bench.gpu_comparison.options import parse_options, records_file
from bench.gpu_comparison.roster_side import card, command, settings
from bench.gpu_comparison.table import line
from bench.gpu_comparison.transformers_process import PREPARED
from roster_client.bench.load.workload import Workload
from roster_client.bench.records.record import Run
from roster_client.bench.records.record_file import append_run
from roster_client.bench.runs.run_header import run_header
from runner_svc.catalog.source import model_folder
from runner_svc.settings.runner_settings import default_cache_folder

WARM_UP_REQUESTS = 4


def measure_case(
    options: argparse.Namespace,
    system: ContinuousBatching,
    model: PreTrainedModel,
    case: Case,
    workload: Workload,
    run_s: float,
) -> Run:
    """Measures one case."""
    header = run_header(
        "transformers",
        IN_PROCESS,
        workload,
        model=options.shape or options.model,
        card=card(options.device),
        command=command(),
        seed=SEED,
        warmup_requests=WARM_UP_REQUESTS,
        settings={
            **settings(options, run_s),
            "slots": options.slots,
            "step_tokens": options.step_tokens,
            "page_tokens": options.page_tokens,
            "attention": model.config._attn_implementation,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
    )
    return Run(header, system.run(workload.requests, run_s))


def main() -> None:
    """Runs the cases; the arguments are the model, then the comparison's own."""
    name = sys.argv.pop(1)  # the remaining arguments repeat the run
    options = parse_options()
    cases = [case for case in options.cases if case.system == TRANSFORMERS]
    folder = model_folder(name, default_cache_folder(), lambda *_: None)
    vocab_size = AutoConfig.from_pretrained(folder).vocab_size
    loads, first = workloads(options, cases, vocab_size), warm_up(options, WARM_UP_REQUESTS, vocab_size)
    if options.threads:
        torch.set_num_threads(options.threads)
    print(PREPARED, flush=True)
    seconds = sys.stdin.readline()
    if not seconds:
        return  # the parent process has ended
    budget = Budget.of(float(seconds))
    require_gpu(
        options.device, kernels=False
    )  # not earlier, because it touches the card on which Roster was being measured
    model = load(folder, options.device)
    sizes = BatchSizes(options.slots, options.step_tokens, options.kv_tokens, options.page_tokens)
    with continuous_batching(model, sizes) as system:
        system.run(first.requests)
        print(f"transformers is ready, {budget.left_s:.0f} s are left", flush=True)
        for case in cases:
            run_s = budget.run_s(case, loads[case.load], options.drain)
            if run_s is not None:
                run = measure_case(options, system, model, case, loads[case.load], run_s)
                append_run(records_file(options), run)
                print(line(run), flush=True)


if __name__ == "__main__":
    main()
