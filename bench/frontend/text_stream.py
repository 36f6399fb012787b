"""Measures the cost of turning tokens into deltas: CPU-µs per token of ChoiceText, push and take, in one process.

    python -m bench.frontend.text_stream [--tokenizer tokenizer.json]

Without `--tokenizer` the built-in byte-level one is used. Prints the best of several runs, to reduce the effect of a
busy machine.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from bench.common.provenance import provenance
from roster_protos import inference_pb2, plan_pb2
from runner_svc.backends.byte_tokenizer import build_byte_tokenizer
from scheduler_svc.front.text.tokenizer import ModelText

ENGLISH = "The quick brown fox jumps over the lazy dog; in 1984 it said hello, and so on. "
MIXED = "naïve 中文字符 👍🏽 family 👩‍👩‍👧‍👦, "
STOPS: dict[str, list[str]] = {
    "no stop strings": [],
    "3, rarely begun": ["\n\n", "Zulu:", "</s>"],
    "4, begun by every word": ["e!", "o!", "t!", "a!"],
}
BATCHES = (1, 2, 4, 8)
RUNS = 20


def best_us(text: ModelText, tokens: list[int], stops: list[str], batch: int) -> float:
    """Returns CPU-µs per token if tokens come `batch` at a time and each batch is taken at once."""
    request = inference_pb2.GenerateRequest()
    request.stop.strings.extend(stops)
    best = float("inf")
    for _ in range(RUNS):
        choice = text.choice(request)
        begin = time.process_time()
        for start in range(0, len(tokens), batch):
            choice.push(tokens[start : start + batch])
            choice.take_piece()
        best = min(best, time.process_time() - begin)
    return best / len(tokens) * 1e6


def main() -> None:
    """Prints one line per text and set of stop strings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; default: one token per byte")
    path = parser.parse_args().tokenizer
    serialized = path.read_bytes() if path else build_byte_tokenizer().to_str().encode()
    text = ModelText(plan_pb2.Model(tokenizer=serialized, vocab_size=1 << 31, context_length=1 << 20))
    print(
        "\n".join(f"{key}: {value}" for key, value in provenance("bench.frontend.text_stream", ["tokenizers"]).items())
    )
    print(f"{'CPU-µs per token, tokens at a time:':44}" + "".join(f"{batch:>7}" for batch in BATCHES))
    for name, sample in (("English", ENGLISH), ("mixed scripts", MIXED)):
        tokens = text.encode(sample * 60)
        for label, stops in STOPS.items():
            cells = "".join(f"{best_us(text, tokens, stops, batch):7.2f}" for batch in BATCHES)
            print(f"{name + ', ' + label:44}{cells}")


if __name__ == "__main__":
    main()
