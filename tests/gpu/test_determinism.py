"""With the deterministic mode, a position's logits on a GPU are equal in every bit however it is computed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.common.random_model import ALL_SHAPES
from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.interface.kv_cache import FP8
from runner_svc.model.checkpoint.random_weights import random_weights
from runner_svc.model.config import ModelConfig
from runner_svc.weights.on_load import NOTHING, OnLoad
from tests.support.gpu_passes import Part, Passes, different
from tests.support.greedy_driver import RandomDriver
from tests.support.host_backend import no_progress
from tests.support.plans import sampling
from tests.support.tiny_models import KERNEL_SIZES, NUM_TOKENS, make_tiny_model

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.device import GpuDevice
from runner_svc.cuda.module import is_hopper
from runner_svc.gpu.canonical.decoder import CanonicalDecoder
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.launchers import CudaLaunchers
from tests.support.gpu_backends import load

if not is_hopper():
    pytest.skip("needs Hopper, and kernels compiled for it", allow_module_level=True)

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A shape of `ALL_SHAPES`, with other values of its configuration."""

    shape: str
    changes: dict[str, Any]
    length: int = 700
    slots: int = 256
    cache_dtype: torch.dtype = BF16
    on_load: OnLoad = NOTHING

    def __str__(self) -> str:
        parts = self.shape, self.changes.get("hidden_size", ""), str(self.cache_dtype), self.on_load.name
        return "-".join(map(str, parts)).replace("torch.", "")

    def passes(self, seed: int, *, canonical: bool) -> Passes:
        """Returns passes of a model with random weights."""
        raw = ALL_SHAPES[self.shape] | {"num_hidden_layers": 2, "vocab_size": 2048} | self.changes
        config, device = ModelConfig.from_hugging_face(raw), GpuDevice()
        most = max(self.length, 8 * self.slots) + 2048
        with device.stream(), torch.inference_mode():
            weights = random_weights(config, BF16, torch.device("cuda"), no_progress, seed, self.on_load)
            launchers = CudaLaunchers(config, BF16, canonical=canonical)
            of_layers = launchers.decoder(self.cache_dtype is FP8)
            if canonical:
                decoder: CudaDecoder = CanonicalDecoder(config, weights, of_layers, launchers.canonical(most), most)
            else:
                decoder = CudaDecoder(config, weights, of_layers, most)
        return Passes(
            decoder,
            launchers,
            device,
            num_slots=self.slots,
            context=-(-(self.length + 16) // 16) * 16,
            cache_dtype=self.cache_dtype,
            seed=seed,
        )


TINY = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "num_hidden_layers": 30, "vocab_size": 49152, "tie_word_embeddings": True, "rope_theta": 100000,
    "rope_scaling": None,
}  # fmt: skip
"""SmolLM2-135M's."""
CASES = [
    Case("llama-3.1-8b", TINY | {"head_dim": 64}),
    Case("qwen3-0.6b", TINY | {"num_hidden_layers": 3}, cache_dtype=FP8),
    Case("qwen3-0.6b", {}),
    Case("qwen3-30b-a3b", TINY | {"moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4}),
    Case("qwen3-0.6b", TINY, slots=140, on_load=OnLoad("fp8", head=True)),
    Case("qwen3-0.6b", TINY | {"hidden_size": 384}, slots=140, on_load=OnLoad("fp8-block")),
    Case("qwen3-0.6b", TINY, slots=140, on_load=OnLoad("fp8"), cache_dtype=FP8),
    Case("llama-3.1-8b", {}, length=2300, slots=64),
    Case("llama-3.1-8b", {}, length=2300, slots=64, cache_dtype=FP8),
    Case("llama-3.1-8b", {}, length=2300, slots=64, on_load=OnLoad("fp8")),
    Case("llama-3.1-8b", {}, length=2300, slots=64, on_load=OnLoad("fp8"), cache_dtype=FP8),
    Case("llama-3.1-8b", SMOLLM2, slots=64),
    Case("llama-3.1-8b", SMOLLM2, slots=64, cache_dtype=FP8),
    Case("llama-3.1-8b", SMOLLM2, slots=64, on_load=OnLoad("fp8")),
    Case("llama-3.1-8b", SMOLLM2, slots=64, on_load=OnLoad("fp8"), cache_dtype=FP8),
]
_MOST_WATCHED = 16
_LEAST_COMPARED = 10_000


class Walk:
    """The logits of some slots' positions, each in one chunk, compared with other ways to compute them."""

    def __init__(self, passes: Passes, length: int, slots: int, rng: random.Random) -> None:
        self._passes, self._length, self._slots, self._rng = passes, length, slots, rng
        self._watched = range(_MOST_WATCHED)
        self.wanted = [passes.mixed([Part(slot, 0, length)])[0] for slot in self._watched]
        self.compared = 0

    def chunks(self, size: int, end: int | None = None, slot: int = 0) -> int:
        """Returns the positions that differ when they are computed `size` at a time over a new cache."""
        faults, end = 0, min(end or self._length, self._length)
        for start in range(0, end, size):
            part = Part(slot, start, min(size, end - start))
            faults += self._compare([part], self._passes.mixed([part]))
        return faults

    def fill(self) -> None:
        """Computes all positions of the slots that are not watched."""
        for slot in range(len(self._watched), self._slots):
            self._passes.mixed([Part(slot, 0, self._length)])

    def decodes(self, batch: int, *, captured: bool) -> int:
        """Returns the positions that differ in a step of `batch` decoding rows, padded to a bucket."""
        parts = [Part(slot, self._rng.randrange(self._length), 1) for slot in self._slots_of(batch)]
        bucket = min(self._slots, batch + self._rng.choice((0, 0, 3)))
        return self._compare(parts, self._passes.decode(parts, bucket=bucket, captured=captured))

    def verifies(self, stride: int, batch: int, *, captured: bool) -> int:
        """Returns the same of a step whose rows verify `stride` - 1 drafts, which are the true tokens."""
        last = self._length - stride
        parts = [Part(slot, self._rng.randrange(last), stride) for slot in self._slots_of(batch)]
        return self._compare(parts, self._passes.verify(parts, captured=captured))

    def mixes(self, batch: int, chunks: tuple[int, ...], *, captured: bool) -> int:
        """Returns the same of a step of `batch` decoding rows, some of them watched, and chunks of other slots."""
        slots = self._slots_of(batch)
        parts = [Part(slot, self._rng.randrange(self._length), 1) for slot in slots]
        others = [slot for slot in range(self._slots) if slot not in slots]
        for slot, count in zip(self._rng.sample(others, len(chunks)), chunks, strict=True):
            count = min(count, self._length)
            parts.append(Part(slot, self._rng.randrange(self._length - count + 1), count))
        self._rng.shuffle(parts)
        padded = self._rng.choice((0, 5, 70))
        return self._compare(parts, self._passes.mixed(parts, padded=padded, captured=captured))

    def hits(self) -> int:
        """Returns the positions behind each block of another slot's prefix that differ."""
        faults, last = 0, self._slots - 1
        for start in range(16, self._length - 5, 16 * max(1, self._length // 400)):
            self._passes.share(last, 0, start)
            parts = [Part(last, start, 5)]
            faults += self._compare([Part(0, start, 5)], self._passes.mixed(parts))
        return faults

    def all_ways(self) -> dict[str, int]:
        """Returns the positions that differ in each of WAYS."""
        return {name: sum(way(self)) for name, way in WAYS.items()}

    def _slots_of(self, batch: int) -> list[int]:
        watched = [slot for slot in self._watched if slot < batch]
        others = self._rng.sample(range(len(self._watched), self._slots - 1), batch - len(watched))
        return self._rng.sample(watched + others, batch)

    def _compare(self, parts: list[Part], got: list[Tensor]) -> int:
        faults = 0
        for part, logits in zip(parts, got, strict=True):
            if part.slot in self._watched:
                faults += different(logits, self.wanted[part.slot][part.start : part.end])
                self.compared += part.count
        return faults


WAYS: dict[str, Callable[[Walk], Iterator[int]]] = {
    "chunks": lambda walk: (
        walk.chunks(size, end, slot)
        for slot in range(5)
        for size, end in ((1, 40), (16, 320), (100, None), (2048, None))
    ),
    "decoding": lambda walk: (
        walk.decodes(batch, captured=captured)
        for batch in (1, 2, 3, 8, 17, 33, 60)
        for captured in (False, True)
        for _ in range(3)
    ),
    "many decoding": lambda walk: (
        walk.decodes(min(batch, walk._slots - 5), captured=False) for batch in (64, 100, 128, 130, 200, 251)
    ),
    "mixed": lambda walk: (
        walk.mixes(batch, chunks, captured=captured)
        for batch, chunks in ((1, (16,)), (5, (100, 2)), (30, (1, 700)), (12, (2048, 17)), (50, (300, 300, 300)))
        for captured in (False, True)
    ),
    "verifying": lambda walk: (
        walk.verifies(stride, batch, captured=captured)
        for stride in (2, 4, 6, 8)
        for batch in (1, 7, 40)
        for captured in (False, True)
    ),
    "prefix hits": lambda walk: (walk.hits() for _ in range(1)),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_are_equal_in_every_bit(case: Case) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    walk = Walk(case.passes(seed, canonical=True), case.length, case.slots, random.Random(seed))
    walk.fill()
    faults = walk.all_ways()
    while walk.compared < _LEAST_COMPARED:  # of other rows, with other neighbours
        for name, count in walk.all_ways().items():
            faults[name] += count
    print(f"{case}: {walk.compared} positions compared")
    assert faults == dict.fromkeys(WAYS, 0)


@pytest.mark.parametrize("case", CASES[:1], ids=str)
def test_the_same_walk_finds_differences_with_the_mode_off(case: Case) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    plain = Walk(case.passes(seed, canonical=False), case.length, case.slots, random.Random(seed))
    plain.fill()
    faults = plain.all_ways()
    print(f"{case}, off: {faults} of {plain.compared}")
    assert min(faults[name] for name in ("chunks", "decoding", "mixed", "verifying")) > 0
    walk = Walk(case.passes(seed, canonical=True), case.length, case.slots, random.Random(seed))
    error = max(float((ours - theirs).abs().max()) for ours, theirs in zip(walk.wanted, plain.wanted, strict=True))
    spread = float(plain.wanted[0].std())
    print(f"largest difference of logits: {error / spread:.3f} of their standard deviation")
    assert error < 0.3 * spread


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2", "llama-biases", "qwen3-moe", "mixtral"])
def test_requests_get_the_same_tokens_and_log_probabilities(family: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    sizes = KERNEL_SIZES[family] | {"intermediate_size": 128}
    folder = make_tiny_model(family, tmp_path / "tiny", seed, BF16, **sizes)
    backend = load(folder, deterministic=True)
    assert len(backend.model.numerics) == 32
    asked = sampling(temperature=0.9, top_p=0.95, logprobs=3)
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 60))] for _ in range(10)]
    alone, scores = [], []
    for prompt in prompts:
        driver = RandomDriver(backend, rng, asked)
        alone += driver.generate([prompt], 24, 128)
        scores.append(driver.logprobs[0])
    for _ in range(3):
        driver = RandomDriver(backend, rng, asked)
        assert driver.generate(prompts, 24, 40) == alone
        assert [driver.logprobs[slot] for slot in range(len(prompts))] == scores
    drafting = load(folder, deterministic=True, drafts=DraftOptions())
    assert drafting.model.numerics == backend.model.numerics
    driver = RandomDriver(drafting, rng, asked)
    assert driver.generate(prompts, 24, 40) == alone
    assert [driver.logprobs[slot] for slot in range(len(prompts))] == scores
