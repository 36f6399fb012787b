"""Drains one of two runners: `python -m bench.moves --shape llama-3.1-8b --sequences 16 --prompt 4096`.

Both runners are processes of this machine, on one GPU with half of its memory each, where they take turns of some 2 ms:
pauses are measured, step times are not. With `--gpus 2` each has its own, and KV moves from one to the other. The
sequences decode on one runner; it receives SIGTERM; they go on at the
other one. `pause` is a stream's longest gap between tokens from then on, beside its usual gap. No position may be
computed again: the prefill tokens of both runners are those of the prompts, and one for each sequence that moved.
`--again` computes the same answers a second time, on the second runner alone, and counts those that are equal, and the
equal leading tokens of the others: these differ where logits nearly tie, wherever that is.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.fleet import Fleet
from bench.common.on_gpu import require_gpu
from bench.common.provenance import on_card, provenance, write_results
from bench.common.random_model import ALL_SHAPES, write_folder
from bench.gpu_serving.service import card_of
from roster_client.client import RosterClient
from roster_client.client.admin import AdminClient
from roster_client.client.events import Delta

ROOM = 5
"""Quarters of what the sequences take that each cache has: one of 64 x 8,192 tokens of an 8B fits once on an H200."""
WORDS = ("move", "lost", "leaves", "unmapped")
"""Of lines of the processes' logs that are kept."""


def runner_settings(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Returns the settings that both runners share."""
    settings: dict[str, object] = {
        "device": arguments.device,
        "slots": 2 * arguments.sequences,
        "kv_tokens": ROOM * arguments.sequences * (arguments.prompt + arguments.tokens) // 4,
        "move_listen": "127.0.0.1:0",
        "move_transport": arguments.transport,
        "log_level": "info",
    }
    if arguments.device == "cuda":
        write_folder(arguments.shape, folder / arguments.shape)
        memory = 0.45 if arguments.gpus == 1 else 0.9
        settings |= {"model": folder / arguments.shape, "weights": "random", "gpu_memory": memory}
    else:
        settings["test_backend"] = {"step_ms": 5, "eos_probability": 0}
    return settings


async def stream(client: RosterClient, prompt: list[int], num_tokens: int, arrivals: list[float]) -> list[int]:
    """Generates greedily; appends the time of each token to `arrivals`. Returns the tokens."""
    tokens: list[int] = []
    async with client.generate(prompt, max_tokens=num_tokens, ignore_eos=True, temperature=0.0) as generation:
        async for event in generation:
            if isinstance(event, Delta):
                tokens += event.token_ids
                arrivals += [time.monotonic()] * len(event.token_ids)
    return tokens


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs the drain once and returns the figures."""
    roles = {"b": "decode"}  # so that all prompts go to the first one
    fleet = Fleet(runner_settings(arguments, folder), gpus=arguments.gpus, roles=roles, log_level="debug")
    rng = np.random.default_rng(0)
    vocabulary = ALL_SHAPES[arguments.shape]["vocab_size"] if arguments.device == "cuda" else 256
    prompts = [rng.integers(0, vocabulary, arguments.prompt).tolist() for _ in range(arguments.sequences)]
    try:
        for name in ("scheduler", "a", "b"):
            await fleet.start(name)
        ends = fleet.endpoints
        async with RosterClient(ends.listen) as client, AdminClient(ends.admin_listen) as admin:
            await fleet.ready(client, admin, 2)
            arrivals: list[list[float]] = [[] for _ in prompts]
            streams = [
                asyncio.create_task(stream(client, prompt, arguments.tokens, times))
                for prompt, times in zip(prompts, arrivals, strict=True)
            ]
            while not all(len(times) >= 32 for times in arrivals):
                await asyncio.sleep(0.01)
            held = {entry.id: entry.running for entry in (await admin.get_status(deadline_s=10)).runners}
            drained_at = time.monotonic()
            drain_s = await fleet.end("a")
            left = [len(times) for times in arrivals]
            answers = await asyncio.gather(*streams)
            status = await admin.get_status(deadline_s=10)
            again = await asyncio.gather(
                *(stream(client, prompt, arguments.tokens, []) for prompt in prompts if arguments.again)
            )
        if any(len(tokens) != arguments.tokens for tokens in answers):
            raise RuntimeError("a stream ended early")
        found = figures(arrivals, drained_at, drain_s, held, left, fleet, status)
        return found | {"equal": [num_equal(*pair) for pair in zip(answers, again, strict=False)]}
    finally:
        await fleet.stop()


def num_equal(first: list[int], second: list[int]) -> int:
    """Returns the number of equal leading tokens."""
    return next((index for index, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]), len(first))


def figures(
    arrivals: list[list[float]],
    drained_at: float,
    drain_s: float,
    held: dict[str, int],
    left: list[int],
    fleet: Fleet,
    status: Any,
) -> dict[str, Any]:
    """Returns what is reported."""
    pauses, usual = [], []
    for times in arrivals:
        gaps = np.diff(times)
        after = np.array(times[1:]) > drained_at
        window = after & (np.array(times[1:]) < drained_at + drain_s + 1.0)
        pauses.append(float(gaps[window].max(initial=0.0)) * 1e3)
        usual.append(float(np.median(gaps[~after])) * 1e3)
    return {
        "held": held,
        "drain_s": drain_s,
        "tokens_at_the_end": left,
        "pause_ms": {"worst": max(pauses), "median": statistics.median(pauses)},
        "usual_gap_ms": statistics.median(usual),
        "moves": str(status.moves).split("\n"),
        "copy_gb_s": sum(status.moves.bytes.values()) / status.moves.copy_s / 1e9 if status.moves.copy_s else 0.0,
        "prefill_tokens": status.totals.prefill_tokens,
        "lines": [line for line in fleet.lines if any(word in line for word in WORDS)],
    }


def main() -> None:
    """Prints the figures, and writes them to --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "hash"), default="cuda")
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="llama-3.1-8b")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each answer")
    parser.add_argument(
        "--transport", choices=("auto", "tcp", "nixl"), default="auto", help="the runners' --move-transport"
    )
    parser.add_argument("--again", action="store_true", help="compare the answers with a second computation")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    require_gpu(arguments.device)
    source = provenance("bench.moves", ["torch", "pyzmq", *(["cupy"] if arguments.device == "cuda" else [])])
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(arguments, Path(folder)))
    for name, value in found.items():
        print(f"{name}: {value}")
    if arguments.json is not None:
        source = on_card(source, card_of(arguments.device))
        write_results(arguments.json, source, {"shape": arguments.shape, **found})


if __name__ == "__main__":
    main()
