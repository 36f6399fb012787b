"""Measures at start what steps cost, by rows and prompt positions: the seed of the scheduler's step-time model.

The runner executes plans of its own before its first session, so every backend is measured as it serves: with graphs,
and with the next plan launched while one computes. Contexts need no prefill, as a row's time does not depend on the
values in the cache: one block is computed and copied to the others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import structlog

from roster_common.link_protocol import GRAPH_DRAFTS, SAMPLE_FLAG
from roster_protos import plan_pb2
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.execution.plans_in_flight import LaunchedPlan
from runner_svc.execution.runner import Runner
from runner_svc.settings.drafter_names import MEDUSA, draft_parts
from runner_svc.timings.start_timings import COST_FIELDS, StartTimings

GPU_SECONDS, CPU_SECONDS = 2.0, 0.4
"""Time after which no further step is measured."""
DRAFTING = 1.5
"""Factor of this time for a runner with a drafter, which has more kinds of steps."""
_COPIED_BLOCKS = 64
"""Blocks that one plan copies: a copy needs as much memory again."""
_DEPTH = 2
_WARMING = 5
"""Steps that `warm_up` executes."""
_PERIOD = 32
"""Tokens after which the text of a row that drafts repeats itself."""
_MOST_STEPS = 4
"""Steps of one kind in a row, each of which adds a position to every decoding row."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Step:
    """A step of `rows` decoding rows, each with a context of `context` positions, and a chunk of a prompt.

    Each decoding row verifies `drafts` tokens.
    """

    rows: int
    context: int = 0
    positions: int = 0
    start: int = 0
    drafts: int = 0


def steps_to_measure(hello: plan_pb2.Hello) -> list[Step]:
    """Returns the steps that the runner can execute, those first without which the others say little."""
    slots = hello.num_slots
    cases = [Step(1, 256), Step(0, 0, 64), Step(min(8, slots), 256), Step(0, 0, 256), Step(min(8, slots - 1), 256, 64)]
    if most := hello.max_drafts:
        few, many, half = min(8, slots), min(64, slots), _half(most)
        cases[3:3] = [Step(1, 256, drafts=most), Step(few, 256, drafts=most)]
        cases += [Step(1, 256, drafts=half), Step(many, 256, drafts=half), Step(min(256, slots), 256, drafts=1)]
    cases += [
        Step(min(64, slots), 256),
        Step(0, 0, 1024),
        Step(min(64, slots), 1024),
        Step(min(32, slots - 1), 1024, 480),
    ]
    cases += [Step(min(256, slots), 256), Step(min(64, slots - 1), 1024, 960), Step(0, 0, 2048)]
    cases += [Step(min(64, slots - 1), 512, 1984), Step(0, 0, 512, 4096), Step(0, 0, 4096), Step(slots, 256)]
    possible = [step for case in cases if (step := _fitting(case, hello)) is not None]
    return list(dict.fromkeys(possible))


def _half(most: int) -> int:
    """Returns about half as many drafts, a number that has graphs of its own: others cost as much as the next."""
    return max((drafts for drafts in GRAPH_DRAFTS if 2 * drafts <= most), default=most)


