"""Hashes of what a deterministic runner computes from known inputs, by parts of docs/determinism.md.

A change of bits changes the hash of a part. `STORED` has the right ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from runner_svc.arithmetic import functions
from runner_svc.arithmetic.canonical import CanonicalArithmetic
from runner_svc.arithmetic.check import check_functions
from runner_svc.arithmetic.known_numbers import known_numbers
from runner_svc.attention.canonical import CanonicalAttention
from runner_svc.attention.canonical_check import checked_units
from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.decoder.rope import RotaryEmbedding
from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.slot_state import ROW_PARAMS
from runner_svc.model.rope_config import RopeConfig, RopeType
from runner_svc.sampling import sampler
from runner_svc.sampling.gumbel import key_words
from runner_svc.weights.cpu_products import PACKED_ROWS
from runner_svc.weights.linear_weights import LinearWeights
from tests.support.bit_walk import load
from tests.support.logits_of_steps import Part, Steps
from tests.support.tiny_models import FAMILIES, make_tiny_model

POSITIONS = 560
"""Of a sequence: two whole segments of attention and a part of one."""
SIZES = ((64, 64), (1, 100), (50, 37), (64, 2048))
"""Rows and columns of weights."""
ALONE = [0, 1, 255, 256, 300, 511, 512, 559]
"""Positions that are also computed alone."""

Part_ = Iterable[Tensor | NDArray[Any] | bytes]


def hash_of(results: Part_) -> str:
    """Returns 16 hex digits of the results' bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for result in results:
        array = result.contiguous().numpy() if isinstance(result, Tensor) else result
        digest.update(array if isinstance(array, bytes) else array.tobytes())
    return digest.hexdigest()


def library_bits() -> str:
    """Returns a hash of what torch, oneDNN and MKL compute here, with nothing of ours between."""
    x = known_numbers(64, 256)
    results = [function(x) for function in (torch.exp, torch.tanh, torch.cos, torch.sin, torch.erf)]
    results += [(x + 3).log(), (x + 2.5).log1p(), (x * 100).cos(), (x * 100).sin()]
    for rows, columns in ((128, 64), (192, 64), (64, 96), (272, 64), (64, 64), (64, 48), (272, 112)):
        packed = torch.ops.mkldnn._reorder_linear_weight(known_numbers(rows, columns), PACKED_ROWS)
        inputs = known_numbers(17, columns)
        results += [torch.ops.mkldnn._linear_pointwise(inputs, packed, None, "none", [], "")]
    for number in (3, 16):
        left = known_numbers(number, 16, 16)
        results += [torch.bmm(left, known_numbers(number, 16, 256)), torch.bmm(x.view(4, 16, 256), x.view(4, 256, 16))]
    results += [x.sum(dim=-1), x[:, :64].contiguous().sum(dim=-1), x.double().sum(dim=-1)]
    return hash_of(results)


def of_functions() -> Part_:
    """Functions of elements and of rows, the start check's own digest, and what that leaves out."""
    yield check_functions([64, 100])
    wide = known_numbers(3, 50_000)
    yield from (functions.row_sum(wide), functions.log_softmax(wide))
    rows = known_numbers(40, 100)
    weight, bias = known_numbers(100, seed=1), known_numbers(100, seed=2)
    yield from (functions.rms_norm(rows, weight, 1e-5), functions.layer_norm(rows, weight, bias, 1e-5))
    yield from functions.largest((known_numbers(40, 60) * 2).round(), 12)


def of_products() -> Part_:
    """Products of many rows and of one, with a bias and without."""
    arithmetic = CanonicalArithmetic()
    for rows, columns in SIZES:
        for bias in (None, known_numbers(rows, seed=3)):
            product = arithmetic.product(LinearWeights.plain(known_numbers(rows, columns), bias), keep_plain=True)
            yield from (product(known_numbers(count, columns)) for count in (20, 3, 1))
    yield arithmetic.digest


def of_rope() -> Part_:
    """Rotated queries at far positions, and those of heads that are rotated in part."""
    arithmetic, positions = CanonicalArithmetic(), torch.arange(0, 40_000, 997)
    for dims in (32, 16):
        rotation = RotaryEmbedding(RopeConfig(RopeType.DEFAULT, 10_000.0, dims), torch.device("cpu"))
        yield rotation.rotation(positions, None).apply(known_numbers(len(positions), 3, 32), arithmetic)


@dataclass(frozen=True, slots=True)
class _Heads:
    num_kv_heads: int = 2
    head_dim: int = 16
    num_layers: int = 5


@cache
def _units() -> tuple[int, int]:
    return checked_units(4, 2, 16, 16)[:2]


class Attended:
    """Attention over one sequence in five layers: plain, with a window, with a soft-cap, with sinks, with far scores.

    Of the last layer's values, most have a 0 where only values count whose scores lie far below the maximum.
    """

    def __init__(self) -> None:
        blocks = POSITIONS // 16
        cache = KVCache(_Heads(), blocks, 16, torch.float32, torch.device("cpu"))
        for layer, cached in enumerate(cache.blocks):
            cached.copy_(known_numbers(*cached.shape, seed=layer))
        values = cache.blocks[4][blocks + 1 :].view(-1, 2, 16)
        values[torch.arange(len(values)) % 64 != 0, :, 0] = 0
        self._layers = [
            AttentionLayer(),
            AttentionLayer(window=300),
            AttentionLayer(scale=0.3, soft_cap=3.0),
            AttentionLayer(sinks=torch.tensor([4.0, -1.0, 90.0, 0.5])),
            AttentionLayer(scale=32.0),
        ]
        self._attention = CanonicalAttention(cache, 4, 2, self._layers, *_units())
        self._queries = known_numbers(POSITIONS, 4, 16, seed=9)
        self._table = np.arange(1, blocks + 1, dtype=np.int32)[None]

    def run(self, starts: list[int], counts: list[int]) -> list[Tensor]:
        """Returns the layers' outputs for rows of these positions of the sequence."""
        plan = self._attention.plan(
            np.array(starts, np.int32), np.array(counts, np.int32), np.repeat(self._table, len(starts), axis=0)
        )
        own = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
        return [self._attention.run(plan, layer, self._queries[own]) for layer in range(len(self._layers))]


