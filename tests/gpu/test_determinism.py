"""With the deterministic mode, a position's logits on a GPU are equal in every bit however it is computed."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common.random_model import ALL_SHAPES
from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.interface.kv_cache import FP8
from runner_svc.model.checkpoint.random_weights import random_weights
from runner_svc.model.config import ModelConfig
from runner_svc.weights.on_load import NOTHING, OnLoad
from tests.support.gpu_passes import Passes, different
from tests.support.gpu_walk import LONG_WAYS, MOST_CHUNKS, MOST_WATCHED, WAYS, Walk
from tests.support.greedy_driver import RandomDriver
from tests.support.host_backend import no_progress
from tests.support.plans import sampling
from tests.support.thoroughness import FULL
from tests.support.tiny_models import KERNEL_SIZES, NUM_TOKENS, make_tiny_model

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.attention import cuda_decode, cuda_prefill
from runner_svc.cuda.canonical import products
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
        most = max(self.length, 8 * self.slots, MOST_CHUNKS) + 2048
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
_LEAST_COMPARED = 10_000


@pytest.mark.skipif(not FULL, reason="takes a GPU two minutes")
@pytest.mark.parametrize("case", CASES[7:], ids=str)
def test_ten_thousand_positions_of_each_way(case: Case) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    case = replace(case, slots=272)
    walk = Walk(case.passes(seed, canonical=True), case.length, case.slots, random.Random(seed))
    walk.fill()
    faults = dict.fromkeys(LONG_WAYS, 0)
    for name, way in LONG_WAYS.items():
        walk.compared, turn, begin = 0, 0, time.perf_counter()
        while walk.compared < _LEAST_COMPARED:
            faults[name] += way(walk, turn)
            turn += 1
        print(
            f"{case}: {name}: {walk.compared} positions, {faults[name]} differ [{time.perf_counter() - begin:.1f} s]",
            flush=True,
        )
    assert faults == dict.fromkeys(LONG_WAYS, 0)


@pytest.mark.skipif(not FULL, reason="takes a GPU a minute")
@pytest.mark.parametrize("case", CASES[7:], ids=str)
def test_positions_decoded_alone_restarted_and_with_other_variants(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    case = replace(case, slots=MOST_WATCHED + 2)
    walk = Walk(case.passes(seed, canonical=True), case.length, case.slots, random.Random(seed))
    again = Walk(case.passes(seed, canonical=True), case.length, case.slots, random.Random(seed))
    restarted = sum(different(one, other) for one, other in zip(walk.wanted, again.wanted, strict=True))
    del again
    for module in (products, cuda_decode, cuda_prefill):
        monkeypatch.setattr(module, "num_multiprocessors", lambda: 60)
    chosen = Walk(case.passes(seed, canonical=True), case.length, case.slots, random.Random(seed))
    others = sum(different(one, other) for one, other in zip(walk.wanted, chosen.wanted, strict=True))
    others += sum(chosen.decodes(batch, captured=True) + walk.decodes(batch, captured=True) for batch in range(1, 17))
    del chosen
    print(
        f"{case}: {16 * case.length} positions restarted, {restarted} differ; by other variants, {others}", flush=True
    )
    faults = walk.alone(_LEAST_COMPARED)
    print(f"{case}: {_LEAST_COMPARED} positions decoded alone, {faults} differ")
    assert (restarted, others, faults) == (0, 0, 0)


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
    if family == "mixtral":
        sizes["num_local_experts"] = 8  # as published; a router's rows are a multiple of 8
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
