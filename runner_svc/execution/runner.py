"""Executes numbered plans in order: slots, backend, result. It uses no sockets, so tests drive it in process.

`launch` starts a plan and `LaunchedPlan.wait` ends it. Plan N+1 may be launched while rows of plan N wait for their
masks and, with an overlapping backend, while N computes. `execute` is launch and wait in one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
from numpy.typing import NDArray

from roster_common.link_protocol import PROTOCOL_VERSION
from roster_protos import plan_pb2
from runner_svc.batch.batch_state import AppliedPlan, BatchState
from runner_svc.batch.host_tickets import HostTickets
from runner_svc.batch.plan_check import Limits
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.execution.held_step import HeldStep, nothing
from runner_svc.execution.host_tier import HostTier
from runner_svc.execution.plans_in_flight import LaunchedPlan
from runner_svc.interface.backend import Backend, OverlappingBackend, SlotBackend
from runner_svc.interface.step import DoneStep, PendingStep, StepOutput
from runner_svc.tiers.kv_copier import KVCopier


class Runner:
    """One backend and its slots. One thread calls it; methods other than `launch` only while no plan is in flight."""

    def __init__(
        self,
        backend: Backend,
        runner_id: str = "runner",
        max_depth: int = 3,
        copier: KVCopier | None = None,
        role: str = "both",
    ) -> None:
        """`copier`: that of the backend's cache and a host pool; None without a host pool.

        `role`: what the runner is for: "prefill", "decode" or "both".
        """
        self._backend = backend
        self.runner_id = runner_id
        self.max_depth = max_depth
        """Maximum number of plans in flight."""
        self.step_costs: list[plan_pb2.StepCost] = []
        """What steps cost, as measured at start; empty if they were not measured."""
        self._role = role
        self._overlapping = backend if isinstance(backend, OverlappingBackend) else None
        self._slot_backend = backend if isinstance(backend, SlotBackend) else None
        # Without a counter of known tokens in the backend, no row can draft. A row's number of tokens is a byte.
        self._max_drafts = min(getattr(backend, "max_drafts", 0), 254) if self._slot_backend is not None else 0
        model = backend.model
        host_blocks = copier.num_host_blocks if copier is not None else 0
        tickets = HostTickets(backend.num_blocks, host_blocks, backend.block_size)
        forget = getattr(backend, "forget_drafts", None)
        self._tier = HostTier(copier, tickets, forget) if copier is not None else None
        self._held: HeldStep | None = None
        self._state = BatchState(
            Limits(
                num_slots=backend.num_slots,
                num_blocks=backend.num_blocks,
                block_size=backend.block_size,
                max_step_tokens=backend.max_step_tokens,
                context_length=model.context_length,
                vocab_size=model.vocab_size,
                max_drafts=self._max_drafts,
            ),
            gathers_inputs=self._slot_backend is not None,
            tickets=tickets,
        )
        self._mask_words = -(-model.vocab_size // 32)
        self._last_plan = 0
        self._faulted = False
        self.broken = False
        """The backend has failed and can't recover: a new process is needed."""
        self._last_ended_at_ns: int | None = None

    @property
    def overlaps(self) -> bool:
        """Whether `launch` returns before the plan has computed."""
        return self._overlapping is not None

    @property
    def lost(self) -> str:
        """Why no more plans can be executed with the other ranks of this runner's group; '' while they can."""
        return ""

    @property
    def last_plan(self) -> int:
        """Number of the last plan launched in this session; 0 before the first."""
        return self._last_plan

    def hello(self) -> plan_pb2.Hello:
        """Returns the message that describes this runner to the scheduler."""
        backend = self._backend
        hello = plan_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            runner_id=self.runner_id,
            device=backend.device,
            num_slots=backend.num_slots,
            block_size=backend.block_size,
            num_blocks=backend.num_blocks,
            max_step_tokens=backend.max_step_tokens,
            tile_tokens=backend.tile_tokens,
            max_depth=self.max_depth,
            # Layers with pools and block tables of their own (hybrid models) would be further groups.
            cache_groups=1,
            model=backend.model,
            role=self._role,
            step_costs=self.step_costs,
            max_drafts=self._max_drafts,
            drafter=getattr(backend, "drafter_name", "") if self._max_drafts else "",
            max_sampled=getattr(backend, "max_sampled", 0),
            has_experts=getattr(backend, "has_experts", False),
            fingerprints={"weights": backend.model.weights_version, **getattr(backend, "fingerprints", {})},
        )
        if self._tier is not None:
            self._tier.describe(hello)
        return hello

    @property
    def naming_secret(self) -> bytes:
        """The secret that names the blocks of the host pool; empty if it holds none. Any thread may ask."""
        return self._tier.naming_secret if self._tier is not None else b""

    def reset(self, naming_secret: bytes = b"") -> None:
        """Begins a session with empty slots; plans count from 1 again.

        The host pool keeps its blocks if `naming_secret`, that of the session's scheduler, is that of the one before.
        """
        self._state.reset()
        self._begin_session(naming_secret)

    def resume(self, naming_secret: bytes = b"") -> None:
        """Begins a session that keeps the sequences; plans count from 1 again. `naming_secret` is as for `reset`.

        Raises PlanFault after a fault: a plan may have been partly applied, so the slots are not reliable.
        """
        if self._faulted:
            raise PlanFault("the sequences can't be kept after a fault: begin a session without resume")
        self._begin_session(naming_secret)

    def snapshot(self) -> plan_pb2.Snapshot:
        """Returns the resident sequences as of the last executed plan, and what the host pool holds.

        Waits for the copies in flight. Raises PlanFault if they failed.
        """
        self.finish_copies()
        snapshot = plan_pb2.Snapshot(last_plan=self._last_plan, sequences=self._state.residents())
        if self._tier is not None:
            self._state.tickets.add_to(snapshot)
        return snapshot

    def finish_copies(self) -> None:
        """Waits for the copies in flight, so that no result is held. Raises PlanFault if they failed."""
        if self._tier is None:
            return
        try:
            self._tier.finish()
        except Exception as error:
            self._fail(error)
            raise PlanFault(self.lost or f"copying KV blocks failed: {told(error)}") from error

    def release_held(self) -> None:
        """Ends the wait of a result that is held until a copy is done."""
        if self._held is not None:
            self._held.release()
            self._held = None

    def look_at_copies(self) -> bool:
        """Lets copies go on whose backend has no thread for them; returns whether any is in flight."""
        return self._tier is not None and self._tier.look()

    def wake_for_copies(self, on_done: Callable[[], None]) -> None:
        """Has `on_done` called, from any thread, when a copy is done that a held result may wait for."""
        if self._tier is not None:
            self._tier.wake(on_done)

    def execute(self, number: int, plan: plan_pb2.Plan, masks: plan_pb2.Masks | None = None) -> plan_pb2.Result:
        """Executes the plan after `last_plan`; raises PlanFault as `launch` and `LaunchedPlan.wait` do.

        `masks` has the masks of all rows that wait for one.
        """
        launched = self.launch(number, plan)
        if masks is not None:
            launched.mask(masks)
        return launched.wait()

    def launch(self, number: int, plan: plan_pb2.Plan) -> LaunchedPlan:
        """Starts the plan after `last_plan`.

        Raises PlanFault if `number` is not the next one, the plan does not fit the slots (nothing of it is applied), or
        the backend fails. From then on every plan is refused until `reset`.
        """
        self.release_held()
        if self._faulted:
            raise PlanFault("an earlier plan failed: no plan executes until a new session begins")
        if number != self._last_plan + 1:
            fault = PlanFault(f"plan {number} can't follow plan {self._last_plan}")
            self._fail(fault)
            raise fault
        with self._faulting(number):
            launched = self._launch(number, plan)
        self._last_plan = number
        return launched

    @contextmanager
    def _faulting(self, number: int) -> Iterator[None]:
        """Turns any exception into a PlanFault and marks the session as faulted."""
        try:
            yield
        except PlanFault as fault:
            self._fail(fault)
            raise
        except Exception as error:
            self._fail(error)
            raise PlanFault(self.lost or f"plan {number} failed in the backend: {told(error)}") from error

    def _fail(self, error: Exception) -> None:
        """Marks the session as faulted, by an error of the backend or because a plan is refused (PlanFault)."""
        self._faulted = True
        if self._tier is not None:
            self._tier.fault()
        if not isinstance(error, PlanFault):
            self.broken = self.broken or self._backend.is_broken_by(error)

    def _launch(self, number: int, plan: plan_pb2.Plan) -> LaunchedPlan:
        began_at_ns = time.perf_counter_ns()
        idle_ns = began_at_ns - self._last_ended_at_ns if self._last_ended_at_ns is not None else 0
        applied = self._state.apply(plan)
        if self._slot_backend is not None:
            self._slot_backend.change_slots(applied.changes)
        if len(applied.copy_sources):
            self._backend.copy_blocks(applied.copy_sources, applied.copy_targets)
        if applied.copies is not None and self._tier is not None:
            self._tier.start(applied.copies)
        timings = plan_pb2.Timings(idle_ns=idle_ns, prepare_ns=time.perf_counter_ns() - began_at_ns)
        pending = self._start(applied)

        def finish(output: StepOutput, masked: StepOutput | None) -> plan_pb2.Result:
            return self._finish(applied, output, masked, timings)

        return LaunchedPlan(number, applied, pending, finish, self._faulting, self._mask_words, self._state.outlived)

    def _start(self, applied: AppliedPlan) -> PendingStep:
        """Starts the batch. A blocking backend's output is recorded at once, because the next plan may depend on it."""
        if applied.batch is None:
            if self._tier is not None and not applied.num_rows and self._tier.in_flight:
                self._held = HeldStep(self._tier.has_news)
                return self._held
            return DoneStep(nothing())
        if self._overlapping is not None:
            return self._overlapping.launch(applied.batch)
        output = self._backend.step(applied.batch)
        self._state.record(applied, output, ~_waiting(applied))
        return DoneStep(output)

    def _finish(
        self, applied: AppliedPlan, output: StepOutput, masked: StepOutput | None, timings: plan_pb2.Timings
    ) -> plan_pb2.Result:
        """Makes the result. `masked`: output of the rows that waited; None if there are none or they were abandoned."""
        if masked is not None:
            output.add(masked)
        self._state.record(applied, output, None if self._overlapping is not None else _waiting(applied))
        result = _result(applied, output)
        timings.forward_ns = output.forward_ns
        timings.sample_ns = output.sample_ns
        if output.idle_ns is not None:
            timings.idle_ns = output.idle_ns
        result.timings.CopyFrom(timings)
        if self._tier is not None:
            self._tier.name_done(result)
        self._last_ended_at_ns = time.perf_counter_ns()
        return result

    def _begin_session(self, naming_secret: bytes) -> None:
        if self._tier is not None:
            with suppress(PlanFault):  # the copies of the session that is over; a broken backend executes no plan
                self.finish_copies()
            self._tier.begin_session(naming_secret)
        self._last_plan = 0
        self._faulted = False
        self._last_ended_at_ns = None


