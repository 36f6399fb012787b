"""An imaginary runner with a drafter: step times from a function, acceptance by row and step, two plans in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from roster_protos import plan_pb2
from scheduler_svc.drafting.draft_lengths import Drafting
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.plan.applied_result import AppliedResult
from scheduler_svc.plan.in_flight import BatchRows, InFlight
from scheduler_svc.plan.slot_table import SlotTable
from scheduler_svc.policy import Load, Policy, PolicyGuard, PolicyParameters, RequestView
from scheduler_svc.step_times.step_time_model import StepTimeModel

REQUEST = RequestView("r", "t", 0.0, 0, 10, 1000, 1)
Seconds = Callable[[int, float], float]
"""Seconds of a step by its rows and its drafts that cost time."""
Chances = Callable[[int], npt.NDArray[np.float64]]
"""Each row's acceptance, or chance of a proposal, by step."""


@dataclass
class DraftWorld:
    """Decodes the same rows for ever."""

    rows: int
    seconds: Seconds
    acceptance: Chances
    proposes: Chances | None = None
    """None: always."""
    cuda: bool = False
    measured: bool = True
    """The runner measured its steps at start."""
    noise: float = 0.03
    """Standard deviation of a step's time, relative to it."""
    max_drafts: int = 7
    renewed: float = 0.0
    """Chance that a row is another request's in the next step."""
    policy: Policy = field(default_factory=lambda: Policy(PolicyParameters()))
    depth: int = 2

    def __post_init__(self) -> None:
        hello = plan_pb2.Hello(num_slots=self.rows, max_drafts=self.max_drafts, device="cuda:0" if self.cuda else "cpu")
        if self.measured:
            for rows in (1, 8, 64, 256):
                for drafts in (0, 1, 3, 7):
                    step_ns = round(1e9 * self.seconds(rows, rows * drafts))
                    hello.step_costs.add(decode_rows=rows, context=256 * rows, step_ns=step_ns, drafts=drafts)
        self.rng = np.random.default_rng(1)
        self.table = SlotTable(self.rows)
        self.table.limit[:], self.table.known[:], self.table.planned[:] = 1 << 30, 101, 100
        self.table.epoch[:], self.table.speculates[:] = np.arange(1, self.rows + 1), True
        self.step_times = StepTimeModel.of(hello)
        self.drafting = Drafting(hello, self.table, self.step_times, self.view_of)
        self.guard = PolicyGuard(self.policy)
        self.slots = np.arange(self.rows)
        self.steps = 0
        self.tokens, self.busy_s = 0, 0.0
        self.planned: list[npt.NDArray[np.int32] | None] = []
        """Drafts of each step."""
        self._in_flight: deque[tuple[InFlight, AppliedResult]] = deque()

    def view_of(self, sequence: Sequence) -> RequestView:
        return REQUEST

    def load(self) -> Load:
        counts = (self.rows, self.rows, self.rows, 0, 0, 0, 0, 16, 2048)
        return Load(*counts, context=256 * self.rows, step_times=self.step_times)

    def run(self, steps: int) -> float:
        """Returns the tokens a second of these steps, relative to those without drafts."""
        tokens, busy_s = self.tokens, self.busy_s
        for _ in range(steps):
            self.step()
        rate = (self.tokens - tokens) / (self.busy_s - busy_s)
        return rate * self.seconds(self.rows, 0) / self.rows

    def step(self) -> None:
        if len(self._in_flight) == self.depth:
            flight, applied = self._in_flight.popleft()
            if flight.drafts is not None:
                self.drafting.applied(applied)
            columns = flight.starts, flight.counts, self.rows
            self.step_times.note(*columns, applied.step_s, applied.runner_s, False, applied.drafted)
        if self.renewed:
            self._renew()
        self.steps += 1
        drafts = None
        if self.drafting.wants(self.steps - 1, self.guard):
            drafts = self.drafting.lengths(self.slots, self.steps - 1, self.load, self.guard)
        self.planned.append(drafts)
        self._compute(drafts)

    def _renew(self) -> None:
        fresh = (self.rng.random(self.rows) < self.renewed).nonzero()[0]
        if len(fresh):
            self.table.epoch[fresh] = self.table.epoch.max() + 1 + np.arange(len(fresh))
            self.table.changes += 1

    def _compute(self, drafts: npt.NDArray[np.int32] | None) -> None:
        asked = np.zeros(self.rows, np.int32) if drafts is None else drafts
        drafted, accepted = asked.copy(), np.zeros(self.rows, np.int32)
        if drafts is not None:
            if self.proposes is not None:
                drafted[self.rng.random(self.rows) >= self.proposes(self.steps)] = 0
            wrong = 1 - np.minimum(self.acceptance(self.steps), 1 - 1e-9)
            accepted = np.minimum(self.rng.geometric(wrong) - 1, drafted).astype(np.int32)
        charged = self.step_times.verifying.charged(self.rows, int(drafted.sum()), int(asked.max()))
        true_s = self.seconds(self.rows, charged)
        self.busy_s += true_s
        self.tokens += self.rows + int(accepted.sum())
        seconds = true_s * max(0.5, self.rng.normal(1, self.noise))
        column = np.full(self.rows, 256, np.int32)
        batch_rows = BatchRows.of(self.table, self.slots)
        flight = InFlight(
            self.steps, batch_rows, column, 1 + asked, column, column, asked >= 0, b"\1" * self.rows, self.rows,
            self.rows + int(asked.sum()), self.rows, False, 0.0, drafts=drafts,
        )  # fmt: skip
        applied = AppliedResult(flight, batch_rows.rows, column, batch_rows.sequence_ids)
        applied.step_s, applied.runner_s = seconds * 1.02, seconds
        if drafts is not None:
            applied.drafted, applied.accepted = drafted, accepted
        self._in_flight.append((flight, applied))


def best_rate(seconds: Seconds, rows: int, acceptance: float, max_drafts: int = 7) -> float:
    """Returns the best tokens a second with as many drafts of each row, relative to those without."""
    counts = np.arange(max_drafts + 1)
    tokens = (acceptance**counts).cumsum()
    return float(max(tokens / [seconds(rows, rows * count) / seconds(rows, 0) for count in counts.tolist()]))
