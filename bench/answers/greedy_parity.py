"""Compares a real model's greedy tokens over gRPC between two devices.

    python -m bench.answers.greedy_parity --device cpu --write cpu.json
    python -m bench.answers.greedy_parity --device cuda --reference cpu.json --json result.json

Starts both services, sends chat prompts all at once and keeps each answer's tokens with the log-probabilities of the
two likeliest candidates. A CPU computes in float32, a GPU in 16 bits: where two candidates lie closer than the
resolution of 16 bits, the answers may diverge, and that is not an error. The first difference of each answer is printed
with both devices' candidates; the command fails if one is not a near tie.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.common.provenance import provenance, write_results
from bench.gpu_serving.service import NoService, Scheduling, Service, card_of
from roster_client.client import RosterClient
from roster_client.client.requests import Message
from roster_client.demo.prompts import DEMO_REQUESTS

PACKAGES = ("torch", "numpy", "tokenizers")
MAX_TOKENS = 64
NEAR_TIE = 0.25
"""Nats between the reference's two candidates below which 16 bits may prefer the second one: bfloat16 keeps 8 bits, and
the logits of the likeliest tokens are 15 to 25."""
QUESTIONS = (
    *(request.question for request in DEMO_REQUESTS),
    "Why is the sky blue?",
    "List five animals that live in the sea.",
    "Write a haiku about a train.",
    "What is 17 plus 25?",
    "Explain what a hash table is to a child.",
    "Translate 'good morning' into French, German and Spanish.",
    "Who wrote Hamlet, and when?",
    "Give me a recipe for pancakes.",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens of one answer, and for each position the two likeliest tokens as (id, log-probability)."""

    tokens: list[int]
    candidates: list[list[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class Difference:
    """First position at which an answer differs from the reference."""

    question: int
    place: int
    reference: list[tuple[int, float]]
    here: list[tuple[int, float]]

    @property
    def gap(self) -> float:
        """Nats between the reference's candidates."""
        return self.reference[0][1] - self.reference[1][1]

    @property
    def is_near_tie(self) -> bool:
        """Whether this device chose the reference's second candidate, which is within `NEAR_TIE` of its first."""
        return self.gap < NEAR_TIE and self.here[0][0] == self.reference[1][0]

    def line(self) -> str:
        """Returns the line to print."""
        sides = " | ".join(
            f"{name} " + ", ".join(f"{token}: {logprob:.4f}" for token, logprob in side)
            for name, side in (("reference", self.reference), ("here", self.here))
        )
        verdict = "near tie" if self.is_near_tie else "NOT A TIE"
        return f"question {self.question}, token {self.place}: {sides}; gap {self.gap:.4f}, {verdict}"


async def answers(arguments: argparse.Namespace, folder: Path) -> list[Answer]:
    """Serves the model, sends all questions at once and returns the answers."""
    flags = {"device": arguments.device, "model": arguments.model, "slots": len(QUESTIONS), "kv_tokens": 16384}
    async with Service(folder, flags, profiled=False) as service:
        await service.schedule(Scheduling("fcfs", "{}", 2))
        async with RosterClient(service.address) as client:
            streams = [
                client.generate([Message("user", question)], temperature=0.0, max_tokens=MAX_TOKENS, logprobs=2)
                for question in QUESTIONS
            ]
            completions = await asyncio.gather(*[stream.completion() for stream in streams])
    return [
        Answer(list(choice.token_ids), [list(logprobs.top) for logprobs in choice.logprobs])
        for completion in completions
        for choice in completion.choices
    ]


def differences(reference: list[Answer], here: list[Answer]) -> list[Difference]:
    """Returns the first difference of each answer that has one."""
    found = []
    for question, (expected, actual) in enumerate(zip(reference, here, strict=True)):
        pairs = enumerate(zip(expected.tokens, actual.tokens, strict=False))
        place = next((place for place, (a, b) in pairs if a != b), None)
        if place is not None:
            found.append(Difference(question, place, expected.candidates[place], actual.candidates[place]))
    return found


def read(path: Path) -> list[Answer]:
    """Reads a file that --write wrote."""
    entries = json.loads(path.read_text())["answers"]
    return [
        Answer(entry["tokens"], [[(token, logprob) for token, logprob in place] for place in entry["candidates"]])
        for entry in entries
    ]


def compare(arguments: argparse.Namespace, here: list[Answer], source: dict[str, Any]) -> int:
    """Prints and writes the comparison. Returns the exit status."""
    reference = read(arguments.reference)
    found = differences(reference, here)
    same = sum(len(answer.tokens) for answer in reference) - sum(
        len(reference[difference.question].tokens) - difference.place for difference in found
    )
    total = sum(len(answer.tokens) for answer in reference)
    for difference in found:
        print(difference.line())
    print(
        f"{len(here) - len(found)} of {len(here)} answers are the same; {same} of {total} tokens before any difference"
    )
    if arguments.json:
        lines = [difference.line() for difference in found]
        numbers = {"answers": len(here), "same": len(here) - len(found), "tokens": total, "tokens_before": same}
        write_results(arguments.json, source, {**numbers, "differences": lines})
    return 0 if all(difference.is_near_tie for difference in found) else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--write", type=Path, help="keep the answers as a reference")
    parser.add_argument("--reference", type=Path, help="compare with a file that --write wrote")
    parser.add_argument("--json", type=Path, help="also write the comparison to this file")
    arguments = parser.parse_args()
    source = provenance("bench.answers.greedy_parity", PACKAGES if arguments.device == "cpu" else (*PACKAGES, "cupy"))
    try:
        with tempfile.TemporaryDirectory() as folder:
            here = asyncio.run(answers(arguments, Path(folder)))
    except NoService as error:
        sys.exit(str(error))
    source |= {"card": card_of(arguments.device) or source["card"]}
    if arguments.write:
        write_results(arguments.write, source, {"answers": [asdict(answer) for answer in here]})
    if arguments.reference:
        sys.exit(compare(arguments, here, source))


if __name__ == "__main__":
    main()
