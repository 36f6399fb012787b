"""Times what the host tier of the KV cache gives a served model, and what its copies cost the others.

    python -m bench.gpu_serving.host_tier --shape llama-3.1-8b
    python -m bench.gpu_serving.host_tier --device hash --prompt 256 --kv-tokens 1600 --host-kv-tokens 8192   (no GPU)

More prompts than the cache holds are sent in turns: at first they are computed, then they come back from the host pool.
Then other sequences decode: alone; beside a prompt that is sent again and again and hit in the cache, which is what the
requests themselves cost; and while the prompts are loaded in turns. Services and client are processes of one machine.
Weights are random.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.common.provenance import provenance, write_results
from bench.common.random_model import ALL_SHAPES, write_folder
from bench.gpu_serving.service import NoService, Scheduling, Service, card_of
from roster_client.client import RosterClient
from roster_client.client.admin import AdminClient
from roster_client.client.events import Delta
from roster_client.client.requests import Options

TEST_VOCABULARY = 512
PACKAGES = ("grpcio", "protobuf", "uvloop", "pyzmq", "numpy")
GPU_PACKAGES = ("torch", "cupy")
WARM_UP_TOKENS = 32
BLOCK_SIZE = 16


@dataclass(slots=True)
class Answer:
    """Times of one answer."""

    ttft_s: float
    cached_tokens: int
    token_times_s: list[float]


async def ask(client: RosterClient, prompt: list[int], max_tokens: int) -> Answer:
    """Sends a prompt; returns the times of its tokens."""
    options: Options = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0}
    begin_s = time.perf_counter()
    stream, times_s = client.generate(prompt, **options), list[float]()
    async for event in stream:
        if isinstance(event, Delta) and event.token_ids:
            times_s += [time.perf_counter()] * len(event.token_ids)
    completion = await stream.completion()
    cached = 0 if completion.usage is None else completion.usage.cached_tokens
    return Answer(times_s[0] - begin_s, cached, times_s)


def whole(answers: Sequence[Answer], arguments: argparse.Namespace) -> list[float]:
    """Returns the times to the first token of those answers of whose prompts at most the last block was computed."""
    least = arguments.prompt - BLOCK_SIZE
    return [each.ttft_s for each in answers if each.cached_tokens >= least]


def prompt_of(number: int, length: int, vocab_size: int) -> list[int]:
    """Returns the prompt of this number: random ordinary ids."""
    tokens: list[int] = np.random.default_rng(number).integers(256, vocab_size, length).tolist()
    return tokens


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Returns the median and the 99th percentile, in milliseconds."""
    if not values:
        return {"count": 0}
    return {"count": len(values), **{f"p{q}": round(1e3 * float(np.percentile(values, q)), 3) for q in (50, 99)}}


