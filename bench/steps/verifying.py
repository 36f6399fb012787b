"""Times steps that verify drafts: `python -m bench.steps.verifying --batches 1 8 64 --drafts 1 3 5 7`.

For each batch and number of drafts a row, plans are sent as by a scheduler, a second one always in flight: prompts of
512 tokens, then steps whose rows all verify as many drafts. An oracle drafts the true next tokens, each wrong with
probability 0.3 (`--right`). Weights are random, with certain texts (`bench.common.certain_text`). The step without
drafts is of the same backend. `gain` is the ratio of the tokens a second to those of steps without drafts; `mean` is
the same with the tokens that such drafts bring on average, as those of few rows and steps vary by chance; `bar` is
the least. `--most` leaves out steps of more positions. Steps of 4 drafts are computed as those of 5, unless
`--max-drafts 4` makes them the runner's longest. `--profile` prints the times by kernel of some steps.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from bench.common.certain_text import certain, shift_of
from bench.common.gpu_timing import card
from bench.common.on_gpu import require_gpu
from bench.common.random_model import ALL_SHAPES
from bench.common.told_drafts import ToldDrafts
from bench.steps.backend import BLOCK_SIZE, DTYPE, backend_of, no_progress
from bench.steps.decoding import Decoding
from bench.steps.profile import PROFILED, print_profile, profiled
from bench.steps.times import LAST, PROMPT
from roster_protos import plan_pb2
from runner_svc.execution.runner import LaunchedPlan, Runner
from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.drafting_backend import DraftingCudaBackend
from runner_svc.interface.draft_launchers import DraftLaunchers
from runner_svc.model.checkpoint.random_weights import random_weights
from runner_svc.model.config import ModelConfig

WARM, TIMED = 12, 52
STEP_BARS = {(1, 4): 4.7, (1, 5): 4.7, (8, 4): 5.1, (8, 5): 5.1, (64, 3): 8.4, (64, 4): 10.2, (64, 5): 10.2}
"""Milliseconds of a step of the 8B shape on an H200, by rows and drafts."""
GAIN_BARS = {
    "llama-3.1-8b": {1: 2.8, 8: 2.6, 64: 1.75, 256: 1.12},
    "qwen3-0.6b": {1: 2.2, 8: 2.2, 64: 1.9},
}
"""Of the best number of drafts on an H200, by rows."""


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


@dataclass(slots=True)
class Measured:
    """Sums over TIMED steps of a batch."""

    step_ms: float = 0.0  # mean
    forward_ns: int = 0
    sample_ns: int = 0
    idle_ns: int = 0
    drafted: int = 0
    tokens: int = 0


class Oracle:
    """A runner with a drafter that knows its texts."""

    def __init__(self, config: ModelConfig, right: float) -> None:
        self._vocab_size, self._shift = config.vocab_size, shift_of(config)
        self._right = right
        self._told: list[tuple[ToldDrafts, DeviceSlots]] = []

    def drafter(self, launchers: DraftLaunchers, slots: DeviceSlots) -> ToldDrafts:
        """Makes the drafter of a backend; the last one's gets the texts."""
        self._told.append((ToldDrafts(launchers, slots), slots))
        return self._told[-1][0]

    def tell(self, batch: int) -> None:
        """Shows the drafter what follows the prompts of the first `batch` slots, with errors."""
        told, slots = self._told[-1]
        length = slots.tokens.shape[1] - PROMPT
        steps = torch.arange(1, length + 1, device=slots.tokens.device)
        texts = (slots.tokens[:batch, PROMPT - 1 : PROMPT] + self._shift * steps) % self._vocab_size
        wrong = torch.rand(texts.shape, device=texts.device) >= self._right
        told.texts[:batch, PROMPT:] = torch.where(wrong, torch.randint_like(texts, self._vocab_size), texts).int()

    def measure(self, runner: Runner, batch: int, drafts: int) -> Measured:
        """Times steps of `batch` rows with `drafts` drafts each."""
        sums = Measured()
        for index, result in enumerate(self._prefilled(runner, batch).decode(WARM + TIMED, drafts)):
            if index == WARM - 1:
                begin = time.perf_counter()
            if index >= WARM:
                assert not any(result.statuses)
                sums.forward_ns += result.timings.forward_ns
                sums.sample_ns += result.timings.sample_ns
                sums.idle_ns += result.timings.idle_ns
                sums.drafted += sum(result.drafted)
                sums.tokens += sum(result.token_counts)
        sums.step_ms = (time.perf_counter() - begin) * 1e3 / TIMED
        return sums

    def profile(self, runner: Runner, batch: int, drafts: int) -> None:
        """Prints the times by kernel of such steps."""
        steps = self._prefilled(runner, batch).decode(WARM + TIMED, drafts)
        print_profile(profiled(steps, WARM + TIMED - PROFILED))

    def _prefilled(self, runner: Runner, batch: int) -> Verifying:
        decoding = Verifying(runner, batch, self._vocab_size)
        decoding.prefill()
        self.tell(batch)
        return decoding


