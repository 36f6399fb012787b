"""Command line of the comparison with a peer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.common import quantization
from bench.common.random_model import ALL_SHAPES
from bench.gpu_comparison.peers.parts import DECODE_ROWS, LOADS, PEERS, ROSTER, SHAPE_LOADS, TRANSFORMERS, parse_parts

DESCRIPTION = """Compares Roster with vLLM on one card: the same requests at the same times to both servers.

    python -m bench.gpu_comparison --peer vllm --peer-site DIR --shape llama-3.1-8b --out OUT

Each part (a system under a load) is appended to OUT/peer.jsonl as soon as it ends. A later call with the same --out
measures only the parts that have no record for this card and these settings, so several short calls make one
comparison. A part that would not fit into --budget is not started. Output of the systems goes to OUT/SYSTEM.log.

Loads are decode (1, 8, 64, 256 rows), decode-wide (512, 1,024), at-once (512 conversations), RATE:COUNT (Poisson
arrivals) and padded:ROWS:COUNT (transformers' generate, batches of ROWS). Systems are roster and vllm with their
defaults, roster-tuned, vllm-1024 (--max-num-batched-tokens 1024), roster-deterministic, vllm-invariant
(VLLM_BATCH_INVARIANT=1) and transformers. --quantization fp8 (also with
--kv-cache-dtype fp8_e4m3) is that of both servers.
"""


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line; `parts` is the list of `Part` that `loads` names."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_comparison",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--peer", choices=("vllm",), required=True)
    parser.add_argument(
        "--peer-site", type=Path, metavar="DIR", help="folder with vLLM, or with the archive vllm_site.tar.xz.*"
    )
    parser.add_argument("--shape", choices=sorted(SHAPE_LOADS), required=True, help="random weights of this shape")
    parser.add_argument("--loads", nargs="+", metavar="SYSTEM=LOAD,LOAD", help="default: by shape")
    parser.add_argument("--out", type=Path, required=True, help="folder for peer.jsonl and the logs")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for this call (default: 540)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and its estimated seconds, and end")
    parser.add_argument("--device", choices=("cuda", "hash"), default="cuda", help="hash: to try the command on a CPU")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that compute the model together (default: 1)")
    parser.add_argument("--all-reduce", choices=("nccl", "one-shot"), default="nccl", help="of Roster's ranks")
    parser.add_argument("--client-processes", type=int, default=6, help="load generators (default: 6)")
    parser.add_argument("--requests", type=int, default=512, help="conversations of at-once (default: 512)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the arrivals (default: 0)")
    parser.add_argument("--prompt-divisor", type=int, default=1, help="divide prompt lengths by this (default: 1)")
    parser.add_argument("--output-divisor", type=int, default=1, help="outputs likewise (default: 1)")
    quantization.add_options(parser)
    options = parser.parse_args(arguments)
    try:
        given = options.loads or SHAPE_LOADS[options.shape]
        options.parts = list(dict.fromkeys(part for text in given for part in parse_parts(text)))
        if any(part.system in PEERS for part in options.parts):
            quantization.peer_flags(options)
    except ValueError as error:
        parser.error(str(error))
    if options.ranks > 1 and any(part.system == ROSTER and part.kind in DECODE_ROWS for part in options.parts):
        parser.error("bench.tensor_parallel.steps times decode steps of Roster's ranks: leave them out of --loads")
    if options.device != "cuda":
        for part in options.parts:
            if part.system == TRANSFORMERS or (part.system == ROSTER and part.kind in DECODE_ROWS):
                parser.error(f"{part.title} needs a GPU: leave it out of --loads with --device {options.device}")
    assert set(SHAPE_LOADS) <= set(ALL_SHAPES) and set(LOADS) >= {part.system for part in options.parts}
    return options


def settings(options: argparse.Namespace) -> dict[str, object]:
    """Returns the settings that tell records of one comparison from those of another."""
    names = ("requests", "seed", "prompt_divisor", "output_divisor", "client_processes", "device")
    given = {name: getattr(options, name) for name in names} | quantization.runner_flags(options)
    return given | ({"ranks": options.ranks, "all_reduce": options.all_reduce} if options.ranks > 1 else {})