async def neighbours(client: RosterClient, arguments: argparse.Namespace, first: int) -> list[float]:
    """Decodes a few sequences; returns the gaps between their tokens, without the first ones, in seconds."""
    prompts = [prompt_of(first + n, arguments.prompt // 8, arguments.vocab_size) for n in range(arguments.rows)]
    answers = await asyncio.gather(*(ask(client, prompt, arguments.tokens) for prompt in prompts))
    return [gap for each in answers for gap in np.diff(each.token_times_s[WARM_UP_TOKENS:]).tolist()]


async def beside(
    client: RosterClient, arguments: argparse.Namespace, first: int, prompts: Sequence[list[int]]
) -> tuple[list[float], list[Answer]]:
    """Sends the prompts in turns while others decode; returns the gaps of those and the answers."""
    over = asyncio.Event()

    async def send() -> list[Answer]:
        answers: list[Answer] = []
        while not over.is_set():
            answers.append(await ask(client, prompts[len(answers) % len(prompts)], 2))
        return answers

    sending = asyncio.create_task(send())
    gaps = await neighbours(client, arguments, first)
    over.set()
    return gaps, await sending


async def measure(arguments: argparse.Namespace, service: Service) -> dict[str, object]:
    """Returns all numbers."""
    prompts = [prompt_of(number, arguments.prompt + 1, arguments.vocab_size) for number in range(arguments.prompts)]
    result: dict[str, object] = {"shape": arguments.shape, "prompt_tokens": arguments.prompt}
    async with RosterClient(service.address) as client, AdminClient(service.admin_address) as admin:
        await ask(client, prompt_of(999, arguments.prompt + 1, arguments.vocab_size), 2)
        computed = [await ask(client, prompt, 2) for prompt in prompts]
        loaded = [await ask(client, prompt, 2) for _ in range(arguments.rounds) for prompt in prompts]
        hits = [await ask(client, prompts[-1], 2) for _ in prompts]
        result["ttft_computed_ms"] = percentiles([each.ttft_s for each in computed])
        result["ttft_loaded_ms"] = percentiles(whole(loaded, arguments))
        result["ttft_hit_ms"] = percentiles(whole(hits, arguments))
        result["cached_tokens"] = dict(Counter(each.cached_tokens for each in loaded))
        result["itl_alone_ms"] = percentiles(await neighbours(client, arguments, 2000))
        gaps, _ = await beside(client, arguments, 2100, prompts[-1:])
        result["itl_beside_hits_ms"] = percentiles(gaps)
        before = (await admin.get_status()).totals.host_tier
        gaps, answers = await beside(client, arguments, 2200, prompts)
        result["itl_beside_loads_ms"] = percentiles(gaps)
        result["ttft_loaded_beside_rows_ms"] = percentiles(whole(answers, arguments))
        totals = (await admin.get_status()).totals
        after = totals.host_tier
        result["loaded_blocks_beside_rows"] = after.loaded_blocks - before.loaded_blocks
        result |= {"swaps": totals.swaps, "preemptions": totals.preemptions, "wasted_blocks": after.wasted_blocks}
        for name, copied, seconds in (
            ("load_gb_s", after.loaded_bytes, after.load_s),
            ("offload_gb_s", after.offloaded_bytes, after.offload_s),
        ):
            result[name] = round(copied / seconds / 1e9, 1) if seconds else 0.0
        result["dropped_blocks"], result["demoted_blocks"] = after.dropped_blocks, after.demoted_blocks
    return result


def runner_flags(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Returns the runner's settings."""
    flags: dict[str, object] = {"device": arguments.device, "slots": 32, "context_length": 2 * arguments.prompt}
    flags |= {"kv_tokens": arguments.kv_tokens, "host_kv_tokens": arguments.host_kv_tokens}
    if arguments.device == "cuda":
        write_folder(arguments.shape, folder / arguments.shape)
        return flags | {"model": folder / arguments.shape, "weights": "random"}
    return flags | {"test_backend": json.dumps({"vocab_size": TEST_VOCABULARY, "step_ms": 2, "eos_probability": 0.0})}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_serving.host_tier", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "hash"))
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(ALL_SHAPES))
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of a prompt that comes back")
    parser.add_argument("--prompts", type=int, default=14, help="how many there are; the cache holds fewer")
    parser.add_argument("--rounds", type=int, default=2, help="turns in which each of them comes back")
    parser.add_argument("--rows", type=int, default=8, help="sequences that decode beside them")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each of those")
    parser.add_argument("--kv-tokens", type=int, default=98_304)
    parser.add_argument("--host-kv-tokens", type=int, default=131_072)
    parser.add_argument("--json", type=Path, help="file for the result")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    arguments.vocab_size = ALL_SHAPES[arguments.shape]["vocab_size"] if on_gpu else TEST_VOCABULARY
    return arguments


async def run(arguments: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        service = Service(Path(folder), runner_flags(arguments, Path(folder)), profiled=False)
        async with service:
            await service.schedule(Scheduling(None, "{}", None, ("--runner-timeout-s=60",)))
            return await measure(arguments, service)


def main() -> None:
    arguments = parse_arguments()
    packages = (*PACKAGES, *(GPU_PACKAGES if arguments.device == "cuda" else ()))
    source = provenance("bench.gpu_serving.host_tier", packages)
    try:
        result = asyncio.run(run(arguments))
    except NoService as error:
        sys.exit(str(error))
    print(json.dumps(result, indent=1))
    if arguments.json:
        write_results(arguments.json, source | {"card": card_of(arguments.device) or source["card"]}, result)


if __name__ == "__main__":
    main()
