"""Compares, on one card in one run, Roster's policies and transformers' continuous batching at several rates and with a
giant prompt.

    python -m bench.gpu_comparison --shape llama-3.1-8b --out OUT
    python -m bench.gpu_comparison --shape qwen3-0.6b --step-tokens 1536 --out OUT
    python -m bench.gpu_comparison.report OUT                                  (then makes the pages, on any machine)
    python -m bench.gpu_comparison --peer vllm --peer-site DIR --shape llama-3.1-8b --out OUT
                                          (beside vLLM's server instead; --peer vllm --help lists what it measures)
    python -m bench.gpu_comparison --table OUT/peer.jsonl                                  (Markdown of its records)
    python -m bench.gpu_comparison --device cpu --model smollm2 --loads fcfs=giant,0.5,2 orca=giant static=0.5
        transformers=0.5,giant --seconds 8 --drain 6 --prompt-divisor 16 --output-divisor 8 --giant 400
        --background 1 --slots 8 --kv-tokens 8192 --step-tokens 128 --page-tokens 16 --budget 150 --reserve 55
        --out OUT                                                                                           (no GPU)

| system | compared with `fcfs` it shows |
|---|---|
| `fcfs` | prompts in chunks of `--step-tokens` together with decoding rows |
| `orca` | whole prompts: the effect of chunks |
| `static` | request-level batches: the effect of joining at any step |
| `transformers` | its own continuous batching, in a separate process after the runner has ended |

Loads are rates of the conversation trace (the same requests and prompts for every system) and "giant": short chats with
one long prompt among them. Everything runs within `--budget` seconds: a case ends `--drain` seconds after its last
arrival, and unfinished requests are then cancelled and counted as such; a case without time left is skipped with a
message. Each run is appended to OUT/runs.jsonl.gz as soon as it ends, in the format of `roster bench`. Besides the
dependencies of the two services, this imports numpy and uvloop; the pages need matplotlib.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import uvloop

from bench.common.random_model import write_folder
from bench.gpu_comparison.budget import Budget
from bench.gpu_comparison.loads import TRANSFORMERS
from bench.gpu_comparison.options import parse_options, records_file
from bench.gpu_comparison.peers.command import compare
from bench.gpu_comparison.peers.tables import print_tables
from bench.gpu_comparison.roster_side import measure_policies
from bench.gpu_comparison.table import HEADING, print_table
from bench.gpu_comparison.transformers_process import TransformersProcess
from roster_client.bench.records.record_file import read_runs
from roster_client.client.errors import RosterError
from roster_client.serve.stack import NotReadyError, ServiceDiedError


def main() -> None:
    given = {argument.partition("=")[0] for argument in sys.argv[1:]}
    if "--table" in given:
        sys.exit(print_tables())
    if "--peer" in given:
        sys.exit(compare())
    options = parse_options()
    budget = Budget.of(options.budget)
    records = records_file(options)
    if records.exists():
        raise SystemExit(f"{records} exists already: choose another --out")
    ours = [case for case in options.cases if case.system != TRANSFORMERS]
    both = len(ours) < len(options.cases)
    with ExitStack() as open_:
        model = options.model
        if options.shape:
            folder = Path(open_.enter_context(tempfile.TemporaryDirectory())) / options.shape
            write_folder(options.shape, folder)
            model = str(folder)
        other = open_.enter_context(TransformersProcess(model)) if both else None
        print(HEADING, flush=True)
        if ours:
            kept = budget.without(options.reserve if other else 0.0)
            wait = other.wait_prepared if other else lambda: None
            try:
                uvloop.run(measure_policies(options, ours, model, kept, wait))
            except (RosterError, ServiceDiedError, NotReadyError) as error:
                print(f"Roster: {error}", flush=True)  # the other side can still be measured
        if other:
            other.measure(budget)
    if not records.exists():
        raise SystemExit("nothing was measured")
    runs = read_runs(records)
    print_table(runs)
    print(f"{len(runs)} of {len(options.cases)} cases; {options.budget - budget.left_s:.0f} s in all")


if __name__ == "__main__":
    main()
