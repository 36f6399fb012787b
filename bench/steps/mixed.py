"""Times steps that decode some rows and compute a chunk of a prompt, on the local GPU: `python -m bench.steps.mixed`.

Plans are sent as by a scheduler, two in flight: one position for every decoding sequence, and a prompt's next chunk.
Prints per step the wall time, the GPU's own time, and the host's time for launching; if the latter is the largest, the
GPU waits. Beside them is the floor: the step's matrix products alone, as one CUDA graph (`bench.products.large` times
each of them). It is left out for quantized weights.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from bench.common.on_gpu import require_gpu
from bench.common.quantization import add_options
from bench.common.random_model import ALL_SHAPES
from bench.steps.backend import DTYPE, backend_of, no_progress
from bench.steps.decoding import Decoding
from bench.steps.floors import products_ms
from bench.steps.formats import graphs_of
from bench.steps.times import PROMPT
from roster_protos import plan_pb2
from runner_svc.execution.runner import LaunchedPlan, Runner
from runner_svc.model.checkpoint.random_weights import random_weights
from runner_svc.model.config import ModelConfig
from runner_svc.weights.model_weights import ModelWeights
from runner_svc.weights.on_load import OnLoad

DECODING = 32
"""Decoding rows of a step."""
_STEPS = 30
_DEPTH = 2
_LONG_PROMPT = 2048
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class MixedTimes:
    """Milliseconds per step: means of the wall and GPU times, the median of the launch."""

    wall: float
    gpu: float
    host: float


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: LaunchedPlan
    host_s: float


class Mixing:
    """`Decoding` with one more sequence, whose prompt is computed in chunks repeatedly."""

    def __init__(self, runner: Runner, vocab_size: int, num_decoding: int = DECODING) -> None:
        self._runner = runner
        self._num_decoding = num_decoding
        self._vocab_size = vocab_size

    def measure(self, chunk: int) -> MixedTimes:
        """Times steps with one chunk of `chunk` positions each."""
        steps = self.steps(chunk, _STEPS + 5)
        for _ in islice(steps, 5):
            pass
        begin = time.perf_counter()
        gpu, host = zip(*steps, strict=True)
        wall = (time.perf_counter() - begin) * 1e3 / _STEPS
        return MixedTimes(wall, float(np.mean(gpu)), float(np.median(host)))

    def steps(self, chunk: int, count: int) -> Iterator[tuple[float, float]]:
        """Runs `count` steps with one chunk of `chunk` positions each. Yields ms of the GPU and of the launch."""
        decoding = Decoding(self._runner, self._num_decoding, self._vocab_size)
        decoding.prefill()
        pending: deque[_Launched] = deque()
        for step in range(count):
            plan = self._plan(step, chunk, count)
            begin = time.perf_counter()
            launched = self._runner.launch(decoding.number + 1 + step, plan)
            pending.append(_Launched(launched, time.perf_counter() - begin))
            if len(pending) == _DEPTH:
                yield _finished(pending.popleft())
        yield from map(_finished, pending)

    def _plan(self, step: int, chunk: int, count: int) -> plan_pb2.Plan:
        decoding = self._num_decoding
        chunks = max(1, _LONG_PROMPT // chunk)
        prompt_len = chunks * chunk
        slots = np.arange(decoding + 1, dtype=np.int32)
        starts = np.full(decoding + 1, PROMPT + step, np.int32)
        starts[-1] = step % chunks * chunk
        counts = np.ones_like(starts)
        counts[-1] = chunk
        first = step % chunks == 0
        decoding_blocks = decoding * (PROMPT + count + _BLOCK_SIZE) // _BLOCK_SIZE
        table = np.arange(1, -(-prompt_len // _BLOCK_SIZE) + 1, dtype=np.int32) + decoding_blocks
        index, grows = divmod(PROMPT + step, _BLOCK_SIZE)
        appended = slots[: 0 if grows else decoding]
        admission = plan_pb2.Admission(
            slot=decoding,
            sequence_id=1000 + step,
            tokens=np.arange(prompt_len, dtype=np.int32).tobytes(),
            prompt_len=prompt_len,
            sampling=plan_pb2.Sampling(temperature=0.0, top_p=1.0, repetition_penalty=1.0),
            blocks=table.tobytes(),
        )
        return plan_pb2.Plan(
            releases=np.array([decoding] if first and step else [], np.int32).tobytes(),
            admissions=[admission] if first else [],
            append_slots=appended.tobytes(),
            append_indexes=np.full_like(appended, index).tobytes(),
            append_blocks=(1 + appended + index * decoding).astype(np.int32).tobytes(),
            extent_slots=slots.tobytes(),
            extent_starts=starts.tobytes(),
            extent_counts=counts.tobytes(),
            extent_flags=np.array([1] * decoding + [int(step % chunks == chunks - 1)], np.uint8).tobytes(),
        )


def _finished(launched: _Launched) -> tuple[float, float]:
    return launched.plan.wait().timings.forward_ns / 1e6, launched.host_s * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(ALL_SHAPES))
    parser.add_argument("chunks", type=int, nargs="*", default=[64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--decoding", type=int, default=DECODING, help="decoding rows of a step")
    add_options(parser)
    arguments = parser.parse_args()
    require_gpu()
    config, decoding = ModelConfig.from_hugging_face(ALL_SHAPES[arguments.shape]), arguments.decoding
    on_load = OnLoad(arguments.quantization, arguments.quantize_head)
    weights = random_weights(config, DTYPE, torch.device("cuda"), no_progress, on_load=on_load)
    layers = list(weights.layers)
    own = ModelWeights(weights.embeddings, weights.head, weights.norm, iter(layers))
    with graphs_of([decoding]):
        backend = backend_of(arguments.shape, own, fp8_cache=arguments.kv_cache_dtype != "auto")
    mixing = Mixing(Runner(backend), config.vocab_size, decoding)
    print(
        f"{arguments.shape} {on_load.name}, {decoding} decode rows and a chunk: ms per step\n"
        "chunk     wall      gpu     host products"
    )
    for chunk in arguments.chunks:
        mixing.measure(chunk)
        times = mixing.measure(chunk)
        products = math.nan if on_load.name else products_ms(config, weights, layers, decoding + chunk, decoding)
        print(f"{chunk:5} {times.wall:8.3f} {times.gpu:8.3f} {times.host:8.3f} {products:8.3f}", flush=True)


if __name__ == "__main__":
    main()
