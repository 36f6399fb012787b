"""Times steps that verify drafts: `python -m bench.steps.verifying --batches 1 8 64 --drafts 1 3 5`.

For each batch and number of drafts a row, plans are sent as by a scheduler, a second one always in flight: prompts of
512 tokens, then steps whose rows all verify as many drafts. The drafts are random tokens, nearly all wrong, so each row
gains one token a step: a verifying step takes as long whatever it accepts. The step without drafts is of the same
backend. `gain` is the tokens a second of an oracle with which each draft is wrong with probability 0.3, against steps
without drafts. Weights are random.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from bench.common.gpu_timing import card
from bench.common.on_gpu import require_gpu
from bench.common.random_model import ALL_SHAPES
from bench.common.told_drafts import ToldDrafts
from bench.steps.backend import BLOCK_SIZE, backend_of
from bench.steps.decoding import Decoding
from bench.steps.times import LAST, PROMPT
from roster_protos import plan_pb2
from runner_svc.execution.runner import LaunchedPlan, Runner
from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.drafting_backend import DraftingCudaBackend
from runner_svc.interface.draft_launchers import DraftLaunchers
from runner_svc.model.config import ModelConfig

WARM, TIMED = 24, 72
RIGHT = 0.7
BARS = {(1, 3): 4.7, (1, 5): 4.7, (8, 3): 5.1, (8, 5): 5.1, (64, 3): 8.4, (64, 5): 10.2}
"""Milliseconds of a step of the 8B shape on an H200, by rows and drafts."""


class Verifying(Decoding):
    """Drives a runner whose rows verify `drafts` tokens in every step; 0: steps without drafts."""

    def decode(self, steps: int, drafts: int = 0) -> Iterator[plan_pb2.Result]:
        """Yields the results of steps, with one plan always ahead."""
        self._grow()
        pending: deque[LaunchedPlan] = deque()
        slots, ones = self._slots, np.ones_like(self._slots)
        for step in range(steps):
            self.number += 1
            plan = plan_pb2.Plan(
                extent_slots=slots.tobytes(),
                extent_starts=(np.full_like(slots, -1) if drafts else ones * (PROMPT + step)).tobytes(),
                extent_counts=(ones * (1 + drafts)).tobytes(),
                extent_flags=np.ones(len(slots), np.uint8).tobytes(),
                extent_drafts=bytes([drafts] * len(slots)) if drafts else b"",
            )
            pending.append(self._runner.launch(self.number, plan))
            if len(pending) == 2:
                yield pending.popleft().wait()
        for launched in pending:
            yield launched.wait()

    def _grow(self) -> None:
        """Appends the blocks of all steps to the tables."""
        added = np.arange(self._table, -(-(PROMPT + LAST) // BLOCK_SIZE), dtype=np.int32)
        slots = np.repeat(self._slots, len(added))
        indexes = np.tile(added, len(self._slots))
        self.number += 1
        plan = plan_pb2.Plan(
            append_slots=slots.tobytes(),
            append_indexes=indexes.tobytes(),
            append_blocks=(1 + slots + indexes * self._batch).astype(np.int32).tobytes(),
        )
        self._runner.launch(self.number, plan).wait()


def measure(runner: Runner, batch: int, drafts: int, vocab_size: int) -> tuple[float, plan_pb2.Timings, float]:
    """Returns the mean milliseconds of a step, the sums of the results' times, and the drafts verified of a row."""
    decoding = Verifying(runner, batch, vocab_size)
    decoding.prefill()
    total, verified = plan_pb2.Timings(), 0
    for index, result in enumerate(decoding.decode(WARM + TIMED, drafts)):
        if index == WARM - 1:
            begin = time.perf_counter()
        if index >= WARM:
            assert not any(result.statuses)
            total.forward_ns += result.timings.forward_ns
            total.sample_ns += result.timings.sample_ns
            total.idle_ns += result.timings.idle_ns
            verified += sum(result.drafted)
    return (time.perf_counter() - begin) * 1e3 / TIMED, total, verified / TIMED / batch


def backend_that_verifies(shape: str, largest: int, vocab_size: int) -> DraftingCudaBackend:
    """Returns a backend whose drafts are random tokens."""

    def drafter(launchers: DraftLaunchers, slots: DeviceSlots) -> ToldDrafts:
        made = ToldDrafts(launchers, slots)
        made.texts.random_(vocab_size)
        return made

    make = partial(DraftingCudaBackend, drafts=DraftOptions("told", make=drafter))
    with torch.no_grad():
        backend = backend_of(shape, largest=largest, make=make)
    assert isinstance(backend, DraftingCudaBackend)
    return backend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="llama-3.1-8b")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--drafts", nargs="+", type=int, default=[1, 3, 5])
    arguments = parser.parse_args()
    require_gpu()
    vocab_size = ModelConfig.from_hugging_face(ALL_SHAPES[arguments.shape]).vocab_size
    runner = Runner(backend_that_verifies(arguments.shape, max(arguments.batches), vocab_size))
    print(f"{arguments.shape}, {card()}")
    print("batch drafts    step    bar  forward  sample  idle us  verified  gain of an oracle")
    for batch in arguments.batches:
        base = 0.0
        for drafts in (0, *arguments.drafts):
            step, total, verified = measure(runner, batch, drafts, vocab_size)
            base = base or step
            gain = (1 - RIGHT ** (drafts + 1)) / (1 - RIGHT) * base / step
            bar = BARS.get((batch, drafts), 0.0) if arguments.shape == "llama-3.1-8b" else 0.0
            print(
                f"{batch:5} {drafts:6} {step:7.3f} {bar:6.2f} {total.forward_ns / TIMED / 1e6:8.3f} "
                f"{total.sample_ns / TIMED / 1e6:7.3f} {total.idle_ns / TIMED / 1e3:8.1f} {verified:9.2f} {gain:8.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
