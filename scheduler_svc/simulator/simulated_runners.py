"""Simulated runners: they answer each plan with the tokens it asks for, after the time given by a cost model.

The class replaces `RunnerLink`, with the same methods but without sockets. A runner executes its plans in order, one at
a time; a plan that arrives meanwhile waits, as at a real runner.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from roster_common.link_protocol import PROTOCOL_VERSION
from roster_protos import engine_pb2, plan_pb2
from scheduler_svc.link.runner_events import GotResult, GotSnapshot, Joined, RunnerEvent
from scheduler_svc.simulator.cost_model import CostModel, RunnerShape, StepWork
from scheduler_svc.simulator.fast_forward import FastForward
from scheduler_svc.simulator.simulated_copies import SimulatedCopies
from scheduler_svc.simulator.simulated_drafts import Run, SimulatedDrafts
from scheduler_svc.simulator.step_tallies import StepTallies
from scheduler_svc.simulator.virtual_clock import VirtualClock

MOST_RESULTS = 4096
"""Maximum number of cached results. Steps in which the same rows sample share one result, which is never modified."""
STOP_TOKEN = 1
"""Ends a sequence whose `max_tokens` exceeds the trace's output length."""
DRAFTER = "simulated"
"""Name of what drafts."""
TOKEN = 2
"""The token that a simulated runner samples, except at a stop."""
_TOKENS = np.full(8192, TOKEN, "<i4").tobytes()
_STATUSES = bytes(8192)


