"""Times decode steps of the runner on the local GPU, with their floors: `python -m bench.steps [--output
results.json]`.

`--variants` adds variants of the runner's backend to compare in one process (`backend.VARIANTS`); `--batches` and
`--shapes` select a part. `--batches 512 1024` times large batches, which have no references.

For each shape and batch, plans are sent as by a scheduler: prompts of 512 tokens, then decode steps with a second plan
always in flight and growing block tables. The result is the mean time per step over output tokens 128 to 256, and the
GPU's idle time between steps. The floor is measured in the same run: the step's matrix products alone, with the LM
head, as one CUDA graph, plus the KV bytes of the mean context over the bandwidth of a copy. Weights are random.
`--quantization`, `--quantize-head` and `--kv-cache-dtype` are the runner's settings; `--formats none fp8 fp8+head
fp8+kv fp8-block int4` times several of them in one run. The products' floor of quantized weights is their bytes over
the bandwidth of a copy.

Beside them are the times of vLLM 0.25.0 on an H200 (FlashAttention 3, CUDA graphs, asynchronous scheduling) and the
bars: in milliseconds on an H200, as a ratio to the floor of the same run on other cards.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np
import torch

from bench.common.gpu_timing import card, copy_bandwidth
from bench.common.on_gpu import require_gpu
from bench.common.provenance import provenance, write_results
from bench.common.quantization import add_options
from bench.common.random_model import ALL_SHAPES, SHAPES
from bench.steps.backend import DTYPE, VARIANTS, backend_of, no_progress
from bench.steps.decoding import Decoding
from bench.steps.floors import active_experts, experts_ms, products_ms, read_ms
from bench.steps.formats import Format, format_of, graphs_of
from bench.steps.times import BATCHES, FIRST, LAST, PROMPT, WIDE, StepTimes, print_header, print_line
from runner_svc.execution.runner import Runner
from runner_svc.model.checkpoint.random_weights import random_weights
from runner_svc.model.config import ModelConfig
from runner_svc.weights.model_weights import LayerWeights, ModelWeights
from runner_svc.weights.on_load import OnLoad


def measure(
    arguments: argparse.Namespace,
    shape: str,
    variant: str,
    chosen: Format,
    weights: ModelWeights,
    layers: list[LayerWeights],
    tb_s: float,
) -> Iterator[StepTimes]:
    """Times the batches of one shape with one backend; `tb_s` is the copy bandwidth."""
    batches, fp8_cache, quantized = arguments.batches, chosen.fp8_cache, chosen.on_load.name
    config = ModelConfig.from_hugging_face(ALL_SHAPES[shape])
    own = ModelWeights(weights.embeddings, weights.head, weights.norm, iter(layers))
    with graphs_of(batches if arguments.only_batches else None):
        backend = backend_of(shape, own, variant, max(*BATCHES, *batches), fp8_cache=fp8_cache)
    runner, graphs = Runner(backend), backend.decode_graphs
    for batch in batches:
        bucket = graphs.bucket(batch)
        way = "launched kernel by kernel or as a mixed step" if bucket is None else graphs.variant(bucket)
        Decoding(runner, batch, config.vocab_size).prefill()  # warms up the kernels and cuBLAS
        decoding = Decoding(runner, batch, config.vocab_size)
        prefill_s = decoding.prefill()
        timings = []
        for index, result in enumerate(decoding.decode(LAST)):
            if index == FIRST - 1:
                begin = time.perf_counter()
            if index >= FIRST:
                timings.append(result.timings)
        step_ms = (time.perf_counter() - begin) * 1e3 / (LAST - FIRST)
        if quantized:
            products = read_ms(weights, layers, tb_s)
        else:
            products = products_ms(config, weights, layers, batch, batch)
        if config.experts is not None:
            active = active_experts(backend, bucket or batch)
            print(f"  {batch} rows: {active} experts active in the last layer of the last step", flush=True)
            products += experts_ms(config, active, tb_s)
        context = PROMPT + (FIRST + LAST) / 2
        kv_bytes = batch * context * 2 * config.num_kv_heads * config.head_dim * config.num_layers
        kv_bytes *= 1 if fp8_cache else DTYPE.itemsize
        idle = np.array([timing.idle_ns for timing in timings]) / 1e3
        yield StepTimes(
            shape,
            variant,
            batch,
            bucket or batch,
            way,
            step_ms,
            products,
            products + kv_bytes / tb_s / 1e9,
            float(np.percentile(idle, 50)),
            float(np.percentile(idle, 99)),
            float(np.mean([timing.forward_ns for timing in timings])) / 1e6,
            float(np.mean([timing.sample_ns for timing in timings])) / 1e6,
            batch * PROMPT / prefill_s,
            chosen.name,
        )


def _free() -> None:
    """Frees unreferenced objects and GPU memory."""
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=sorted(ALL_SHAPES), default=sorted(SHAPES, reverse=True))
    parser.add_argument("--variants", nargs="+", choices=sorted(VARIANTS), default=["runner"])
    parser.add_argument("--batches", nargs="+", type=int, choices=(*BATCHES, *WIDE), default=BATCHES)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--formats", nargs="+", type=format_of, help="instead of the runner's settings that follow")
    parser.add_argument("--only-batches", action="store_true", help="capture graphs of these batches alone")
    add_options(parser)
    arguments = parser.parse_args()
    given = Format(OnLoad(arguments.quantization, arguments.quantize_head), arguments.kv_cache_dtype != "auto")
    require_gpu()
    source = provenance("bench.steps", ["torch", "cupy", "numpy"], card())
    bandwidth = copy_bandwidth()
    rows: list[StepTimes] = []
    for shape, chosen in product(arguments.shapes, arguments.formats or [given]):
        config = ModelConfig.from_hugging_face(ALL_SHAPES[shape])
        with torch.no_grad():
            weights = random_weights(config, DTYPE, torch.device("cuda"), no_progress, on_load=chosen.on_load)
            layers = list(weights.layers)
        for variant in arguments.variants:
            for row in measure(arguments, shape, variant, chosen, weights, layers, bandwidth):
                rows.append(row)
                print_line(row)
            _free()
        del weights, layers
        _free()
    print(f"{card()}, copy {bandwidth:.2f} TB/s")
    print_header()
    for row in rows:
        print_line(row)
    if arguments.output:
        write_results(arguments.output, source, {"copy_tb_s": bandwidth, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