def told(error: Exception) -> str:
    """Returns the error's kind and text."""
    return f"{type(error).__name__}: {error}"


def _waiting(applied: AppliedPlan) -> NDArray[np.bool_]:
    """Returns bool [R]: the batch's rows that wait for masks."""
    return applied.batch.waiting if applied.batch is not None else np.zeros(0, np.bool_)


def _failed(num_rows: int) -> np.ndarray:
    return np.full(num_rows, plan_pb2.ROW_STATUS_FAILED, np.uint8)


def _result(applied: AppliedPlan, output: StepOutput) -> plan_pb2.Result:
    """Returns the output by plan row; rows left out of the batch have failed."""
    statuses, token_counts = output.statuses, output.token_counts
    drafted = np.zeros(applied.num_rows if applied.drafts else 0, np.uint8)
    if len(output.drafted):
        drafted[applied.rows] = output.drafted
    if len(applied.rows) < applied.num_rows:
        statuses = _failed(applied.num_rows)
        statuses[applied.rows] = output.statuses
        token_counts = np.zeros(applied.num_rows, np.uint8)
        token_counts[applied.rows] = output.token_counts
        for logprobs in (*output.logprobs, *output.prompt_logprobs):
            logprobs.row = int(applied.rows[logprobs.row])
    return plan_pb2.Result(
        statuses=statuses.tobytes(),
        token_counts=token_counts.tobytes(),
        tokens=output.tokens.tobytes(),
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
        drafted=drafted.tobytes(),
    )