def _fitting(step: Step, hello: plan_pb2.Hello) -> Step | None:
    """Returns the step, with shorter contexts if the cache or the model requires it; None if the runner can't execute
    it."""
    longest, end, size = hello.model.context_length, step.start + step.positions, hello.block_size
    total = step.rows * (1 + step.drafts) + step.positions
    if total > hello.max_step_tokens or end >= longest or not total:
        return None
    if not step.rows:
        return step if -(-end // size) < hello.num_blocks else None
    each = (hello.num_blocks - 1 - -(-end // size)) // step.rows * size
    context = min(step.context, longest // 2, longest - 3 - step.drafts, each - max(_MOST_STEPS, 2 + step.drafts))
    return replace(step, context=context) if context > 0 else None


def measured_step_costs(runner: Runner, on_gpu: bool) -> list[plan_pb2.StepCost]:
    """Returns the times of the steps measured within `GPU_SECONDS` or `CPU_SECONDS`.

    Returns none if the backend fails, or if there was no time for a prompt, about which decode steps say nothing.
    Leaves the runner without a session, and arbitrary values in its cache.
    """
    measurement = _Measurement(runner)
    seconds = (GPU_SECONDS if on_gpu else CPU_SECONDS) * (DRAFTING if measurement.hello.max_drafts else 1)
    until_at = time.monotonic() + seconds
    costs: list[plan_pb2.StepCost] = []
    try:
        steps = steps_to_measure(measurement.hello)
        for number, step in enumerate(steps):
            if time.monotonic() > until_at:
                break
            measurement.fill_cache(step)
            warm_up, timed = (1, 3) if on_gpu else (int(number == 0), 1)
            costs += measurement.cost(step, warm_up, timed)
    except PlanFault as fault:
        log.warning("the steps can't be measured: the scheduler learns their times from results", reason=str(fault))
        costs.clear()
    if not any(cost.prompt_positions for cost in costs):
        costs.clear()
    runner.reset()
    return costs


def kept_step_costs(timings: StartTimings) -> list[plan_pb2.StepCost]:
    """Returns what an earlier start measured; [] if it measured nothing."""
    return [plan_pb2.StepCost(**dict(zip(COST_FIELDS, cost, strict=True))) for cost in timings.step_costs or []]


def keep_step_costs(timings: StartTimings, costs: list[plan_pb2.StepCost]) -> None:
    """Adds the costs to the timings, if there are any."""
    if costs:
        timings.step_costs = [[getattr(cost, name) for name in COST_FIELDS] for cost in costs]


def warm_up(runner: Runner) -> None:
    """Executes a few small steps once, so that libraries are loaded; leaves the runner as `measured_step_costs`."""
    measurement = _Measurement(runner)
    try:
        for step in steps_to_measure(measurement.hello)[:_WARMING]:
            measurement.fill_cache(step)
            measurement.cost(step, 0, 1)
    except PlanFault as fault:
        log.warning("the first steps failed", reason=str(fault))
    runner.reset()


class _Measurement:
    """Plans of one runner, each sent after the last."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.hello = runner.hello()
        self._draws_first = draft_parts(self.hello.drafter)[0] == MEDUSA
        """Whether a row drafts only after a step that drew its last token."""
        self._rng = np.random.default_rng(0)
        self._in_flight: deque[LaunchedPlan] = deque()
        self._filled = 0
        self._written: set[int] = set()  # blocks that steps wrote to since they were filled, and copies of such
        runner.reset()

    def fill_cache(self, step: Step) -> None:
        """Fills the blocks that the step reads: the first is computed, the others are copies of it.

        Blocks that no step reads stay untouched: on a CPU, filling them takes longer than the steps.
        """
        size = self.hello.block_size
        if not self._filled or (step.drafts and 1 in self._written):
            self._runner.reset()
            self._execute(self._first_block())
            self._filled = max(self._filled, 1)
        most = step.rows * self._blocks(step) + -(-step.start // size) + 1
        targets = np.arange(self._filled + 1, min(most, self.hello.num_blocks) + 1)
        self._filled += len(targets)
        if step.drafts:  # what a draft model computed of blocks that earlier rows wrote to does not count
            targets = np.concatenate([targets, sorted(self._written - {1, *targets.tolist()})]).astype(np.int64)
            self._written.clear()
        elif 1 in self._written:
            self._written.update(targets.tolist())
        parts = [targets[at : at + _COPIED_BLOCKS] for at in range(0, len(targets), _COPIED_BLOCKS)]
        for part in parts:
            ones = np.ones(len(part), "<i4").tobytes()
            self._execute([plan_pb2.Plan(copy_sources=ones, copy_targets=part.astype("<i4").tobytes())])

    def _first_block(self) -> list[plan_pb2.Plan]:
        """Returns plans that compute the first block, also that of a draft model, which computes in rows that draft."""
        size, hello = self.hello.block_size, self.hello
        room = min(hello.num_blocks * size, hello.model.context_length) - size
        drafts = hello.max_drafts > 0 and room > 2 and hello.max_step_tokens > 1
        plan = plan_pb2.Plan(admissions=[self._admission(0, size + drafts, 0, np.arange(1, 2 + drafts), drafts)])
        _set_extents(plan, [(0, 0, size, 0)])
        if not drafts:
            return [plan]
        drafting = plan_pb2.Plan(extent_drafts=b"\1")
        _set_extents(drafting, [(0, -1, 2, SAMPLE_FLAG)])
        return [plan, drafting]

    def cost(self, step: Step, warm_up: int, timed: int) -> list[plan_pb2.StepCost]:
        """Executes the step `warm_up` + `timed` times in a row; returns its median time.

        Returns nothing if a row failed, or verified fewer drafts than the step has.
        """
        self._runner.reset()
        results = self._execute(list(self._plans(step, warm_up + timed)))
        results = (results[1::2] if step.drafts and self._draws_first else results)[warm_up:]
        if any(any(result.statuses) or set(result.drafted) - {step.drafts} for result in results):
            return []
        took_ns = [result.timings.forward_ns + result.timings.sample_ns for result in results]
        return [
            plan_pb2.StepCost(
                decode_rows=step.rows,
                context=step.rows * step.context,
                prompt_positions=step.positions,
                prompt_start=step.start,
                drafts=step.drafts,
                step_ns=int(np.median(took_ns)),
            )
        ]

    def _plans(self, step: Step, count: int) -> Iterator[plan_pb2.Plan]:
        """Yields `count` plans with the step's work.

        The decoding rows go on from one to the next, but those that draft begin again: their next tokens are unknown.
        Each of these is preceded by a step that draws a token, where the drafter needs one.
        """
        size, per_row = self.hello.block_size, self._blocks(step)
        chunk, end = step.rows, step.start + step.positions
        blocks = 1 + step.rows * per_row + np.arange(-(-end // size))
        for number in range(count):
            plan = plan_pb2.Plan()
            released: list[int] = []
            start = -1 if step.drafts else step.context + number
            rows = [(row, start, 1 + step.drafts, SAMPLE_FLAG) for row in range(step.rows)]
            if number == 0 or step.drafts:
                released += range(step.rows)
                for row in range(step.rows):
                    own = 1 + row * per_row + np.arange(per_row)
                    self._written.update(own[step.context // size :].tolist())
                    admission = self._admission(row, step.context + 1, step.context, own, step.drafts > 0)
                    plan.admissions.append(admission)
            if step.positions:
                plan.admissions.append(self._admission(chunk, end, step.start, blocks))
                released.append(chunk)
                self._written.update(blocks.tolist())
                rows.append((chunk, step.start, step.positions, SAMPLE_FLAG))
            plan.releases = np.array(released if number else [], "<i4").tobytes()
            if step.drafts and self._draws_first:
                _set_extents(plan, [(row, step.context, 1, SAMPLE_FLAG) for row in range(step.rows)])
                yield plan
                plan = plan_pb2.Plan()
            _set_extents(plan, rows)
            if step.drafts:
                plan.extent_drafts = bytes([step.drafts] * step.rows)
            yield plan

    def _blocks(self, step: Step) -> int:
        """Returns the blocks of one decoding row."""
        most = step.context + max(_MOST_STEPS, 2 + step.drafts)
        return -(-most // self.hello.block_size) if step.rows else 0

    def _admission(
        self, slot: int, num_tokens: int, computed: int, blocks: np.ndarray, repeats: bool = False
    ) -> plan_pb2.Admission:
        """Returns an admission with random tokens; a text that `repeats` itself has something to draft."""
        random = self._rng.integers(0, self.hello.model.vocab_size, _PERIOD if repeats else num_tokens)
        tokens = np.resize(random, num_tokens)
        return plan_pb2.Admission(
            slot=slot,
            sequence_id=slot + 1,
            tokens=tokens.astype("<i4").tobytes(),
            prompt_len=num_tokens,
            num_computed=computed,
            sampling=plan_pb2.Sampling(temperature=1.0, top_p=1.0, repetition_penalty=1.0),
            blocks=blocks.astype("<i4").tobytes(),
        )

    def _execute(self, plans: list[plan_pb2.Plan]) -> list[plan_pb2.Result]:
        """Executes the plans; an overlapping backend gets the next one while it computes."""
        results = []
        for plan in plans:
            self._in_flight.append(self._runner.launch(self._runner.last_plan + 1, plan))
            if len(self._in_flight) >= (_DEPTH if self._runner.overlaps else 1):
                results.append(self._in_flight.popleft().wait())
        while self._in_flight:
            results.append(self._in_flight.popleft().wait())
        return results


def _set_extents(plan: plan_pb2.Plan, rows: list[tuple[int, int, int, int]]) -> None:
    """Sets the columns of the plan's rows (slot, start, count, flags)."""
    slots, starts, counts, flags = np.array(rows, "<i4").T
    plan.extent_slots, plan.extent_starts, plan.extent_counts = slots.tobytes(), starts.tobytes(), counts.tobytes()
    plan.extent_flags = flags.astype(np.uint8).tobytes()
