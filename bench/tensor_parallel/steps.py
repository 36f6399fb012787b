"""Times decode steps and prompts of a model that several GPUs compute together, with their floors.

    python -m bench.tensor_parallel.steps --ranks 2 --shapes llama-3.1-8b llama-3.1-70b --all-reduce one-shot nccl

As `bench.steps`: prompts of 512 tokens, then decode steps with a second plan in flight; the mean over output tokens 128
to 256, on rank 0. Every rank's process sends itself the same plans. The floor is a GPU's share of the weights' and the
KV's bytes over the bandwidth of a copy. The exchanges' floor is a ring's bytes over the bandwidth between GPUs. Weights
are random. Against vLLM: `python -m bench.gpu_comparison --peer vllm --ranks 2`.

Ranks have a GPU each; with ROSTER_TEST_RANKS_SHARE_A_GPU=1 they share one, to try the command: times then say nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.common.gpu_timing import card, copy_bandwidth
from bench.common.on_gpu import require_gpu
from bench.common.provenance import provenance, write_results
from bench.common.random_model import ALL_SHAPES, write_folder
from bench.steps.backend import BLOCK_SIZE, no_progress
from bench.steps.decoding import Decoding
from bench.steps.times import BATCHES, FIRST, LAST, MAX_STEP_TOKENS, PROMPT
from bench.tensor_parallel.exchanges import NCCL, ONE_SHOT, peer_bandwidth
from bench.tensor_parallel.processes import in_ranks
from runner_svc.execution.runner import Runner
from runner_svc.gpu.backend import CudaBackend
from runner_svc.gpu.loading import GpuOptions, load_cuda_backend
from runner_svc.gpu.ranked.backend import RankedCudaBackend
from runner_svc.group.forming import Group
from runner_svc.interface.ranks import Communicator, Shard
from runner_svc.model.config import ModelConfig
from runner_svc.model.rank_parts import local_config
from runner_svc.weights.on_load import OnLoad


def options_of(batches: list[int], chosen: dict[str, Any]) -> GpuOptions:
    """Returns the runner's options with room for the largest batch. `chosen`: as `measure` gets it."""
    largest = max(batches)
    return GpuOptions(
        dtype=torch.bfloat16,
        random_weights=True,
        num_slots=largest,
        block_size=BLOCK_SIZE,
        max_step_tokens=MAX_STEP_TOKENS,
        context_length=4096,
        num_blocks=-(-(PROMPT + LAST + 1) // BLOCK_SIZE) * largest,
        gpu_memory=0.9,
        fp8_cache=chosen["kv_cache_dtype"] != "auto",
        on_load=OnLoad(chosen["quantization"], False),
        one_shot=chosen["all_reduce"] == ONE_SHOT,
    )


def loaded(folder: Path, batches: list[int], chosen: dict[str, Any], group: Group) -> CudaBackend:
    """Returns a rank's backend; alone if the group has one rank."""
    options = options_of(batches, chosen)
    if group.shard.size == 1:
        return load_cuda_backend(str(folder), folder / "unused", options, no_progress)
    group.use(on_gpu=not options.one_shot)
    ranks: Communicator = group
    backend = load_cuda_backend(str(folder), folder / "unused", options, no_progress, RankedCudaBackend, ranks)
    assert isinstance(backend, RankedCudaBackend)
    group.form()
    backend.regroup()
    return backend


def measure(group: Group, shape: str, batches: list[int], chosen: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a line for each batch, on one rank. `chosen`: all_reduce, quantization and kv_cache_dtype."""
    with tempfile.TemporaryDirectory() as folder:
        config = {**ALL_SHAPES[shape], **({"num_hidden_layers": chosen["layers"]} if chosen["layers"] else {})}
        write_folder(shape, Path(folder))
        (Path(folder) / "config.json").write_text(json.dumps(config))
        began_at = time.perf_counter()
        backend = loaded(Path(folder), batches, chosen, group)
    print(f"rank {group.shard.rank}: {shape} is ready in {time.perf_counter() - began_at:.1f} s", flush=True)
    runner, vocab_size, lines = Runner(backend), int(config["vocab_size"]), []
    gc.collect()
    for batch in batches:
        Decoding(runner, batch, vocab_size).prefill()  # warms up
        decoding = Decoding(runner, batch, vocab_size)
        prefill_s = decoding.prefill()
        forward = []
        for index, result in enumerate(decoding.decode(LAST)):
            if index == FIRST - 1:
                begin = time.perf_counter()
            if index >= FIRST:
                forward.append(result.timings.forward_ns / 1e6)
        step_ms = (time.perf_counter() - begin) * 1e3 / (LAST - FIRST)
        bucket = backend.decode_graphs.bucket(batch)
        way = "mixed" if bucket is None else backend.decode_graphs.variant(bucket)
        lines.append(
            {
                "batch": batch,
                "step_ms": step_ms,
                "forward_ms": sum(forward) / len(forward),
                "prefill_tokens_per_s": batch * PROMPT / prefill_s,
                "way": way,
            }
        )
        print(f"rank {group.shard.rank}: {lines[-1]}", flush=True)
    return lines


def floors(
    shape: str, size: int, batch: int, chosen: dict[str, Any], tb_s: float, peer_tb_s: float
) -> dict[str, float]:
    """Returns the milliseconds of a rank's bytes, and of its exchanges' bytes, in a step of `batch` rows."""
    config = ModelConfig.from_hugging_face(ALL_SHAPES[shape])
    local = local_config(config, Shard(0, size))
    layers = chosen["layers"] or config.num_layers
    weight_bytes = {"none": 2.0, "fp8": 1.0, "fp8-block": 1.0, "int4": 0.5}[chosen["quantization"]]
    weights = local.num_layer_weights / config.num_layers * layers * weight_bytes
    head = (local.vocabulary.stop - local.vocabulary.start) * config.hidden_size * 2
    kv = batch * (PROMPT + (FIRST + LAST) / 2) * 2 * local.num_kv_heads * local.head_dim * layers
    kv *= 1 if chosen["kv_cache_dtype"] != "auto" else 2
    ring = 2 * (size - 1) / size * batch * config.hidden_size * 2 * (2 * layers + 1)
    gathered = (size - 1) / size * batch * config.vocab_size * 4
    return {"floor_ms": (weights + head + kv) / tb_s / 1e9, "exchange_floor_ms": (ring + gathered) / peer_tb_s / 1e9}


def print_lines(lines: list[dict[str, Any]]) -> None:
    """Prints the table."""
    print(
        "shape           ranks  over      formats        batch    floor exchanges     step  x floor  forward"
        "  prefill tok/s  way"
    )
    for line in lines:
        formats = f"{line['quantization']}, {line['kv_cache_dtype']}"
        total = line["floor_ms"] + (0.0 if math.isnan(line["exchange_floor_ms"]) else line["exchange_floor_ms"])
        print(
            f"{line['shape']:15} {line['ranks']:5}  {line['all_reduce']:8}  {formats:14} {line['batch']:5} "
            f"{line['floor_ms']:8.3f} {line['exchange_floor_ms']:9.3f} {line['step_ms']:8.3f} "
            f"{line['step_ms'] / total:8.2f} {line['forward_ms']:8.3f} {line['prefill_tokens_per_s']:14.0f}  "
            f"{line['way']}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", choices=sorted(ALL_SHAPES), default=["llama-3.1-8b"])
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--all-reduce", nargs="+", choices=(ONE_SHOT, NCCL), default=[ONE_SHOT, NCCL])
    parser.add_argument("--quantization", choices=("none", "fp8", "fp8-block", "int4"), default="none")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto")
    parser.add_argument("--layers", type=int, help="of the shape, to try the command")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for this call (default: 540)")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    require_gpu()
    until_s = time.monotonic() + arguments.budget
    source = provenance("bench.tensor_parallel.steps", ["torch", "cupy", "numpy"], card())
    bandwidth, between = copy_bandwidth(), peer_bandwidth()
    torch.cuda.empty_cache()  # the ranks need the memory
    lines: list[dict[str, Any]] = []
    for shape in arguments.shapes:
        for way in arguments.all_reduce if arguments.ranks > 1 else [NCCL]:
            chosen = {
                "all_reduce": way,
                "quantization": arguments.quantization,
                "kv_cache_dtype": arguments.kv_cache_dtype,
                "layers": arguments.layers,
            }
            left_s = until_s - time.monotonic()
            found = in_ranks(arguments.ranks, measure, shape, arguments.batches, chosen, timeout_s=left_s)[0]
            for line in found:
                own = floors(shape, arguments.ranks, line["batch"], chosen, bandwidth, between)
                lines.append({"shape": shape, "ranks": arguments.ranks, **chosen, **line, **own})
            if arguments.output:  # what was measured is kept if the next part does not end in time
                numbers = {"copy_tb_s": bandwidth, "peer_copy_tb_s": _finite(between), "lines": lines}
                write_results(arguments.output, source, numbers)
    print(f"{card()['card']}, copy {bandwidth:.2f} TB/s, between GPUs {between:.2f} TB/s")
    print_lines(lines)


def _finite(number: float) -> float | None:
    return None if math.isnan(number) else number


if __name__ == "__main__":
    main()
