"""Backend whose steps are timed: random weights of a shape, with room for the largest batch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from bench.common.random_model import ALL_SHAPES
from bench.steps.times import BATCHES, LAST, MAX_STEP_TOKENS, PROMPT, WIDE
from roster_protos import plan_pb2
from runner_svc.cuda.device import GpuDevice
from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.gpu.backend import CudaBackend, CudaSizes
from runner_svc.gpu.launchers import CudaLaunchers
from runner_svc.gpu.loading import MakeBackend
from runner_svc.gpu.transformers_loading import load_on_gpu
from runner_svc.model.checkpoint.random_weights import random_weights
from runner_svc.model.config import ModelConfig
from runner_svc.weights.model_weights import ModelWeights

BLOCK_SIZE = 16
DTYPE = torch.bfloat16
TRANSFORMERS = "transformers"
"""The model's forward pass by transformers, with random weights of its own."""
# Arguments of `CudaLaunchers`.
VARIANTS: dict[str, dict[str, Any]] = {
    "runner": {},
    "cublas": {"skinny_blocks": ()},
    "skinny-1": {"skinny_blocks": (1,)},
    "skinny-2": {"skinny_blocks": (2,)},
    TRANSFORMERS: {},
}


def backend_of(
    shape: str,
    weights: ModelWeights | None = None,
    variant: str = "runner",
    largest: int = max(BATCHES),
    *,
    fp8_cache: bool = False,
    context_length: int = 4096,
    num_blocks: int | None = None,
    make: MakeBackend = CudaBackend,
) -> CudaBackend:
    """Returns a backend of the shape (a key of `ALL_SHAPES`) with room for `largest` rows; `make` makes it.

    `num_blocks`: of the cache; by default what those rows need.
    """
    config = ModelConfig.from_hugging_face(ALL_SHAPES[shape])
    sizes = CudaSizes(
        num_slots=largest,
        block_size=BLOCK_SIZE,
        max_step_tokens=MAX_STEP_TOKENS,
        context_length=context_length,
        num_blocks=num_blocks or -(-(PROMPT + LAST + 1) // BLOCK_SIZE) * largest,
        fp8_cache=fp8_cache,
    )
    model = plan_pb2.Model(name=shape, vocab_size=config.vocab_size, context_length=sizes.context_length)
    begin = time.perf_counter()
    device = GpuDevice()
    if variant == TRANSFORMERS:
        served, launchers = load_on_gpu(
            Path(), ALL_SHAPES[shape], DTYPE, device, MAX_STEP_TOKENS, no_progress, random_weights=True
        )
        backend = CudaBackend(model, served.config, lambda: served, launchers, device, sizes, no_progress)
    else:
        own = weights or random_weights(config, DTYPE, torch.device("cuda"), no_progress)
        kernels = CudaLaunchers(config, DTYPE, **VARIANTS[variant])
        backend = make(
            model,
            config,
            lambda: CudaDecoder(config, own, kernels.decoder(sizes.fp8_cache), sizes.max_step_tokens),
            kernels,
            device,
            sizes,
            no_progress,
        )
    graphs = backend.decode_graphs
    print(f"{shape}, {variant}: ready in {time.perf_counter() - begin:.1f} s, buckets {graphs.sizes}", flush=True)
    for bucket in [size for size in graphs.sizes if size in (*BATCHES, *WIDE, 2, 16, 32, 128)]:
        times = sorted(graphs.seconds[bucket].items(), key=lambda item: item[1])
        print(f"  {bucket:3} rows: " + ", ".join(f"{way} {taken * 1e3:.3f} ms" for way, taken in times), flush=True)
    return backend


def no_progress(what: str, share: float) -> None:
    """Ignores progress reports."""
