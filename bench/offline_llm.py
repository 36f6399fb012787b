"""Compares `LLM.generate` with the asyncio client on the same services: many requests at once, time to the last token.

    python -m bench.offline_llm --model FOLDER --requests 512 --prompt-tokens 256 --output-tokens 256

Each repetition measures both, each with new random prompts, so that no prompt is in the prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time

from roster_client import LLM, RosterClient

Prompts = list[list[int]]


def offline(llm: LLM, prompts: Prompts, tokens: int) -> float:
    """Returns the seconds that `LLM.generate` takes."""
    began = time.perf_counter()
    answers = llm.generate(prompts, max_tokens=tokens, ignore_eos=True, temperature=0.0)
    seconds = time.perf_counter() - began
    check([len(answer.token_ids) for answer in answers], tokens)
    return seconds


async def by_client(llm: LLM, prompts: Prompts, tokens: int) -> float:
    """Returns the seconds that the client's session takes."""
    async with RosterClient(llm.address) as client, client.session() as session:
        began = time.perf_counter()
        streams = [session.generate(ids, max_tokens=tokens, ignore_eos=True, temperature=0.0) for ids in prompts]
        answers = await asyncio.gather(*[stream.completion() for stream in streams])
        seconds = time.perf_counter() - began
    check([len(answer.choices[0].token_ids) for answer in answers], tokens)
    return seconds


def check(counts: list[int], tokens: int) -> None:
    """Raises RuntimeError if an answer has another length."""
    if set(counts) != {tokens}:
        raise RuntimeError(f"answers of {sorted(set(counts))} tokens, expected {tokens}")


def main() -> None:
    """Runs the comparison and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--settings", type=json.loads, default={}, help='Settings of the services, {"slots": 64}.')
    given = parser.parse_args()
    chosen = random.Random(7)
    with LLM(given.model, **given.settings) as llm:

        def prompts() -> Prompts:
            vocabulary = range(min(llm.model.vocab_size, 30_000))
            return [chosen.choices(vocabulary, k=given.prompt_tokens) for _ in range(given.requests)]

        offline(llm, prompts(), given.output_tokens)  # warm-up
        pairs = []
        for _ in range(given.repeats):
            pairs.append(
                (
                    offline(llm, prompts(), given.output_tokens),
                    asyncio.run(by_client(llm, prompts(), given.output_tokens)),
                )
            )
            print(f"LLM.generate {pairs[-1][0]:.2f} s, client {pairs[-1][1]:.2f} s", flush=True)
    ours, theirs = (statistics.median(one) for one in zip(*pairs, strict=True))
    print(f"medians: LLM.generate {ours:.2f} s, client {theirs:.2f} s, ratio {ours / theirs:.3f}")


if __name__ == "__main__":
    main()