class SimulatedRunners:
    """Identical runners with sessions 1 to `count`.

    `stops` maps the ids of requests that end before their `max_tokens` to their output lengths, at which the runner
    samples `STOP_TOKEN`. `noise` returns the factor by which a step's time differs from the model. `reports_early`:
    results say by how much their plan was early, as those of a real runner do. `drafts`: what drafts up to `max_drafts`
    tokens of a row; None for nothing.
    """

    def __init__(
        self,
        count: int,
        cost: CostModel,
        shape: RunnerShape,
        clock: VirtualClock,
        stops: dict[str, int],
        noise: Callable[[], float] | None,
        reports_early: bool = False,
        drafts: SimulatedDrafts | None = None,
        max_drafts: int = 0,
    ) -> None:
        self._drafts = drafts
        self._reports_early = reports_early
        self._step_seconds = cost.timer()
        self._link_s = cost.link_s
        self._clock = clock
        self._noise = noise
        self._stops = StopPositions(count, shape.slots, stops) if stops else None
        self._sent: list[tuple[int, int, plan_pb2.Plan]] = []
        self._done: list[tuple[float, int, GotResult]] = []  # a heap by the time at which the result arrives
        self._free_at = [0.0] * (count + 1)
        self._serial = 0
        self._results: dict[bytes, plan_pb2.Result] = {}
        self._copies: dict[int, SimulatedCopies] = {}
        if shape.host_kv_tokens >= shape.block_size:
            times_s = shape.load_block_ns * 1e-9, shape.offload_block_ns * 1e-9
            self._copies = {session: SimulatedCopies(*times_s) for session in range(1, count + 1)}
        self._held: dict[int, tuple[float, int]] = {}
        """Plans without rows whose results wait for a copy: when it is done, and the plan's number, by session."""
        hellos = {session: _hello(session, shape, cost, max_drafts) for session in range(1, count + 1)}
        self._joining: list[RunnerEvent] = [Joined(session, hello) for session, hello in hellos.items()]
        self.tallies = StepTallies()

    # ------------------------------------------------------------------ as the engine sees it

    def receive(self) -> list[RunnerEvent]:
        """Returns the results that have arrived by now, in order of arrival."""
        events, self._joining = self._joining, []
        done, now_s = self._done, self._clock.now_s
        if self._held:
            self._release_due(now_s)
        while done and done[0][0] <= now_s:
            events.append(heapq.heappop(done)[2])
        return events

    def welcome(self, session: int, naming_secret: bytes = b"") -> None:
        """Reports an empty host pool, if the runner has one."""
        if naming_secret:
            self._joining.append(GotSnapshot(session, plan_pb2.Snapshot()))

    def resume(self, session: int, naming_secret: bytes = b"") -> None:
        """Raises RuntimeError: no simulated runner has sequences from before a restart."""
        raise RuntimeError(f"the engine resumes simulated runner {session}, which is new")

    def reject(self, session: int, reason: str) -> None:
        """Raises ValueError: the engine does not accept the runner's sizes."""
        raise ValueError(f"the engine refuses the simulated runner: {reason}")

    def drop(self, session: int, reason: str) -> None:
        """Raises RuntimeError: the simulator has a bug."""
        raise RuntimeError(f"the engine dropped simulated runner {session}: {reason}")

    def dismiss(self, session: int) -> None:
        """Raises RuntimeError: no simulated runner leaves."""
        raise RuntimeError(f"the engine dismisses simulated runner {session}, which has not left")

    def send_masks(self, session: int, number: int, masks: plan_pb2.Masks) -> None:
        """Raises RuntimeError: no trace has constrained requests."""
        raise RuntimeError(f"the engine sends masks for plan {number} of simulated runner {session}")

    def send_move(self, session: int, message: plan_pb2.ToRunner) -> None:
        """Raises RuntimeError: no simulated runner takes part in moves."""
        raise RuntimeError(f"the engine moves blocks of simulated runner {session}")

    def send_plan(self, session: int, number: int, plan: plan_pb2.Plan) -> None:
        """Queues the plan, which `dispatch` sends."""
        self._sent.append((session, number, plan))

    # ------------------------------------------------------------------ as the simulation sees it

    @property
    def next_s(self) -> float:
        """Time at which the next result reaches the engine; infinite if no plan is in flight."""
        next_s = self._done[0][0] if self._done else math.inf
        if not self._held:
            return next_s
        return min(next_s, *(due_at + self._link_s for due_at, _ in self._held.values()))

    @property
    def num_sent(self) -> int:
        """Number of plans queued in this turn so far."""
        return len(self._sent)

    def dispatch(self) -> None:
        """Sends the plans of this turn at the current time."""
        if not self._sent:
            return
        link_s = self._link_s
        arrival_s = self._clock.now_s + link_s
        for session, number, plan in self._sent:
            if self._copies and not self._copy(session, number, plan, arrival_s):
                continue
            if self._drafts is None:
                work, result = StepWork.of_plan(plan), self._result(session, plan)
            else:
                work, result = self._verify(self._drafts, session, plan)
            seconds = self._seconds(work)
            early_s = self._free_at[session] - arrival_s
            end_at = max(self._free_at[session], arrival_s) + seconds
            self._free_at[session] = end_at
            self.tallies.add(work, seconds)
            if self._copies:
                result = self._copies[session].named(result, end_at)
            event = GotResult(session, number, result)
            if self._reports_early:
                event = _with_timings(event, early_s, seconds)
            self._answer(event, end_at)
        self._sent.clear()

    def _answer(self, event: GotResult, sent_at: float) -> None:
        self._serial += 1
        heapq.heappush(self._done, (sent_at + self._link_s, self._serial, event))

    def _copy(self, session: int, number: int, plan: plan_pb2.Plan, arrival_s: float) -> bool:
        """Starts a plan's copies; returns whether it has rows. The result of one without is held, until a copy is done
        or the next plan arrives."""
        self._release(session, arrival_s)
        begin_at = max(self._free_at[session], arrival_s)
        copies = self._copies[session]
        copies.start(plan, begin_at)
        if plan.extent_flags:
            return True
        self._free_at[session] = begin_at
        due_at = max(begin_at, copies.next_done_at)
        if due_at < math.inf:
            self._held[session] = due_at, number
        else:
            self._answer(GotResult(session, number, self._result_of(b"")), begin_at)
        return False

    def _release_due(self, now_s: float) -> None:
        """Sends the held results that have reached the engine by now."""
        for session in [session for session, (due_at, _) in self._held.items() if due_at + self._link_s <= now_s]:
            self._release(session, now_s)

    def _release(self, session: int, now_s: float) -> None:
        """Sends the held result of a runner, if there is one, at the time at which it is due or now."""
        held = self._held.pop(session, None)
        if held is not None:
            sent_at = max(self._free_at[session], min(held[0], now_s))
            result = self._copies[session].named(self._result_of(b""), sent_at)
            self._answer(GotResult(session, held[1], result), sent_at)

    def fast_forward(self, chance: FastForward, until_at: float, scheduler_s: float) -> list[float]:
        """Computes the plans of the turns that begin before `until_at`.

        Each turn begins when the oldest result arrives, not before now, and takes `scheduler_s`. Returns the times at
        which the turns begin.
        """
        now_s, free_at, link_s = self._clock.now_s, self._free_at[chance.session], self._link_s
        work = StepWork(chance.num_rows, chance.num_rows, chance.context_tokens + chance.num_rows, 0.0)
        arrivals_s = deque(time_s for time_s, _, _ in sorted(self._done))
        times_s: list[float] = []
        while len(times_s) < chance.turns:
            now_s = max(now_s, arrivals_s[0])
            if now_s >= until_at or (len(arrivals_s) > 1 and arrivals_s[1] <= now_s):  # a turn of another kind
                break
            times_s.append(now_s)
            now_s += scheduler_s
            seconds = self._seconds(work)
            free_at = max(free_at, now_s + link_s) + seconds
            self.tallies.add(work, seconds)
            arrivals_s.popleft()
            arrivals_s.append(free_at + link_s)
            work.context_tokens += chance.num_rows
        if times_s:
            self._free_at[chance.session] = free_at
            self._serial += len(times_s)
            later, result = 1 - len(arrivals_s), self._result_of(chance.flags)
            last = chance.last_number + len(times_s)
            self._done = [
                (time_s, self._serial + later + index, GotResult(chance.session, last + later + index, result))
                for index, time_s in enumerate(arrivals_s)
            ]
        return times_s

    def tokens(self, num_rows: int, results: int) -> npt.NDArray[np.int32]:
        """Returns the tokens sampled in steps of `num_rows` rows in which no sequence stops: (results, num_rows)."""
        return np.broadcast_to(np.frombuffer(_column(_TOKENS, 4 * num_rows), "<i4"), (results, num_rows))

    def _seconds(self, work: StepWork) -> float:
        seconds = self._step_seconds(work)
        return seconds if self._noise is None else seconds * self._noise()

    def _verify(self, drafts: SimulatedDrafts, session: int, plan: plan_pb2.Plan) -> tuple[StepWork, plan_pb2.Result]:
        """Returns the work of the plan and its result, with drafts."""
        run = drafts.run(session, plan)
        work = StepWork.of_run(run.starts, run.counts, run.drafted)
        if not plan.extent_drafts:
            result = self._result_of(plan.extent_flags)
        else:
            result = plan_pb2.Result(
                statuses=_column(_STATUSES, len(run.slots)),
                token_counts=run.token_counts.astype(np.uint8).tobytes(),
                tokens=_column(_TOKENS, 4 * int(run.token_counts.sum())),
                drafted=plan.extent_drafts,
            )
        if self._stops is not None:
            tokens = self._stops.tokens_of_run(session, plan, run, result.tokens)
            result = plan_pb2.Result(
                statuses=result.statuses, token_counts=result.token_counts, tokens=tokens, drafted=result.drafted
            )
        return work, result

    def _result(self, session: int, plan: plan_pb2.Plan) -> plan_pb2.Result:
        result = self._result_of(plan.extent_flags)
        if self._stops is None:
            return result
        stopped = plan_pb2.Result(statuses=result.statuses, token_counts=plan.extent_flags)
        stopped.tokens = self._stops.tokens(session, plan, result.tokens)
        return stopped

    def _result_of(self, flags: bytes) -> plan_pb2.Result:
        """Returns the result for these extent flags. A flag is 1 if the row samples, so they are the token counts."""
        result = self._results.get(flags)
        if result is None:
            tokens = _column(_TOKENS, 4 * flags.count(1))
            result = plan_pb2.Result(statuses=_column(_STATUSES, len(flags)), token_counts=flags, tokens=tokens)
            if len(self._results) < MOST_RESULTS:
                self._results[flags] = result
        return result


