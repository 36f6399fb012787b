"""Times what the host tier of the KV cache gives a served model, and what its copies cost the others.

    python -m bench.gpu_serving.host_tier --shape llama-3.1-8b
    python -m bench.gpu_serving.host_tier --device hash --prompt 256 --kv-tokens 1600 --host-kv-tokens 8192   (no GPU)

More prompts than the cache holds are sent in turns: at first they are computed, then they come back from the host pool.
Then other sequences decode: alone; while the prompts are loaded in turns; and beside as many requests that are hit in
the cache, which is what the requests themselves cost. Services and client are processes of one machine. Weights are
random. Numbers are printed as they are found; last where the time of a load went, and the times between results.
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
from bench.gpu_serving.load_parts import load_parts_ms, percentiles, step_gaps_ms
from bench.gpu_serving.service import NoService, Scheduling, Service, card_of
from bench.gpu_serving.step_record import StepRecord
from roster_client.client import RosterClient
from roster_client.client.admin import AdminClient
from roster_client.client.events import Delta
from roster_client.client.requests import Options
from roster_protos import admin_pb2

TEST_VOCABULARY = 512
PACKAGES = ("grpcio", "protobuf", "uvloop", "pyzmq", "numpy")
GPU_PACKAGES = ("torch", "cupy")
WARM_UP_TOKENS = 32
BLOCK_SIZE = 16


@dataclass(slots=True)
class Answer:
    """Times of one answer, in nanoseconds of the machine's monotonic clock."""

    sent: int
    tokens: list[int]
    cached_tokens: int

    @property
    def ttft_s(self) -> float:
        """Time to the first token, in seconds."""
        return (self.tokens[0] - self.sent) / 1e9


async def ask(client: RosterClient, prompt: list[int], max_tokens: int) -> Answer:
    """Sends a prompt; returns the times of its tokens."""
    options: Options = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0}
    sent = time.monotonic_ns()
    stream, times = client.generate(prompt, **options), list[int]()
    async for event in stream:
        if isinstance(event, Delta) and event.token_ids:
            times += [time.monotonic_ns()] * len(event.token_ids)
    completion = await stream.completion()
    return Answer(sent, times, 0 if completion.usage is None else completion.usage.cached_tokens)


def prompt_of(number: int, length: int, vocab_size: int) -> list[int]:
    """Returns the prompt of this number: random ordinary ids."""
    tokens: list[int] = np.random.default_rng(number).integers(256, vocab_size, length).tolist()
    return tokens


