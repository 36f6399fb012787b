"""Quantized models on a GPU, with and without CUDA graphs: transformers' tokens, and the CPU's log-probabilities."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.execution.runner import Runner
from runner_svc.gguf import kept_blocks
from runner_svc.model.gguf_conversion import converted_folder
from runner_svc.weights.on_load import NOTHING, OnLoad
from tests.support.greedy_driver import RandomDriver
from tests.support.host_backend import no_progress
from tests.support.mixed_gguf import mixed_gguf
from tests.support.parity import Parity, Precision
from tests.support.plans import SAMPLE, admission, plan, sampling
from tests.support.tiny_models import KERNEL_SIZES, NUM_TOKENS, make_tiny_model
from tests.support.tiny_mxfp4 import make_tiny_mxfp4
from tests.support.tiny_quantized import KINDS, make_tiny_quantized

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.gpu.backend import CudaBackend
from runner_svc.gpu.graphs import StepGraphs
from tests.support.gpu_backends import BLOCK_SIZE, load

# Where activations are rounded to e4m3, an error of 16-bit arithmetic may move a number to the next one. The decoder
# on a CPU in bfloat16, with products by their definition, has gaps of up to 0.8 at up to 31% of the places, and log-
# probabilities whose correlation with those of float32 is 0.907 or more (40 tiny models). Without that rounding gaps
# are below 0.1 at 8% of the places, and errors below 0.06. What another model would answer has a correlation of 0.
ROUNDED = Precision(torch.bfloat16, 1.2, 1.4, relative=True, few=6, rate=0.45)
PLAIN = Precision(torch.bfloat16, 0.3, 1.4, relative=True, few=6, rate=0.15)
LEAST_CORRELATION = 0.6
LEAST_SPREAD = 0.1
"""Standard deviation below which a correlation says nothing, in nats."""
ERROR = 0.2
"""Largest mean error of log-probabilities without rounding, as a share of their standard deviation."""
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2")
WIDTH = {"intermediate_size": 384}  # of which the products of few rows have kernels


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_every_kind_of_checkpoint(kind: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    family = rng.choice(FAMILIES)
    print(f"seed {seed}, {family}")
    has_head = kind in ("compressed-fp8-token", "gptq", "packed", "modelopt")
    sizes = KERNEL_SIZES[family] | WIDTH | ({"vocab_size": 264} if has_head else {})
    has_head = has_head and family != "gemma2"  # which ties it
    folder, model = make_tiny_quantized(kind, family, tmp_path, seed, has_head=has_head, **sizes)
    check(load(folder), folder, NOTHING, model, rng)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_blocks_of_gguf(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_blocks, "MOST_PLAIN_WEIGHTS", 0)
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    file, model = mixed_gguf(architecture, rng)
    folder = converted_folder(file.write(tmp_path / "mixed.gguf"), tmp_path / "cache", no_progress)
    check(load(folder), folder, NOTHING, model, rng)


@pytest.mark.parametrize("kind", ["mxfp4", "awq", "compressed-fp8-weights"])
def test_experts(kind: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    family = {"mxfp4": "gpt-oss", "awq": "qwen3-moe"}.get(kind, "qwen2-moe")
    if kind == "mxfp4":
        folder, model = make_tiny_mxfp4(tmp_path, seed, **KERNEL_SIZES[family])
    else:
        folder, model = make_tiny_quantized(kind, family, tmp_path, seed, **KERNEL_SIZES[family])
    check(load(folder), folder, NOTHING, model, random.Random(seed))


@pytest.mark.parametrize(
    "on_load", [OnLoad("fp8"), OnLoad("int4"), OnLoad("fp8", head=True), OnLoad(head=True)], ids=str
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "cohere"])
def test_quantized_while_loading(on_load: OnLoad, family: str, tmp_path: Path) -> None:
    rng = random.Random(1)
    folder = make_tiny_model(family, tmp_path / family, 1, torch.bfloat16, **KERNEL_SIZES[family], **WIDTH)
    check(load(folder, on_load=on_load), folder, on_load, None, rng)


def check(backend: CudaBackend, folder: Path, on_load: OnLoad, model: Any, rng: random.Random) -> None:
    cpu = TorchBackend.load(
        str(folder),
        cache_folder=folder / "unused",
        progress=no_progress,
        num_blocks=64,
        block_size=BLOCK_SIZE,
        num_slots=4,
        max_step_tokens=128,
        on_load=on_load,
    )
    formats = backend.model.weight_formats
    assert formats.split("; as ")[0] == cpu.model.weight_formats != ""
    rounds = "activations" in formats.replace("unquantized activations", "")
    parity = Parity(model, ROUNDED if rounds else PLAIN)
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 60))] for _ in range(4)]
    graphs = backend._graphs, backend._mixed_graphs
    for decode, mixed in (graphs, (StepGraphs([]), StepGraphs([]))):
        backend._graphs, backend._mixed_graphs = decode, mixed
        streams = RandomDriver(backend, rng).generate(prompts, 12, 30)
        if model is not None:
            parity.check(prompts, streams, 12)
        for prompt, stream in zip(prompts[:2], streams[:2], strict=True):
            ours, theirs = scored(backend, prompt + stream), scored(cpu, prompt + stream)
            case = f"graphs {decode.sizes}, {len(prompt)} + {len(stream)} tokens"
            assert_scores_are_close(ours, theirs, rounds, case)
    parity.assert_few_ties()


def assert_scores_are_close(ours: np.ndarray, theirs: np.ndarray, rounds: bool, case: str) -> None:
    """Compares log-probabilities of a text's tokens, which are all equal if one token is repeated."""
    spread = float(theirs.std())
    errors = np.abs(ours - theirs) / max(spread, 1.0)
    error = float(np.sqrt(np.mean(errors**2)))
    correlation = float(np.corrcoef(ours, theirs)[0, 1]) if spread > LEAST_SPREAD else 1.0 - error
    worst = [(int(place), round(float(errors[place]), 3)) for place in errors.argsort()[:-6:-1]]
    told = f"{case}: error {error:.4f}, correlation {correlation:.4f}, largest at {worst}"
    print(told)
    assert correlation > LEAST_CORRELATION if rounds else error < ERROR, told


def scored(backend: CudaBackend | TorchBackend, tokens: list[int]) -> np.ndarray:
    """Returns log-probabilities of a prompt's tokens from the second on."""
    runner = Runner(backend)
    runner.reset()
    blocks = list(range(1, -(-len(tokens) // BLOCK_SIZE) + 1))
    first = admission(1, tokens, blocks, sampling=sampling(prompt_logprobs=0))
    result = runner.execute(1, plan(admissions=[first], extents=[(1, 0, len(tokens), SAMPLE)]))
    return np.concatenate([np.frombuffer(part.values, np.float32) for part in result.prompt_logprobs])
