"""Compares serving with and without drafts in alternating pairs, on one runner: are drafts never slower?

    python -m bench.gpu_serving.pairs --shape llama-3.1-8b --drafter ngram --json ngram.json
    python -m bench.gpu_serving.pairs --shape llama-3.1-8b --drafter oracle --json oracle.json
    python -m bench.gpu_serving.pairs --device hash --pairs 1 --phase-s 0.5      (no GPU)

Both sides of a pair send the same requests at the same times: Poisson arrivals whose rate rises in phases. Those of
one side forbid drafts (`speculate: false`), so that nothing is restarted in between. Every second pair begins with the
other side. Weights are random, with certain texts that repeat nothing: `ngram` finds no more in them than in random
text, and `oracle` knows them and is right with probability 0.7.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.provenance import provenance, write_results
from bench.common.random_model import ALL_SHAPES
from bench.common.traces import CONVERSATIONS
from bench.gpu_serving import report
from bench.gpu_serving.__main__ import GPU_PACKAGES, PACKAGES, TEST_VOCABULARY, WARM_UP, runner_flags
from bench.gpu_serving.loads import PROMPT_CAP
from bench.gpu_serving.service import NoService, Scheduling, Service, card_of, parameters

ORACLE_RIGHT = 0.7
BARS = {("ttft_ms", "p50"): 1.03, ("tpot_ms", "p50"): 1.03, ("tpot_ms", "p99"): 1.10}
"""Largest ratios, with drafts to without, that count as not slower."""

Sides = dict[bool, dict[str, Any]]
"""Numbers of a pair's requests, with drafts (True) and without."""


def ratios(pairs: Sequence[Sides]) -> dict[str, list[float]]:
    """Returns, for each measure of BARS, the ratio with drafts to without of each pair."""
    return {
        f"{measure} {share}": [pair[True][measure][share] / pair[False][measure][share] for pair in pairs]
        for measure, share in BARS
    }


def verdict(pairs: Sequence[Sides]) -> list[str]:
    """Returns a line for each measure: its ratios, their median, and whether that is within the bar."""
    lines = []
    for (name, values), bar in zip(ratios(pairs).items(), BARS.values(), strict=True):
        median = float(np.median(values))
        each = " ".join(f"{value:.3f}" for value in values)
        lines.append(f"{name:12} {each}   median {median:.3f}, bar {bar:.2f} {'met' if median <= bar else 'MISSED'}")
    return lines


async def measure(arguments: argparse.Namespace, folder: Path) -> list[Sides]:
    """Runs all pairs on one service."""
    vocab_size = ALL_SHAPES[arguments.shape]["vocab_size"] if arguments.device == "cuda" else TEST_VOCABULARY
    recorder = ["--certain"] if arguments.device == "cuda" else []
    recorder += [f"--drafts-right={ORACLE_RIGHT}"] if arguments.drafter == "oracle" and recorder else []
    flags = runner_flags(arguments, folder) | {"draft": "ngram"}
    common = [f"--vocab-size={vocab_size}", f"--trace={CONVERSATIONS.name}", f"--prompt={PROMPT_CAP}"]
    pairs: list[Sides] = []
    async with Service(folder, flags, False, recorder) as service:
        await service.schedule(Scheduling(None, parameters(), None, ("--no-prefix-sharing",)))
        await service.load("warm-up", [*common, *WARM_UP])
        for number in range(arguments.pairs):
            sides: Sides = {}
            for drafts in (False, True) if number % 2 == 0 else (True, False):
                load = [*common, "--rates", *map(str, arguments.rates), f"--phase-s={arguments.phase_s}"]
                load += [
                    f"--seed={number}",
                    f"--sessions={arguments.sessions}",
                    *([] if drafts else ["--no-speculate"]),
                ]
                record = await service.load(f"pair-{number}-{drafts}", load)
                sides[drafts] = report.client_numbers(record)
                print(report.progress_line(f"pair {number}, {'drafts' if drafts else 'none'}", record), flush=True)
            pairs.append(sides)
    return pairs


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="llama-3.1-8b")
    parser.add_argument("--device", choices=("cuda", "hash"), default="cuda", help="hash is for trying out the script")
    parser.add_argument("--drafter", choices=("ngram", "oracle"), default="ngram")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=[2, 8, 14, 22], help="requests a second, by phase")
    parser.add_argument("--phase-s", type=float, default=1.5, help="seconds of each rate")
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--max-step-tokens", type=int, default=8192)
    parser.add_argument("--gpu-memory", type=float, default=0.6)
    parser.add_argument("--runner-flag", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", type=Path)
    parser.set_defaults(quantization="none", quantize_head=False, kv_cache_dtype="auto")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    source = provenance("bench.gpu_serving.pairs", [*PACKAGES, *(GPU_PACKAGES if arguments.device == "cuda" else ())])
    try:
        with tempfile.TemporaryDirectory() as folder:
            pairs = asyncio.run(measure(arguments, Path(folder)))
    except NoService as error:
        sys.exit(str(error))
    source |= {"card": card_of(arguments.device) or source["card"]}
    print(f"\n{source['command']}\n{source['card']}")
    print("\n".join(verdict(pairs)))
    if arguments.json:
        rows = [{"with": pair[True], "without": pair[False]} for pair in pairs]
        write_results(arguments.json, source, {"shape": arguments.shape, "drafter": arguments.drafter, "pairs": rows})


if __name__ == "__main__":
    main()
