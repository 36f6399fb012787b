"""Runners that answer each plan with the tokens it asks for, after the time that a cost model gives.

Stands in place of `RunnerLink`: the same methods, no sockets. A runner executes its plans in order, one at a time;
plans that come while one executes wait, as they would behind a real runner.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from roster_common.link_protocol import PROTOCOL_VERSION
from roster_protos import engine_pb2, plan_pb2
from scheduler_svc.link.runner_events import GotResult, Joined, RunnerEvent
from scheduler_svc.simulator.cost_model import CostModel, RunnerShape, StepWork
from scheduler_svc.simulator.fast_forward import FastForward
from scheduler_svc.simulator.step_tallies import StepTallies
from scheduler_svc.simulator.virtual_clock import VirtualClock

MOST_RESULTS = 4096
"""Results that are kept: those of steps in which the same rows sample are alike, and nobody changes them."""
STOP_TOKEN = 1
"""Ends a sequence that was asked for more tokens than its trace's output."""
_TOKEN = 2
_TOKENS = np.full(8192, _TOKEN, "<i4").tobytes()
_STATUSES = bytes(8192)


class SimulatedRunners:
    """Sessions 1 to `count`, all alike.

    `stops` holds the output lengths of requests that end before their `max_tokens`, by request id: the runner samples
    `STOP_TOKEN` there. `noise` draws the factor by which a step's time differs from the model.
    """

    def __init__(
        self,
        count: int,
        cost: CostModel,
        shape: RunnerShape,
        clock: VirtualClock,
        stops: dict[str, int],
        noise: Callable[[], float] | None,
    ) -> None:
        self._step_seconds = cost.timer()
        self._link_s = cost.link_s
        self._clock = clock
        self._noise = noise
        self._stops = StopPositions(count, shape.slots, stops) if stops else None
        self._sent: list[tuple[int, int, plan_pb2.Plan]] = []
        self._done: list[tuple[float, int, GotResult]] = []  # a heap by the time at which the engine gets the result
        self._free_at = [0.0] * (count + 1)
        self._serial = 0
        self._results: dict[bytes, plan_pb2.Result] = {}
        hellos = {session: _hello(session, shape, cost.tile_tokens) for session in range(1, count + 1)}
        self._joining: list[RunnerEvent] = [Joined(session, hello) for session, hello in hellos.items()]
        self.tallies = StepTallies()

    # ------------------------------------------------------------------ as the engine sees it

    def receive(self) -> list[RunnerEvent]:
        """Results that have arrived by now, in order of arrival."""
        events, self._joining = self._joining, []
        done, now_s = self._done, self._clock.now_s
        while done and done[0][0] <= now_s:
            events.append(heapq.heappop(done)[2])
        return events

    def welcome(self, session: int) -> None:
        """Nothing to do: the runner is there."""

    def resume(self, session: int) -> None:
        """No simulated runner holds anything from before. Raises RuntimeError."""
        raise RuntimeError(f"the engine resumes simulated runner {session}, which is new")

    def reject(self, session: int, reason: str) -> None:
        """A shape that the engine does not take. Raises ValueError."""
        raise ValueError(f"the engine refuses the simulated runner: {reason}")

    def drop(self, session: int, reason: str) -> None:
        """A bug of the simulator. Raises RuntimeError."""
        raise RuntimeError(f"the engine dropped simulated runner {session}: {reason}")

    def dismiss(self, session: int) -> None:
        """No simulated runner leaves. Raises RuntimeError."""
        raise RuntimeError(f"the engine forgets simulated runner {session}, which has not left")

    def send_masks(self, session: int, number: int, masks: plan_pb2.Masks) -> None:
        """No trace has constrained requests. Raises RuntimeError."""
        raise RuntimeError(f"plan {number} of simulated runner {session} gets masks")

    def send_plan(self, session: int, number: int, plan: plan_pb2.Plan) -> None:
        """Takes the plan; it leaves with `dispatch`."""
        self._sent.append((session, number, plan))

    # ------------------------------------------------------------------ as the simulation sees it

    @property
    def next_s(self) -> float:
        """When the next result reaches the engine; infinity when no plan is in flight."""
        return self._done[0][0] if self._done else math.inf

    @property
    def num_sent(self) -> int:
        """Plans of this turn so far."""
        return len(self._sent)

    def dispatch(self) -> None:
        """The plans of this turn leave the scheduler now."""
        if not self._sent:
            return
        link_s = self._link_s
        arrival_s = self._clock.now_s + link_s
        for session, number, plan in self._sent:
            work = StepWork.of_plan(plan)
            seconds = self._seconds(work)
            end_at = max(self._free_at[session], arrival_s) + seconds
            self._free_at[session] = end_at
            self.tallies.add(work, seconds)
            self._serial += 1
            event = GotResult(session, number, self._result(session, plan))
            heapq.heappush(self._done, (end_at + link_s, self._serial, event))
        self._sent.clear()

    def fast_forward(self, chance: FastForward, until_at: float, scheduler_s: float) -> list[float]:
        """Computes as many plans of the turns to skip as the engine makes before `until_at`, each in a turn of
        `scheduler_s` that
        begins with the oldest result. Returns when these turns begin, the first of them at the earliest now."""
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
        """What it samples in steps of so many rows, of which none stops: a row each, (results, num_rows)."""
        return np.broadcast_to(np.frombuffer(_column(_TOKENS, 4 * num_rows), "<i4"), (results, num_rows))

    def _seconds(self, work: StepWork) -> float:
        seconds = self._step_seconds(work)
        return seconds if self._noise is None else seconds * self._noise()

    def _result(self, session: int, plan: plan_pb2.Plan) -> plan_pb2.Result:
        result = self._result_of(plan.extent_flags)
        if self._stops is None:
            return result
        stopped = plan_pb2.Result(statuses=result.statuses, token_counts=plan.extent_flags)
        stopped.tokens = self._stops.tokens(session, plan, result.tokens)
        return stopped

    def _result_of(self, flags: bytes) -> plan_pb2.Result:
        """`flags` are 1 where a token is sampled: the very column of token counts."""
        result = self._results.get(flags)
        if result is None:
            tokens = _column(_TOKENS, 4 * flags.count(1))
            result = plan_pb2.Result(statuses=_column(_STATUSES, len(flags)), token_counts=flags, tokens=tokens)
            if len(self._results) < MOST_RESULTS:
                self._results[flags] = result
        return result