def runner_of(shape: str, oracle: Oracle, largest: int, max_drafts: int = 7) -> Runner:
    """Returns a runner of the shape whose drafts are the oracle's, at most `max_drafts` of a row."""
    make = partial(DraftingCudaBackend, drafts=DraftOptions("told", max_drafts, oracle.drafter))
    config = ModelConfig.from_hugging_face(ALL_SHAPES[shape])
    with torch.no_grad():
        weights = certain(random_weights(config, DTYPE, torch.device("cuda"), no_progress), config)
        return Runner(backend_of(shape, weights, largest=largest, make=make))


def mean_tokens(drafts: int, right: float) -> float:
    """Returns the mean tokens of a row and step whose drafts are each right with this probability."""
    return sum(right**position for position in range(drafts + 1))


def rows_and_drafts(text: str) -> tuple[int, int]:
    """Reads "64x3"."""
    rows, _, drafts = text.partition("x")
    return int(rows), int(drafts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="llama-3.1-8b")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--drafts", nargs="+", type=int, default=[1, 3, 5, 7])
    parser.add_argument("--max-drafts", type=int, default=7, help="of the runner")
    parser.add_argument("--right", type=float, default=0.7)
    parser.add_argument("--most", type=int, default=2048, help="positions of a step")
    parser.add_argument("--profile", nargs="+", type=rows_and_drafts, default=[], metavar="ROWSxDRAFTS")
    arguments = parser.parse_args()
    require_gpu()
    oracle = Oracle(ModelConfig.from_hugging_face(ALL_SHAPES[arguments.shape]), arguments.right)
    runner = runner_of(arguments.shape, oracle, max(arguments.batches), arguments.max_drafts)
    print(f"{arguments.shape}, {card()}")
    print("batch drafts    step    bar  forward  sample  idle us  verified  tokens/step   gain   mean    bar")
    for batch in arguments.batches:
        base = 0.0
        for drafts in (0, *(each for each in arguments.drafts if batch * (1 + each) <= arguments.most)):
            sums = oracle.measure(runner, batch, drafts)
            each = sums.tokens / TIMED / batch
            base = base or sums.step_ms / each
            step_bar = STEP_BARS.get((batch, drafts), 0.0) if arguments.shape == "llama-3.1-8b" else 0.0
            gain_bar = GAIN_BARS.get(arguments.shape, {}).get(batch, 0.0)
            print(
                f"{batch:5} {drafts:6} {sums.step_ms:7.3f} {step_bar:6.2f} {sums.forward_ns / TIMED / 1e6:8.3f} "
                f"{sums.sample_ns / TIMED / 1e6:7.3f} {sums.idle_ns / TIMED / 1e3:8.1f} "
                f"{sums.drafted / TIMED / batch:9.2f} {each:12.2f} {base * each / sums.step_ms:6.2f} "
                f"{base * mean_tokens(drafts, arguments.right) / sums.step_ms:6.2f} {gain_bar:6.2f}",
                flush=True,
            )
    for batch, drafts in arguments.profile:
        print(f"{batch} rows with {drafts} drafts")
        oracle.profile(runner, batch, drafts)


if __name__ == "__main__":
    main()
