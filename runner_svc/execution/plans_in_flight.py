"""Plans in flight: what each plan waits for, and the results in order.

The scheduler sends a plan as soon as it is made, which may be before the masks of the previous one. When masks arrive,
the sequences of some rows may therefore have left their slots (cancelled, expired, preempted, displaced), and others
may have entered. The rows are checked against the slots' epochs before their draw is launched; a row whose sequence is
gone writes nothing into a slot.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from roster_protos import plan_pb2
from runner_svc.batch.batch_state import AppliedPlan
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.execution.held_step import HeldStep
from runner_svc.execution.jobs import ExecutePlan, TakeMasks, fault_of
from runner_svc.interface.step import MaskedRows, PendingStep, StepOutput


class PlanWitness(Protocol):
    """Sees what becomes of a launched plan: the other ranks of a group do the same with theirs."""

    def before_masks(self, number: int, masks: plan_pb2.Masks) -> None:
        """Called before the plan takes masks. Raises PlanFault."""

    def before_wait(self, number: int) -> None:
        """Called before the plan is waited for or abandoned. Raises PlanFault."""

    def after_wait(self, number: int, result: plan_pb2.Result) -> None:
        """Called with the result. Raises PlanFault."""


class LaunchedPlan:
    """A launched forward pass with its rows that wait for masks.

    These rows are sampled once the last of their masks has arrived; other plans do not wait for that.
    """

    def __init__(
        self,
        number: int,
        applied: AppliedPlan,
        pending: PendingStep,
        finish: Callable[[StepOutput, StepOutput | None], plan_pb2.Result],
        faulting: Callable[[int], AbstractContextManager[None]],
        mask_words: int,
        outlived: Callable[[AppliedPlan, NDArray[np.intp]], NDArray[np.bool_]],
    ) -> None:
        """`finish` makes the result from the outputs of the forward pass and of the rows that waited (None: no row).

        `faulting` turns exceptions raised within it into PlanFault. `mask_words` is the size of a mask in uint32.
        `outlived` is that of `BatchState`.
        """
        self.number = number
        self.began_at = time.monotonic()
        """Time of the launch, or of the last masks received."""
        self.queued_s: float | None = None
        """Seconds for which the plan waited to be launched; None if launches do not wait for the plan before."""
        self.witness: PlanWitness | None = None
        self._applied = applied
        self._pending = pending
        self._finish = finish
        self._faulting = faulting
        self._outlived = outlived
        waits = applied.batch.awaits if applied.batch is not None else np.zeros(0, np.intp)
        self._index_of = {int(applied.rows[row]): index for index, row in enumerate(waits.tolist())}
        self._missing = set(self._index_of)
        self._waits = waits
        self._masks = np.zeros((len(waits), mask_words), np.uint32)
        self._masked: PendingStep | None = None
        self._fault: PlanFault | None = None  # of the draw of the rows that waited

    @property
    def awaits_masks(self) -> bool:
        """Whether some row still lacks its mask."""
        return bool(self._missing)

    @property
    def is_held(self) -> bool:
        """Whether its result waits for copies, or did."""
        return isinstance(self._pending, HeldStep)

    @property
    def is_masked(self) -> bool:
        """Whether any row lacks or has lacked its mask."""
        return bool(self._index_of)

    def mask(self, masks: plan_pb2.Masks) -> None:
        """Takes masks; masks of rows that wait for none are ignored. Raises PlanFault."""
        self.began_at = time.monotonic()
        if self.witness is not None:
            self.witness.before_masks(self.number, masks)
        for entry in masks.rows:
            if entry.row in self._missing:
                self._masks[self._index_of[entry.row]] = self._bits(entry)
                self._missing.remove(entry.row)
        masked_rows = self._pending.masked_rows
        if masked_rows is not None and self._masked is None and not self._missing:
            self._draw(masked_rows)

    def done(self) -> bool:
        """Returns whether `wait` would return at once. Cheap enough for polling."""
        return not self._missing and self._pending.done() and (self._masked is None or self._masked.done())

    def wait(self) -> plan_pb2.Result:
        """Waits for the plan and returns its result. Called once, in launch order, when no mask is missing.

        Raises PlanFault if the plan failed in the backend.
        """
        if self._missing:
            raise RuntimeError(f"plan {self.number} still waits for masks")
        return self._wait()

    def abandon(self) -> None:
        """Ends a plan whose session is over, in place of `wait`; rows that wait for masks are not sampled."""
        self._wait()

    def _draw(self, masked_rows: MaskedRows) -> None:
        try:
            with self._faulting(self.number):
                self._masked = masked_rows.sample(self._masks, self._outlived(self._applied, self._waits))
        except PlanFault as fault:
            self._fault = fault
            raise

    def _wait(self) -> plan_pb2.Result:
        if self.witness is not None:
            self.witness.before_wait(self.number)
        with self._faulting(self.number):
            output = self._pending.wait()
            if self._fault is not None:
                raise self._fault
            result = self._finish(output, self._masked.wait() if self._masked is not None else None)
        if self.witness is not None:
            self.witness.after_wait(self.number, result)
        return result

    def _bits(self, entry: plan_pb2.RowMask) -> NDArray[np.uint32]:
        if len(entry.bits) != 4 * self._masks.shape[1]:
            raise PlanFault(
                f"plan {self.number}: the mask of row {entry.row} has {len(entry.bits)} bytes, "
                f"not {4 * self._masks.shape[1]}"
            )
        return np.frombuffer(entry.bits, "<u4")


class PlansInFlight:
    """Plans in flight of the current session, oldest first; used only by the thread that calls the runner."""

    def __init__(self, launch: Callable[[int, plan_pb2.Plan], LaunchedPlan], overlaps: bool) -> None:
        """`launch` is `Runner.launch`, which returns before the plan is computed if `overlaps`."""
        self._launch = launch
        self._overlaps = overlaps
        self._ended_at = 0.0  # when the last result was taken
        self._plans: deque[tuple[int, LaunchedPlan]] = deque()  # each with its session

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def oldest_awaits_masks(self) -> bool:
        """Whether no result can be ready before the scheduler sends masks."""
        return bool(self._plans) and self._plans[0][1].awaits_masks

    @property
    def oldest_began_at(self) -> float | None:
        """When (`time.monotonic`) the oldest plan began to compute; None while it waits for masks or copies, or if
        there is none."""
        if not self._plans or self.oldest_awaits_masks or self._plans[0][1].is_held:
            return None
        return self._plans[0][1].began_at

    @property
    def oldest_done(self) -> bool:
        """Whether `take_result` would return at once."""
        return bool(self._plans) and self._plans[0][1].done()

    def launch(self, job: ExecutePlan) -> None:
        """Launches the plan. Raises PlanFault."""
        began_at = time.monotonic()
        plan = self._launch(job.number, job.plan)
        if not self._overlaps:
            plan.queued_s = began_at - job.received_at
        self._plans.append((job.session, plan))

    def hand_masks(self, job: TakeMasks) -> None:
        """Passes masks to their plan, or drops them if the plan is not in flight. Raises PlanFault."""
        for session, plan in self._plans:
            if (session, plan.number) == (job.session, job.number):
                plan.mask(job.masks)

    def take_result(self) -> plan_pb2.ToScheduler:
        """Waits for the oldest plan, which must not await masks; returns its result or fault."""
        session, plan = self._plans.popleft()
        try:
            result = plan.wait()
        except Exception as error:
            return fault_of(session, error)
        if plan.number > 1 and not plan.is_masked and not plan.is_held:
            early_s = plan.queued_s if plan.queued_s is not None else max(0.0, self._ended_at - plan.began_at)
            result.timings.early_ns = int(early_s * 1e9) - result.timings.idle_ns
        self._ended_at = time.monotonic()
        return plan_pb2.ToScheduler(session=session, number=plan.number, result=result)

    def finish_all(self) -> Iterator[plan_pb2.ToScheduler]:
        """Waits for the plans and yields their results or faults; abandons plans from the first that awaits masks.

        No result is held: the caller has released it, or has waited for the copies.
        """
        while self._plans and not self.oldest_awaits_masks:
            yield self.take_result()
        while self._plans:
            with suppress(PlanFault):
                self._plans.popleft()[1].abandon()
