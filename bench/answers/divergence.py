"""Measures how far quantized weights move a model's answers: `python -m bench.answers.divergence [FOLDER ...]`.

The plain `--model` answers the demo's questions greedily in float32 on the CPU. Each format then gets the same texts:
those of `--formats`, which quantize the plain model while it is loaded, and the checkpoints in the FOLDERs. The result
is the KL divergence from the plain model's distribution of the next token, at every position, in nats, and the share of
positions with the same likeliest token.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.common.provenance import provenance, write_results
from roster_client.demo.prompts import DEMO_REQUESTS
from runner_svc.attention.cpu import CpuAttention
from runner_svc.backends.decoder_loading import load_decoder
from runner_svc.catalog.source import model_folder
from runner_svc.decoder.cpu_decoder import DecoderInputs
from runner_svc.decoder.served_decoder import ServedDecoder
from runner_svc.interface.kv_cache import KVCache
from runner_svc.settings.runner_settings import default_cache_folder
from runner_svc.weights.on_load import OnLoad

FORMATS = {
    "fp8": OnLoad("fp8"),
    "fp8-block": OnLoad("fp8-block"),
    "int4": OnLoad("int4"),
    "head": OnLoad(head=True),
    "fp8+head": OnLoad("fp8", head=True),
}
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Divergence:
    """Of one format, over all positions."""

    format: str
    mean: float
    median: float
    largest: float
    same: float  # share of positions

    @classmethod
    def between(cls, name: str, plain: Sequence[Tensor], quantized: Sequence[Tensor]) -> Divergence:
        """Compares the logits [T, vocab_size] of each text."""
        kl, same = [], []
        for one, other in zip(plain, quantized, strict=True):
            expected, found = one.log_softmax(-1), other.log_softmax(-1)
            kl.append((expected.exp() * (expected - found)).sum(-1))
            same.append(one.argmax(-1) == other.argmax(-1))
        values = torch.cat(kl)
        return cls(
            name,
            float(values.mean()),
            float(values.median()),
            float(values.max()),
            float(torch.cat(same).float().mean()),
        )


@torch.inference_mode()
def logits_of(decoder: ServedDecoder, tokens: list[int]) -> Tensor:
    """Returns the logits at all positions of a text, [T, vocab_size]."""
    config, count = decoder.config, len(tokens)
    blocks = -(-count // _BLOCK)
    cache = KVCache(config, blocks, _BLOCK, torch.float32, torch.device("cpu"))
    attention = CpuAttention(cache, config.num_heads, config.num_kv_heads, config.attention_layers)
    plan = attention.plan(
        np.zeros(1, np.int32), np.array([count], np.int32), np.arange(1, blocks + 1, dtype=np.int32)[None]
    )
    positions = torch.arange(count)
    lengths = torch.full((count,), count)
    inputs = DecoderInputs(torch.tensor(tokens), positions, positions + _BLOCK, lengths)
    return decoder.logits(decoder.forward(inputs, cache, partial(attention.run, plan)))


def texts(folder: Path, decoder: ServedDecoder, num_tokens: int) -> list[list[int]]:
    """Returns the questions, each with the plain model's first tokens of an answer."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = []
    for request in DEMO_REQUESTS:
        tokens = tokenizer.encode(f"<|im_start|>user\n{request.question}<|im_end|>\n<|im_start|>assistant\n").ids
        for _ in range(num_tokens):
            tokens.append(int(logits_of(decoder, tokens)[-1].argmax()))
        found.append(tokens)
    return found


def measure(arguments: argparse.Namespace) -> Iterator[Divergence]:
    """Yields the divergence of each format."""
    folder = model_folder(arguments.model, default_cache_folder(), _no_progress)
    plain = load_decoder(folder, "roster", _no_progress)
    asked = texts(folder, plain, arguments.tokens)
    expected = [logits_of(plain, tokens) for tokens in asked]
    print(f"{sum(map(len, asked))} positions", flush=True)
    del plain
    loads = [(name, folder, FORMATS[name]) for name in arguments.formats]
    loads += [(path.name, path, OnLoad()) for path in arguments.folders]
    for name, path, on_load in loads:
        decoder = load_decoder(path, "roster", _no_progress, on_load)
        yield Divergence.between(name, expected, [logits_of(decoder, tokens) for tokens in asked])


def _no_progress(what: str, share: float) -> None:
    """Ignores progress reports."""


def line(row: Divergence) -> str:
    """Returns a row of the table."""
    return f"| `{row.format}` | {row.mean:.3f} | {row.median:.3f} | {row.largest:.2f} | {row.same:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="quantized checkpoint of the model")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--formats", nargs="*", choices=sorted(FORMATS), default=list(FORMATS))
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each answer (default: 24)")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    source = provenance("bench.answers.divergence", ["torch", "numpy", "tokenizers"])
    print("| format | KL mean | median | largest | the same likeliest token |\n| --- | --- | --- | --- | --- |")
    rows = []
    for row in measure(arguments):
        rows.append(row)
        print(line(row), flush=True)
    if arguments.output:
        write_results(arguments.output, source, {"model": arguments.model, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
