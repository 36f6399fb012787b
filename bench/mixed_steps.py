"""Steps that decode some rows and compute a chunk of a prompt, on the GPU at hand: `python -m bench.mixed_steps`.

Plans as a scheduler would send them, two in flight: every decoding sequence one position, a prompt's next chunk with
it. Prints the wall time a step, the GPU's own, and what launching costs the host: where that is more, the GPU waits.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from bench.random_model import SHAPES
from bench.step_backend import backend_of
from bench.step_times import PROMPT
from bench.steps import Decoding
from protos import plan_pb2
from runner_svc.model.config import ModelConfig
from runner_svc.runner import LaunchedPlan, Runner

_DECODING = 32
_STEPS = 30
_DEPTH = 2
_LONG_PROMPT = 2048
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class MixedTimes:
    """Milliseconds a step."""

    chunk: int
    wall: float
    gpu: float
    host: float


class Mixing:
    """`Decoding` with another sequence whose prompt is computed in chunks, again and again."""

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        self._runner = runner
        self._vocab_size = vocab_size

    def measure(self, chunk: int) -> MixedTimes:
        """Of steps with one chunk of so many positions each."""
        decoding = Decoding(self._runner, _DECODING, self._vocab_size)
        decoding.prefill()
        pending: deque[LaunchedPlan] = deque()
        gpu, host = [], []
        begin = 0.0
        for step in range(_STEPS + 5):
            if step == 5:
                begin = time.perf_counter()
            plan = self._plan(step, chunk)
            launched_at = time.perf_counter()
            pending.append(self._runner.launch(decoding.number + 1 + step, plan))
            host.append(time.perf_counter() - launched_at)
            if len(pending) == _DEPTH:
                gpu.append(pending.popleft().wait().timings.forward_ns / 1e6)
        for launched in pending:
            gpu.append(launched.wait().timings.forward_ns / 1e6)
        wall = (time.perf_counter() - begin) * 1e3 / _STEPS
        return MixedTimes(chunk, wall, float(np.median(gpu[5:])), float(np.median(host[5:])) * 1e3)

    def _plan(self, step: int, chunk: int) -> plan_pb2.Plan:
        chunks = _LONG_PROMPT // chunk
        slots = np.arange(_DECODING + 1, dtype=np.int32)
        starts = np.full(_DECODING + 1, PROMPT + step, np.int32)
        starts[-1] = step % chunks * chunk
        counts = np.ones_like(starts)
        counts[-1] = chunk
        first = step % chunks == 0
        decoding_blocks = _DECODING * (PROMPT + _STEPS + 5 + _BLOCK_SIZE) // _BLOCK_SIZE
        table = np.arange(1, _LONG_PROMPT // _BLOCK_SIZE + 1, dtype=np.int32) + decoding_blocks
        index, grows = divmod(PROMPT + step, _BLOCK_SIZE)
        appended = slots[: 0 if grows else _DECODING]
        admission = plan_pb2.Admission(
            slot=_DECODING,
            sequence_id=1000 + step,
            tokens=np.arange(_LONG_PROMPT, dtype=np.int32).tobytes(),
            prompt_len=_LONG_PROMPT,
            sampling=plan_pb2.Sampling(temperature=0.0, top_p=1.0, repetition_penalty=1.0),
            blocks=table.tobytes(),
        )
        return plan_pb2.Plan(
            releases=np.array([_DECODING] if first and step else [], np.int32).tobytes(),
            admissions=[admission] if first else [],
            append_slots=appended.tobytes(),
            append_indexes=np.full_like(appended, index).tobytes(),
            append_blocks=(1 + appended + index * _DECODING).astype(np.int32).tobytes(),
            extent_slots=slots.tobytes(),
            extent_starts=starts.tobytes(),
            extent_counts=counts.tobytes(),
            extent_flags=np.array([1] * _DECODING + [int(chunks == 1)], np.uint8).tobytes(),
        )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("chunks", type=int, nargs="*", default=[64, 128, 256, 512, 1024, 2048])
    arguments = parser.parse_args()
    vocab_size = ModelConfig.from_hugging_face(SHAPES[arguments.shape]).vocab_size
    mixing = Mixing(Runner(backend_of(arguments.shape)), vocab_size)
    print(f"{arguments.shape}, {_DECODING} decoding rows and a chunk: ms a step\nchunk     wall      gpu     host")
    for chunk in arguments.chunks:
        mixing.measure(chunk)
        times = mixing.measure(chunk)
        print(f"{times.chunk:5} {times.wall:8.3f} {times.gpu:8.3f} {times.host:8.3f}")


if __name__ == "__main__":
    main()
