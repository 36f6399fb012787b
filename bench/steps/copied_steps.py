"""Times a model's decode steps beside copies to and from the host pool: `python -m bench.steps.copied_steps`.

Weights are random. Plans are sent as by a scheduler, a second one always in flight. Between two results the copier is
looked at as a runner does. In turns: no copies, tickets of 512 blocks always in flight in one direction, and in both;
"by a kernel": through a staging buffer. The ratios are those of p50 and p99 to the turn before without copies.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from bench.common.gpu_timing import card
from bench.common.on_gpu import require_gpu
from bench.common.random_model import ALL_SHAPES
from bench.steps.backend import backend_of, no_progress
from bench.steps.decoding import Decoding
from bench.steps.host_copies import BOTH, TICKET, Copies, copying
from bench.steps.times import LAST
from runner_svc.execution.plans_in_flight import LaunchedPlan
from runner_svc.execution.runner import Runner
from runner_svc.tiers.kv_copier import Direction

TURNS: tuple[tuple[str, Sequence[Direction], bool], ...] = (
    ("alone", (), True),
    ("in", BOTH[1:], True),
    ("alone", (), True),
    ("out", BOTH[:1], True),
    ("alone", (), True),
    ("both", BOTH, True),
    ("alone", (), True),
    ("in, by a kernel", BOTH[1:], False),
    ("alone", (), True),
    ("out, by a kernel", BOTH[:1], False),
)
"""Names, directions, and whether a copy engine alone copies."""


class Looked:
    """A plan that is waited for as a runner waits: it polls, and lets copies go on."""

    def __init__(self, plan: LaunchedPlan, copies: Copies, directions: Sequence[Direction]) -> None:
        self._plan, self._copies, self._directions = plan, copies, directions

    def wait(self) -> Any:
        while not self._plan.done():
            self._copies.keep_up(self._directions)
        return self._plan.wait()


class LookingRunner(Runner):
    """Launches plans that are waited for so."""

    copies: Copies
    directions: Sequence[Direction] = ()

    def launch(self, number: int, plan: Any) -> LaunchedPlan:
        return cast(LaunchedPlan, Looked(super().launch(number, plan), self.copies, self.directions))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(ALL_SHAPES), help="of the model")
    parser.add_argument("--batch", type=int, default=64, help="rows that decode")
    parser.add_argument("--rounds", type=int, default=2, help="times that all turns are made")
    parser.add_argument("--turns", type=int, default=len(TURNS), help="number of turns, the first ones")
    options = parser.parse_args()
    require_gpu()
    backend = backend_of(options.shape, largest=options.batch)
    runner = LookingRunner(backend)
    ways = dict[bool, Copies]()
    for by_rows in (True, False):
        with copying(by_rows=by_rows):
            ways[by_rows] = Copies(backend.host_copier(2 * TICKET, no_progress))
    print(card(), f"{ways[True].copier.block_bytes >> 10} KiB a block", flush=True)
    for _ in range(options.rounds):
        alone = np.zeros(0)
        for name, directions, by_rows in TURNS[: options.turns]:
            runner.copies = ways[by_rows]
            found = _steps(runner, options.batch, directions)
            p50, p99 = np.percentile(found, 50), np.percentile(found, 99)
            if not directions:
                alone = found
                print(f"alone: {p50:.3f} / {p99:.3f} ms a step", flush=True)
                continue
            ratios = [np.percentile(found, q) / np.percentile(alone, q) for q in (50, 99)]
            pump = np.percentile(runner.copies.pumps, 99) * 1e6
            told = f"{ratios[0]:.3f} / {ratios[1]:.3f}; a look takes {pump:.0f} us (p99)"
            print(f"{name}: {p50:.3f} / {p99:.3f} ms, {told}", flush=True)


def _steps(runner: LookingRunner, batch: int, directions: Sequence[Direction]) -> np.ndarray:
    """Returns the milliseconds between the results of decode steps, [LAST - 16]."""
    copies, runner.directions = runner.copies, directions
    decoding = Decoding(runner, batch, runner.hello().model.vocab_size)
    decoding.prefill()
    copies.pumps = []
    copies.begin(directions)
    found, last = [], 0.0
    for _ in decoding.decode(LAST):
        now = time.perf_counter()
        found.append((now - last) * 1e3)
        last = now
    copies.copier.finish()
    copies.copier.take_done()
    return np.array(found[16:])


if __name__ == "__main__":
    main()
