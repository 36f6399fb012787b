"""Decode steps of the runner on the GPU at hand against their floors: `python -m bench.steps [--output results.json]`.

`--variants` names others than what the runner does, to be compared in one process (`step_backend.VARIANTS`);
`--batches` and `--shapes` cut it short.

Per shape and batch: plans as a scheduler would send them (prompts of 512 tokens, then decode with a second plan always
in flight, tables growing), the mean time per step over output tokens 128 to 256, and what the GPU idled between steps.
The floor is measured in the same run: the step's matrix products alone, with the LM head, as one CUDA graph, and the
KV bytes of the mean context over the bandwidth of a copy. Weights are random.

Beside them what vLLM 0.25.0 took on an H200 (FlashAttention 3, CUDA graphs, asynchronous scheduling) and the bars: in
milliseconds on an H200, as a ratio to the floor of the same run on other cards.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench.gpu_timing import card, copy_bandwidth, graph_microseconds
from bench.on_gpu import require_gpu
from bench.provenance import provenance, write_results
from bench.random_model import SHAPES
from bench.step_backend import BLOCK_SIZE, DTYPE, VARIANTS, backend_of, no_progress
from bench.step_times import BATCHES, FIRST, LAST, MAX_STEP_TOKENS, PROMPT, StepTimes, print_header, print_line
from roster_protos import plan_pb2
from runner_svc.execution.runner import LaunchedPlan, Runner
from runner_svc.model.config import ModelConfig
from runner_svc.model.random_weights import random_weights
from runner_svc.model.weights import LayerWeights, ModelWeights

_DEPTH = 2


class Decoding:
    """Drives a runner as a scheduler does whose sequences all began together."""

    def __init__(self, runner: Runner, batch: int, vocab_size: int) -> None:
        self._runner = runner
        self._batch = batch
        self._vocab_size = vocab_size
        self.number = 0  # of the last plan
        self._table = 0
        self._slots = np.arange(batch, dtype=np.int32)

    def prefill(self) -> float:
        """Admits and computes all prompts, several a step; seconds."""
        runner = self._runner
        runner.reset()
        per_step = min(self._batch, MAX_STEP_TOKENS // PROMPT)
        rng = np.random.default_rng(0)
        self._table = PROMPT // BLOCK_SIZE
        begin = time.perf_counter()
        pending: deque[LaunchedPlan] = deque()
        for first in range(0, self._batch, per_step):
            slots = self._slots[first : first + per_step]
            tokens = rng.integers(0, self._vocab_size, (len(slots), PROMPT), dtype=np.int32)
            admissions = [
                plan_pb2.Admission(
                    slot=slot,
                    sequence_id=slot + 1,
                    tokens=row.tobytes(),
                    prompt_len=PROMPT,
                    sampling=plan_pb2.Sampling(temperature=0.0, top_p=1.0, repetition_penalty=1.0),
                    blocks=self._blocks(slot, 0, self._table).tobytes(),
                )
                for slot, row in zip(slots.tolist(), tokens, strict=True)
            ]
            pending.append(self._launch(slots, np.zeros_like(slots), np.full_like(slots, PROMPT), admissions))
            if len(pending) == _DEPTH:
                pending.popleft().wait()
        for launched in pending:
            launched.wait()
        return time.perf_counter() - begin

    def decode(self, steps: int) -> Iterator[plan_pb2.Result]:
        """Results of decode steps, one plan always ahead."""
        pending: deque[LaunchedPlan] = deque()
        for step in range(steps):
            start = np.full_like(self._slots, PROMPT + step)
            pending.append(self._launch(self._slots, start, np.ones_like(start), []))
            if len(pending) == _DEPTH:
                yield pending.popleft().wait()
        for launched in pending:
            yield launched.wait()

    def _launch(
        self,
        slots: NDArray[np.int32],
        starts: NDArray[np.int32],
        counts: NDArray[np.int32],
        admissions: Sequence[plan_pb2.Admission],
    ) -> LaunchedPlan:
        self.number += 1
        appended = np.empty(0, np.int32)
        if int((starts + counts)[0]) > self._table * BLOCK_SIZE:
            appended = slots
            self._table += 1
        plan = plan_pb2.Plan(
            admissions=admissions,
            append_slots=appended.tobytes(),
            append_indexes=np.full_like(appended, self._table - 1).tobytes(),
            append_blocks=(1 + appended + (self._table - 1) * self._batch).astype(np.int32).tobytes(),
            extent_slots=slots.tobytes(),
            extent_starts=starts.tobytes(),
            extent_counts=counts.tobytes(),
            extent_flags=np.ones(len(slots), np.uint8).tobytes(),
        )
        return self._runner.launch(self.number, plan)

    def _blocks(self, slot: int, first: int, count: int) -> NDArray[np.int32]:
        """Neighbouring blocks of a sequence lie far apart, as in a pool that has been in use."""
        return (1 + slot + np.arange(first, first + count) * self._batch).astype(np.int32)


def measure(
    shape: str, variant: str, batches: Sequence[int], weights: ModelWeights, layers: list[LayerWeights], tb_s: float
) -> Iterator[StepTimes]:
    """The batches of one shape, with one backend; `tb_s` is the copy bandwidth."""
    config = ModelConfig.from_hugging_face(SHAPES[shape])
    backend = backend_of(shape, ModelWeights(weights.embeddings, weights.head, weights.norm, iter(layers)), variant)
    runner, graphs = Runner(backend), backend.decode_graphs
    for batch in batches:
        bucket = graphs.bucket(batch)
        if bucket is None:
            raise SystemExit(f"no graph is captured for {batch} rows")
        Decoding(runner, batch, config.vocab_size).prefill()  # kernels and cuBLAS are warm behind it
        decoding = Decoding(runner, batch, config.vocab_size)
        prefill_s = decoding.prefill()
        timings = []
        for index, result in enumerate(decoding.decode(LAST)):
            if index == FIRST - 1:
                begin = time.perf_counter()
            if index >= FIRST:
                timings.append(result.timings)
        step_ms = (time.perf_counter() - begin) * 1e3 / (LAST - FIRST)
        products = products_ms(config, weights, layers, batch, batch)
        context = PROMPT + (FIRST + LAST) / 2
        kv_bytes = batch * context * 2 * config.num_kv_heads * config.head_dim * DTYPE.itemsize * config.num_layers
        idle = np.array([timing.idle_ns for timing in timings]) / 1e3
        yield StepTimes(
            shape,
            variant,
            batch,
            bucket,
            graphs.variant(bucket),
            step_ms,
            products,
            products + kv_bytes / tb_s / 1e9,
            float(np.percentile(idle, 50)),
            float(np.percentile(idle, 99)),
            float(np.mean([timing.forward_ns for timing in timings])) / 1e6,
            float(np.mean([timing.sample_ns for timing in timings])) / 1e6,
            batch * PROMPT / prefill_s,
        )


def products_ms(
    config: ModelConfig, weights: ModelWeights, layers: list[LayerWeights], positions: int, sampled: int
) -> float:
    """The matrix products of a step of so many positions, of which some are sampled, as one CUDA graph."""

    def rows(width: int) -> torch.Tensor:
        return torch.randn(positions, width, dtype=DTYPE, device="cuda")

    hidden, attended = rows(config.hidden_size), rows(config.num_heads * config.head_dim)
    activated = rows(config.intermediate_size)

    def launch() -> None:
        for layer in layers:
            torch.mm(hidden, layer.qkv.t())
            torch.mm(attended, layer.output.t())
            torch.mm(hidden, layer.gate_up.t())
            torch.mm(activated, layer.down.t())
        torch.mm(hidden[:sampled], weights.head.t())

    return graph_microseconds([launch]) / 1e3


def _free() -> None:
    """Gives back what nobody refers to any more."""
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES, reverse=True))
    parser.add_argument("--variants", nargs="+", choices=sorted(VARIANTS), default=["runner"])
    parser.add_argument("--batches", nargs="+", type=int, choices=BATCHES, default=BATCHES)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    require_gpu()
    source = provenance("bench.steps", ["torch", "cupy", "numpy"], card())
    bandwidth = copy_bandwidth()
    rows: list[StepTimes] = []
    for shape in arguments.shapes:
        config = ModelConfig.from_hugging_face(SHAPES[shape])
        with torch.no_grad():
            weights = random_weights(config, DTYPE, torch.device("cuda"), no_progress)
            layers = list(weights.layers)
        for variant in arguments.variants:
            for row in measure(shape, variant, arguments.batches, weights, layers, bandwidth):
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