def of_attention() -> Part_:
    """All positions in one chunk, and some alone."""
    attended = Attended()
    yield from (*attended.run([0], [POSITIONS]), *attended.run(ALONE, [1] * len(ALONE)))


def of_draws() -> Part_:
    """Tokens, the noise behind them, what top-p keeps, and log-probabilities."""
    keys = np.arange(40, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    yield sampler.gumbel(key_words(keys, torch.device("cpu")), torch.arange(1000, dtype=torch.int32))
    params, positions = np.zeros(40, ROW_PARAMS), np.arange(40, dtype=np.int32) // 2
    params["seed"], params["sample_index"] = np.arange(40) // 8, np.arange(40) % 2
    params["temperature"] = np.where(np.arange(40) % 3, 0.8, 0.0)
    params["top_p"], params["top_k"] = np.where(np.arange(40) % 4, 1.0, 0.9), np.where(np.arange(40) % 5, 0, 30)
    tied = (known_numbers(40, 3000) * 4).round()
    yield sampler.Sampler(3000).tokens(tied.clone(), params, positions)
    one = known_numbers(3000)
    shifted = one - one.max()
    mass = np.cumsum(shifted.sort(descending=True).values.exp().double().numpy())
    for place in range(3, 1000, 16):  # where another rounding keeps one more or one less
        params[0]["top_p"], params[0]["top_k"] = mass[place] / mass[-1], 0
        yield np.array(len(sampler._kept_ids(shifted, params[0])))
    yield sampler._row_logprobs(tied[:6], np.arange(6), 0, 0, 20).SerializeToString(deterministic=True)


def known_model(folder: Path, family: str = "llama") -> Path:
    """Makes a tiny model in `folder` whose weights are the same numbers on every machine; returns the folder."""
    long = {} if "rope" in str(FAMILIES[family][1]) else {"max_position_embeddings": POSITIONS + 40}
    make_tiny_model(family, folder, 0, **long)
    tensors = load_file(folder / "model.safetensors")
    for index, name in enumerate(sorted(tensors)):
        numbers = known_numbers(*tensors[name].shape, seed=index)
        tensors[name] = numbers * (0.1 if numbers.dim() > 1 else 1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def of_model(backend: TorchBackend) -> Part_:
    """Logits of all positions in one chunk."""
    positions = min(POSITIONS, backend.model.context_length)
    tokens = [(index * 37 + 11) % 256 for index in range(positions)]
    yield from Steps(backend).logits([Part(tokens, 0, list(range(1, 2 + positions // 16)))])


def _of_family(family: str) -> Callable[[], Part_]:
    def logits() -> Part_:
        with TemporaryDirectory() as folder:
            yield from of_model(load(known_model(Path(folder) / family, family)))

    return logits


MODELS = ("llama", "gemma2", "qwen2-moe", "glm4-moe", "gpt-oss", "granite", "gpt2", "cohere-qk-norm")
PROBES: dict[str, Callable[[], Part_]] = {
    "functions": of_functions,
    "products": of_products,
    "rope": of_rope,
    "attention": of_attention,
    "draws": of_draws,
    **{family: _of_family(family) for family in MODELS},
}

STORED = {
    "d8428f783a0f4f9e": {  # AVX-512
        "functions": "6e48a62f7eff97ba",
        "products": "b4654ced72472102",
        "rope": "10e33e4c1662fd80",
        "attention": "6db2458c70d39b9d",
        "draws": "c8060f12ff3963c8",
        "llama": "996f3a3b4d5c1634",
        "gemma2": "e70dd8f62c970162",
        "qwen2-moe": "14e0d7436c410fd5",
        "glm4-moe": "30e93d802cd40cd3",
        "gpt-oss": "e447e56f40c4f81b",
        "granite": "874de9e8a967891d",
        "gpt2": "4d41bb9a80a67f8a",
        "cohere-qk-norm": "4ab426790beda65e",
    },
    "93eb2e2b2f65887c": {  # AVX2
        "functions": "15c6a6929ead4236",
        "products": "b4654ced72472102",
        "rope": "10e33e4c1662fd80",
        "attention": "2e61f48f7bf70d68",
        "draws": "fd3b35886b3669ca",
        "llama": "fe431df19ff6d8d1",
        "gemma2": "c79d31ebdc549525",
        "qwen2-moe": "71b804d56abecbe6",
        "glm4-moe": "8494fff5773a82f4",
        "gpt-oss": "7fbfd7391725e788",
        "granite": "99ecddd030f20f0a",
        "gpt2": "b33ad4c46449ad25",
        "cohere-qk-norm": "c010059adf3aa978",
    },
}
"""Hashes by part, by the hash of what torch, oneDNN and MKL compute on the machine that runs it."""