class StopPositions:
    """Where each slot's sequence samples its stop token."""

    def __init__(self, count: int, slots: int, output_tokens: dict[str, int]) -> None:
        self._output_tokens = output_tokens
        self._positions = np.full((count + 1, slots), -1, np.int64)

    def tokens(self, session: int, plan: plan_pb2.Plan, tokens: bytes) -> bytes:
        """`tokens` of the plan's sampling rows, int32, with the stop tokens among them."""
        positions = self._positions[session]
        for admission in plan.admissions:
            request_id = engine_pb2.SequenceContext.FromString(admission.context).submit.request_id
            output = self._output_tokens.get(request_id)
            positions[admission.slot] = -1 if output is None else admission.prompt_len + output - 1
        sample = np.frombuffer(plan.extent_flags, np.uint8) == 1
        slots = np.frombuffer(plan.extent_slots, "<i4")[sample]
        starts, counts = np.frombuffer(plan.extent_starts, "<i4"), np.frombuffer(plan.extent_counts, "<i4")
        stopped = positions[slots] == (starts + counts)[sample]
        return np.where(stopped, np.int32(STOP_TOKEN), np.frombuffer(tokens, "<i4")).astype("<i4").tobytes()


def _column(data: bytes, size: int) -> bytes:
    """The first `size` bytes of `data`, which repeats itself."""
    return data[:size] if size <= len(data) else (data * -(-size // len(data)))[:size]


def _hello(session: int, shape: RunnerShape, tile_tokens: int) -> plan_pb2.Hello:
    return plan_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        runner_id=f"simulated-{session}",
        device="simulated",
        num_slots=shape.slots,
        block_size=shape.block_size,
        num_blocks=max(1, shape.kv_tokens // shape.block_size),
        max_step_tokens=shape.step_tokens,
        tile_tokens=tile_tokens,
        max_depth=3,
        model=plan_pb2.Model(name="simulated", vocab_size=shape.vocab_size, context_length=shape.kv_tokens),
    )