class StopPositions:
    """Position at which each slot's sequence samples its stop token."""

    def __init__(self, count: int, slots: int, output_tokens: dict[str, int]) -> None:
        self._output_tokens = output_tokens
        self._positions = np.full((count + 1, slots), -1, np.int64)

    def tokens(self, session: int, plan: plan_pb2.Plan, tokens: bytes) -> bytes:
        """Returns `tokens` of the plan's sampling rows, int32, with stop tokens inserted."""
        positions = self._admit(session, plan)
        sample = np.frombuffer(plan.extent_flags, np.uint8) == 1
        slots = np.frombuffer(plan.extent_slots, "<i4")[sample]
        starts, counts = np.frombuffer(plan.extent_starts, "<i4"), np.frombuffer(plan.extent_counts, "<i4")
        stopped = positions[slots] == (starts + counts)[sample]
        return np.where(stopped, np.int32(STOP_TOKEN), np.frombuffer(tokens, "<i4")).astype("<i4").tobytes()

    def tokens_of_run(self, session: int, plan: plan_pb2.Plan, run: Run, tokens: bytes) -> bytes:
        """Returns `tokens` of all rows, int32, with stop tokens inserted; a row may have several tokens."""
        place = self._admit(session, plan)[run.slots] - run.first
        stopped = ((place >= 0) & (place < run.token_counts)).nonzero()[0]
        column = np.frombuffer(tokens, "<i4").copy()
        column[(run.token_counts.cumsum() - run.token_counts + place)[stopped]] = STOP_TOKEN
        return column.tobytes()

    def _admit(self, session: int, plan: plan_pb2.Plan) -> npt.NDArray[np.int64]:
        """Takes note of the plan's admissions; returns the position of each slot's stop token, -1 for none."""
        positions = self._positions[session]
        for admission in plan.admissions:
            request_id = engine_pb2.SequenceContext.FromString(admission.context).submit.request_id
            output = self._output_tokens.get(request_id)
            positions[admission.slot] = -1 if output is None else admission.prompt_len + output - 1
        return positions


