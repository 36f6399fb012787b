"""Plans in flight: what each of them waits for, and their results in order.

The scheduler sends the next plan as soon as it is made, which may be before the masks of this one. So when they come
the sequences of some rows may have left their slots (cancelled, expired, preempted, displaced), and others may be
there: the rows are checked against the slots' epochs before their draw is launched, and those that are gone write
nothing into a slot.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress

import numpy as np
from numpy.typing import NDArray

from roster_protos import plan_pb2
from runner_svc.batch.batch_state import AppliedPlan
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.execution.jobs import ExecutePlan, TakeMasks, fault_of
from runner_svc.interface.step import MaskedRows, PendingStep, StepOutput


class LaunchedPlan:
    """A forward pass, and its rows that wait for masks.

    These are sampled as soon as the last of their masks is here; nothing else waits for that.
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
        """`finish` makes the result of what the forward pass and the rows that waited (None: none did) came to.

        `faulting` turns what is raised within it into a PlanFault. `mask_words`: uint32 of a mask. `outlived`: see
        `BatchState`.
        """
        self.number = number
        self.began_at = time.monotonic()
        """Since then it has had all that it needs, as far as that is here."""
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
        """Some row can't be sampled yet."""
        return bool(self._missing)

    def mask(self, masks: plan_pb2.Masks) -> None:
        """Takes masks; those of rows that wait for none are ignored. Raises PlanFault."""
        self.began_at = time.monotonic()
        for entry in masks.rows:
            if entry.row in self._missing:
                self._masks[self._index_of[entry.row]] = self._bits(entry)
                self._missing.remove(entry.row)
        masked_rows = self._pending.masked_rows
        if masked_rows is not None and self._masked is None and not self._missing:
            self._draw(masked_rows)

    def done(self) -> bool:
        """Whether `wait` would return at once; cheap."""
        return not self._missing and self._pending.done() and (self._masked is None or self._masked.done())

    def wait(self) -> plan_pb2.Result:
        """Blocks until the plan is done; called once, in the order of the launches, when no mask is missing.

        Raises PlanFault when it failed in the backend.
        """
        if self._missing:
            raise RuntimeError(f"plan {self.number} still waits for masks")
        return self._wait()

    def abandon(self) -> None:
        """Ends a plan whose session is over, in place of `wait`: rows that wait for masks come to nothing."""
        self._wait()

    def _draw(self, masked_rows: MaskedRows) -> None:
        try:
            with self._faulting(self.number):
                self._masked = masked_rows.sample(self._masks, self._outlived(self._applied, self._waits))
        except PlanFault as fault:
            self._fault = fault
            raise

    def _wait(self) -> plan_pb2.Result:
        with self._faulting(self.number):
            output = self._pending.wait()
            if self._fault is not None:
                raise self._fault
            return self._finish(output, self._masked.wait() if self._masked is not None else None)

    def _bits(self, entry: plan_pb2.RowMask) -> NDArray[np.uint32]:
        if len(entry.bits) != 4 * self._masks.shape[1]:
            raise PlanFault(
                f"plan {self.number}: the mask of row {entry.row} has {len(entry.bits)} bytes, "
                f"not {4 * self._masks.shape[1]}"
            )
        return np.frombuffer(entry.bits, "<u4")


class PlansInFlight:
    """Those of the current session, the oldest first; belongs to the thread that calls the runner."""

    def __init__(self, launch: Callable[[int, plan_pb2.Plan], LaunchedPlan]) -> None:
        """`launch`: the runner's."""
        self._launch = launch
        self._plans: deque[tuple[int, LaunchedPlan]] = deque()  # each with its session

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def oldest_awaits_masks(self) -> bool:
        """Nothing comes out before the scheduler's next word."""
        return bool(self._plans) and self._plans[0][1].awaits_masks

    @property
    def oldest_began_at(self) -> float | None:
        """When (`time.monotonic`) the oldest plan began to compute; None while it waits for masks, or there is none."""
        return self._plans[0][1].began_at if self._plans and not self.oldest_awaits_masks else None

    @property
    def oldest_done(self) -> bool:
        """`take_result` would return at once."""
        return bool(self._plans) and self._plans[0][1].done()

    def launch(self, job: ExecutePlan) -> None:
        """Starts the plan. Raises PlanFault."""
        self._plans.append((job.session, self._launch(job.number, job.plan)))

    def hand_masks(self, job: TakeMasks) -> None:
        """Hands masks to their plan; those for a plan that is not in flight are dropped. Raises PlanFault."""
        for session, plan in self._plans:
            if (session, plan.number) == (job.session, job.number):
                plan.mask(job.masks)

    def take_result(self) -> plan_pb2.ToScheduler:
        """Waits for the oldest plan, which must not await masks; its result, or its fault."""
        session, plan = self._plans.popleft()
        try:
            return plan_pb2.ToScheduler(session=session, number=plan.number, result=plan.wait())
        except Exception as error:
            return fault_of(session, error)

    def finish_all(self) -> Iterator[plan_pb2.ToScheduler]:
        """Waits for the plans, their results or faults; abandons those from the first on that awaits masks."""
        while self._plans and not self.oldest_awaits_masks:
            yield self.take_result()
        while self._plans:
            with suppress(PlanFault):
                self._plans.popleft()[1].abandon()