class Measurement:
    """One service's numbers, each printed as soon as it is known."""

    def __init__(self, arguments: argparse.Namespace, client: RosterClient, admin: AdminClient) -> None:
        self.result: dict[str, object] = {"shape": arguments.shape, "prompt_tokens": arguments.prompt}
        self.loaded: list[tuple[int, int]] = []
        """Requests that were loaded with nothing beside them: sent, first token."""
        self.spans: dict[str, tuple[int, int]] = {}
        """When rows decoded: alone, and beside loads and hits."""
        self._arguments, self._client, self._admin = arguments, client, admin
        count, size = arguments.prompt + 1, arguments.vocab_size
        self._prompts = [prompt_of(number, count, size) for number in range(arguments.prompts)]
        self._warm_up = prompt_of(999, count, size)

    def note(self, name: str, value: object) -> None:
        """Keeps and prints a number."""
        self.result[name] = value
        print(f"{name}: {json.dumps(value)}", flush=True)

    async def run(self) -> None:
        """Measures everything."""
        prompts = self._prompts
        await self._ask(self._warm_up)
        computed = [await self._ask(prompt) for prompt in prompts]
        self.note("ttft_computed_ms", percentiles([each.ttft_s for each in computed]))
        await self._offloaded()
        before = await self._tier()
        loaded = [await self._ask(prompt) for _ in range(self._arguments.rounds) for prompt in prompts]
        self.note("cached_tokens", dict(Counter(each.cached_tokens for each in loaded)))
        self.note("ttft_loaded_ms", percentiles(self._whole(loaded)))
        self.loaded = [(each.sent, each.tokens[0]) for each in loaded]
        self._note_rates("alone", before, await self._tier())
        hits = [await self._ask(prompts[-1]) for _ in prompts]
        self.note("ttft_hit_ms", percentiles(self._whole(hits)))
        await self._beside_rows()
        totals = (await self._admin.get_status()).totals
        tier = totals.host_tier
        self.note("swaps, preemptions, wasted_blocks", [totals.swaps, totals.preemptions, tier.wasted_blocks])
        self.note("dropped_blocks, demoted_blocks", [tier.dropped_blocks, tier.demoted_blocks])

    async def _beside_rows(self) -> None:
        """Rows alone, beside loads, and beside as many hits in the same time, which is what the requests cost."""
        alone = await self._rows("alone", 2000)
        before = await self._tier()
        beside_loads, answers = await self._rows_beside("loads", 2200, self._prompts, 0.0)
        after = await self._tier()
        self.note("loaded_blocks_beside_rows", after.loaded_blocks - before.loaded_blocks)
        self.note("ttft_loaded_beside_rows_ms", percentiles(self._whole(answers)))
        self._note_rates("beside rows", before, after)
        begin, end = self.spans["loads"]
        every_s = (end - begin) / 1e9 / max(1, len(answers))
        beside_hits, hits = await self._rows_beside("hits", 2100, self._prompts[-1:], every_s)
        self.note("requests beside rows", {"loads": len(answers), "hits": len(hits)})
        for name, gaps in (("loads", beside_loads), ("hits", beside_hits)):
            over = [round(float(np.percentile(gaps, q) / np.percentile(alone, q)), 3) for q in (50, 99)]
            self.note(f"itl_beside_{name} over alone, p50 and p99", over)

    async def _ask(self, prompt: list[int]) -> Answer:
        return await ask(self._client, prompt, 2)

    async def _tier(self) -> admin_pb2.HostTier:
        return (await self._admin.get_status()).totals.host_tier

    async def _offloaded(self) -> None:
        """Waits until no copy to the host pool is under way."""
        last = -1
        while last != (blocks := (await self._tier()).offloaded_blocks):
            last = blocks
            await asyncio.sleep(0.1)

    def _note_rates(self, name: str, before: admin_pb2.HostTier, after: admin_pb2.HostTier) -> None:
        """Notes GB/s of the copies between two states, by the runner's times of tickets."""
        rates = dict[str, float]()
        for kind in ("load", "offload"):
            copied, seconds = (
                getattr(after, field) - getattr(before, field) for field in (f"{kind}ed_bytes", f"{kind}_s")
            )
            rates[kind] = round(copied / seconds / 1e9, 1) if seconds else 0.0
        self.note(f"GB/s {name}", rates)

    def _whole(self, answers: Sequence[Answer]) -> list[float]:
        """Returns the times to the first token of answers of whose prompts at most the last block was computed."""
        least = self._arguments.prompt - BLOCK_SIZE
        return [each.ttft_s for each in answers if each.cached_tokens >= least]

    async def _rows(self, name: str, first: int) -> list[float]:
        """Decodes a few sequences; returns the gaps between their tokens, without the first ones, in seconds."""
        arguments = self._arguments
        prompts = [prompt_of(first + n, arguments.prompt // 8, arguments.vocab_size) for n in range(arguments.rows)]
        answers = await asyncio.gather(*(ask(self._client, prompt, arguments.tokens) for prompt in prompts))
        begin = max(each.tokens[WARM_UP_TOKENS] for each in answers)
        self.spans[name] = begin, min(each.tokens[-1] for each in answers)
        gaps = [gap for each in answers for gap in (np.diff(each.tokens[WARM_UP_TOKENS:]) / 1e9).tolist()]
        self.note(f"itl_{name}_ms", percentiles(gaps))
        return gaps

    async def _rows_beside(
        self, name: str, first: int, prompts: Sequence[list[int]], every_s: float
    ) -> tuple[list[float], list[Answer]]:
        """Sends the prompts in turns while others decode, at most one in `every_s`; returns the gaps of those and the
        answers."""
        over = asyncio.Event()

        async def send() -> list[Answer]:
            answers: list[Answer] = []
            while not over.is_set():
                next_at = time.monotonic() + every_s
                answers.append(await self._ask(prompts[len(answers) % len(prompts)]))
                await asyncio.sleep(max(0.0, next_at - time.monotonic()))
            return answers

        sending = asyncio.create_task(send())
        gaps = await self._rows(name, first)
        over.set()
        return gaps, await sending

    def note_steps(self, steps: StepRecord) -> None:
        """Notes what the record of the runner's steps says."""
        self.note("parts of a load, ms", load_parts_ms(steps, self.loaded))
        for name, (begin, end) in self.spans.items():
            self.note(f"steps, {name}", step_gaps_ms(steps.between(begin, end), self._arguments.rows))


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
    parser.add_argument("--rounds", type=int, default=3, help="turns in which each of them comes back")
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
            async with RosterClient(service.address) as client, AdminClient(service.admin_address) as admin:
                measurement = Measurement(arguments, client, admin)
                await measurement.run()
        measurement.note_steps(service.steps())
        return measurement.result


def main() -> None:
    arguments = parse_arguments()
    packages = (*PACKAGES, *(GPU_PACKAGES if arguments.device == "cuda" else ()))
    source = provenance("bench.gpu_serving.host_tier", packages)
    try:
        result = asyncio.run(run(arguments))
    except NoService as error:
        sys.exit(str(error))
    if arguments.json:
        write_results(arguments.json, source | {"card": card_of(arguments.device) or source["card"]}, result)


if __name__ == "__main__":
    main()