def _with_timings(event: GotResult, early_s: float, seconds: float) -> GotResult:
    """Returns the result with the time by which its plan was early, and the time of its step."""
    result = plan_pb2.Result()
    result.CopyFrom(event.result)
    result.timings.early_ns = int(early_s * 1e9)
    result.timings.forward_ns = int(seconds * 1e9)
    return GotResult(event.session, event.number, result)


def _column(data: bytes, size: int) -> bytes:
    """Returns the first `size` bytes of `data` repeated."""
    return data[:size] if size <= len(data) else (data * -(-size // len(data)))[:size]


def _hello(session: int, shape: RunnerShape, cost: CostModel, max_drafts: int) -> plan_pb2.Hello:
    return plan_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        runner_id=f"simulated-{session}",
        device="cuda:simulated" if cost.tile_tokens > 1 else "simulated",  # only GPUs have tiles
        num_slots=shape.slots,
        block_size=shape.block_size,
        num_blocks=max(1, shape.kv_tokens // shape.block_size),
        max_step_tokens=shape.step_tokens,
        tile_tokens=cost.tile_tokens,
        max_depth=3,
        model=plan_pb2.Model(name="simulated", vocab_size=shape.vocab_size, context_length=shape.kv_tokens),
        step_costs=(*_step_costs(shape, cost), *_verify_costs(shape, cost, max_drafts)),
        max_drafts=max_drafts,
        drafter=DRAFTER if max_drafts else "",
        num_host_blocks=shape.host_kv_tokens // shape.block_size,
        load_block_ns=shape.load_block_ns if shape.host_kv_tokens else 0,
        offload_block_ns=shape.offload_block_ns if shape.host_kv_tokens else 0,
    )


def _step_costs(shape: RunnerShape, cost: CostModel) -> Iterator[plan_pb2.StepCost]:
    """Yields what a runner would measure at start: decoding rows, and prompts with and without them."""
    seconds, slots = cost.timer(), shape.slots
    for rows, each in ((1, 256), (min(8, slots), 256), (min(64, slots), 256), (min(64, slots), 1024), (slots, 256)):
        work = StepWork(rows, rows, rows * (each + 1), 0.0)
        yield plan_pb2.StepCost(decode_rows=rows, context=rows * each, step_ns=round(1e9 * seconds(work)))
    for rows, count, start in ((0, 64, 0), (0, 256, 0), (0, 1024, 0), (32, 480, 0), (64, 960, 0), (0, 512, 4096)):
        rows = min(rows, slots - 1)
        if rows + count <= shape.step_tokens:
            work = StepWork(rows + count, rows + 1, rows * 1025 + start + count, count * (start + count / 2))
            ns = round(1e9 * seconds(work))
            yield plan_pb2.StepCost(
                decode_rows=rows, context=rows * 1024, prompt_positions=count, prompt_start=start, step_ns=ns
            )


def _verify_costs(shape: RunnerShape, cost: CostModel, max_drafts: int) -> Iterator[plan_pb2.StepCost]:
    """Yields what a runner with a drafter would measure at start, besides."""
    seconds = cost.timer()
    for rows in sorted({1, min(8, shape.slots), min(64, shape.slots), shape.slots}):
        for drafts in sorted({draft for draft in (1, 3, 5, 7) if draft < max_drafts} | {max_drafts} - {0}):
            if (positions := rows * (1 + drafts)) <= shape.step_tokens:
                ns = round(1e9 * seconds(StepWork(positions, rows, rows * 256 + positions, 0.0)))
                yield plan_pb2.StepCost(decode_rows=rows, context=rows * 256, drafts=drafts, step_ns=ns)
