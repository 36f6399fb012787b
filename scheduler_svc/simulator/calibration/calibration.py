"""Times the steps of a live runner, driven through the real engine, and fits a cost model to them.

A step's time is the time between its result and the previous one, if its plan was already waiting at the runner. This
is the step's time in service, with all overhead around the computation. A plan sent to an idle runner also measures the
link: its round trip minus its step is the time of two messages. The step's time is either predicted from the other
steps or taken from the runner's timings, whichever gives the shorter link time. The rest of the round trip is then used
as the step's time.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import zmq

from roster_protos import engine_pb2, plan_pb2
from scheduler_svc.engine.engine import Engine
from scheduler_svc.link.links import Runners
from scheduler_svc.link.runner_link import GotResult, Joined, RunnerEvent, RunnerLink
from scheduler_svc.policy import PolicyGuard, load_policy
from scheduler_svc.scheduler.policy_views import tile_tokens
from scheduler_svc.settings.scheduler_settings import SchedulerSettings
from scheduler_svc.simulator.calibration.calibration_work import Round, fixed_rounds, mixed_round
from scheduler_svc.simulator.calibration.cost_fit import FitError, TimedStep, fit_cost_model
from scheduler_svc.simulator.cost_model import CostModel, RunnerShape, StepWork
from scheduler_svc.simulator.prompts import FIRST_ORDINARY_TOKEN

WARM_UP: Round = [(64, 8)] * 2
"""Requests of the first steps, which are not counted because the first steps of a process are slower."""
_WORKER = b"calibration"


class CalibrationError(RuntimeError):
    """No runner connected, or it was lost, or it refused a request."""


@dataclass(slots=True, frozen=True)
class Calibration:
    """A fitted model, its error, and the share of the steps' time that the runner's own timings account for."""

    model: CostModel
    error: FitError
    timings_share: float
    steps: list[TimedStep]


@dataclass(slots=True, frozen=True)
class _Sent:
    """A plan in flight. `follows`: another plan was in flight when it was sent."""

    work: StepWork
    sent_at: float
    follows: bool


@dataclass(slots=True, frozen=True)
class RoundTrip:
    """A plan sent to an idle runner: seconds from sending to result, and the step's time as measured by the runner."""

    work: StepWork
    seconds: float
    runner_s: float


class RecordingLink:
    """A link to one runner that records the work of each plan and the time of its result."""

    def __init__(self, link: Runners) -> None:
        self._link = link
        self._sent: deque[_Sent] = deque()
        self._last_result_at = 0.0
        self.hello: plan_pb2.Hello | None = None
        self.steps: list[TimedStep] = []
        self.round_trips: list[RoundTrip] = []
        self.runner_s = 0.0
        """Seconds of `steps` as measured by the runner: prepare, forward and sample."""

    def receive(self) -> list[RunnerEvent]:
        """Returns the link's events and records results. Raises CalibrationError if the runner is lost."""
        events = self._link.receive()
        now_s = time.monotonic()
        # If several results arrive together, their individual times are unknown.
        alone = sum(isinstance(event, GotResult) for event in events) == 1
        for event in events:
            if isinstance(event, GotResult):
                self._note(event.result, now_s, alone)
            elif isinstance(event, Joined):
                self.hello = event.hello
            else:
                raise CalibrationError(f"the runner is lost: {event}")
        return events

    def _note(self, result: plan_pb2.Result, now_s: float, alone: bool) -> None:
        sent, timings = self._sent.popleft(), result.timings
        runner_s = (timings.prepare_ns + timings.forward_ns + timings.sample_ns) * 1e-9
        if alone and sent.follows:
            self.steps.append(TimedStep(sent.work, now_s - self._last_result_at))
            self.runner_s += runner_s
        elif alone:
            self.round_trips.append(RoundTrip(sent.work, now_s - sent.sent_at, runner_s))
        self._last_result_at = now_s

    def send_plan(self, session: int, number: int, plan: plan_pb2.Plan) -> None:
        """Sends and records the plan."""
        self._link.send_plan(session, number, plan)
        self._sent.append(_Sent(StepWork.of_plan(plan), time.monotonic(), bool(self._sent)))

    def send_masks(self, session: int, number: int, masks: plan_pb2.Masks) -> None:
        """Passes the masks to the link."""
        self._link.send_masks(session, number, masks)

    def send_move(self, session: int, message: plan_pb2.ToRunner) -> None:
        """Passes the message to the link."""
        self._link.send_move(session, message)

    def welcome(self, session: int, naming_secret: bytes = b"") -> None:
        """Passes the call to the link."""
        self._link.welcome(session, naming_secret)

    def resume(self, session: int, naming_secret: bytes = b"") -> None:
        """Passes the call to the link."""
        self._link.resume(session, naming_secret)

    def dismiss(self, session: int) -> None:
        """Passes the call to the link."""
        self._link.dismiss(session)

    def reject(self, session: int, reason: str) -> None:
        """Raises CalibrationError."""
        raise CalibrationError(f"the engine rejected the runner: {reason}")

    def drop(self, session: int, reason: str) -> None:
        """Passes the call to the link."""
        self._link.drop(session, reason)

    def forget(self) -> None:
        """Discards everything recorded so far."""
        self.steps.clear()
        self.round_trips.clear()
        self.runner_s = 0.0


class CalibrationFront:
    """Submits rounds of requests and counts their ends."""

    def __init__(self) -> None:
        self._commands = [engine_pb2.Command(hello=engine_pb2.WorkerHello(worker=0))]
        self._handles = 0
        self.unfinished = 0

    def submit(self, requests: Round, vocab_size: int, rng: random.Random) -> None:
        """Submits requests together, with random ordinary tokens."""
        for prompt_tokens, output_tokens in requests:
            self._handles += 1
            self.unfinished += 1
            prompt = np.array(rng.choices(range(FIRST_ORDINARY_TOKEN, vocab_size), k=prompt_tokens), "<i4")
            submit = engine_pb2.Submit(
                handle=self._handles,
                request_id=str(self._handles),
                prompt=prompt.tobytes(),
                n=1,
                max_tokens=output_tokens,
                sampling=plan_pb2.Sampling(top_p=1, repetition_penalty=1),
            )
            self._commands.append(engine_pb2.Command(submit=submit))

    def receive(self) -> list[tuple[bytes, engine_pb2.Command]]:
        """Returns the commands submitted since the last call."""
        commands, self._commands = self._commands, []
        return [(_WORKER, command) for command in commands]

    def send(self, worker: bytes, message: engine_pb2.FromEngine) -> bool:
        """Counts the ends that the engine publishes. Raises CalibrationError for a refusal."""
        if message.HasField("refused"):
            raise CalibrationError(f"a request was refused: {message.refused.message}")
        self.unfinished -= len(message.step.ends)
        return True


class Calibrator:
    """An engine that listens at `endpoint` for one runner and times it."""

    def __init__(self, endpoint: str, seed: int = 0) -> None:
        """Raises zmq.ZMQError if the endpoint can't be bound, UnusableSettings for invalid settings in the
        environment."""
        settings = SchedulerSettings.read(policy="fcfs", prefix_sharing=False, retention_requests=0)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._link = RunnerLink(
            self._context,
            endpoint,
            silence_s=settings.runner_timeout_s,
            plan_timeout_s=settings.plan_timeout_s,
            clock=time.monotonic,
        )
        self.endpoint = self._link.endpoint
        self._recorder, self._front = RecordingLink(self._link), CalibrationFront()
        policy = PolicyGuard(load_policy("fcfs", {}))
        self._engine = Engine(settings, policy, self._front, self._recorder)
        self._rng = random.Random(seed)

    def close(self) -> None:
        """Closes the link."""
        self._link.close()
        self._context.term()

    def wait_for_runner(self, timeout_s: float, alive: Callable[[], None] = lambda: None) -> plan_pb2.Hello:
        """Waits until the runner has connected. `alive` is called meanwhile, and may raise to give up. Raises
        CalibrationError after the timeout."""
        until_at = time.monotonic() + timeout_s
        while self._recorder.hello is None:
            alive()
            if time.monotonic() > until_at:
                raise CalibrationError(f"no runner connected to {self.endpoint} within {timeout_s:g} s")
            self._turn()
        return self._recorder.hello

    def run(self, name: str, seconds: float, on_round: Callable[[int], None] = lambda steps: None) -> Calibration:
        """Times rounds for about `seconds`, at least all fixed ones, and fits a model. Call `wait_for_runner` first."""
        hello = self.wait_for_runner(0)
        shape = RunnerShape(
            slots=hello.num_slots,
            kv_tokens=hello.num_blocks * hello.block_size,
            block_size=hello.block_size,
            step_tokens=hello.max_step_tokens,
            vocab_size=hello.model.vocab_size,
        )
        self._play(WARM_UP, shape.vocab_size)
        self._recorder.forget()
        for requests in self._rounds(shape, hello.model.context_length, seconds):
            self._play(requests, shape.vocab_size)
            on_round(len(self._recorder.steps))
        source = f"roster calibrate: {hello.model.name} on {hello.device}, {len(self._recorder.steps)} steps"
        return self._fit(name, source, shape, tile_tokens(hello))

    def _rounds(self, shape: RunnerShape, context_length: int, seconds: float) -> Iterator[Round]:
        until_at = time.monotonic() + seconds
        yield from fixed_rounds(shape, context_length)
        while time.monotonic() < until_at:
            yield mixed_round(shape, context_length, self._rng)

    def _play(self, requests: Round, vocab_size: int) -> None:
        self._front.submit(requests, vocab_size, self._rng)
        while self._front.unfinished:
            self._turn()

    def _turn(self) -> None:
        self._engine.step()
        self._link.sockets[0].poll(100 if not self._front.unfinished else 500)

    def _fit(self, name: str, source: str, shape: RunnerShape, tile_tokens: int) -> Calibration:
        recorder = self._recorder
        fit = partial(fit_cost_model, name, source, runner=shape, tile_tokens=tile_tokens)
        share = recorder.runner_s / sum(step.seconds for step in recorder.steps)
        link_s = _link_seconds(fit(recorder.steps)[0], recorder.round_trips)
        alone = [TimedStep(trip.work, trip.seconds - 2 * link_s) for trip in recorder.round_trips]
        steps = recorder.steps + [step for step in alone if step.seconds > 0]
        model, error = fit(steps, link_s=link_s)
        return Calibration(model, error, share, steps)


def _link_seconds(model: CostModel, trips: list[RoundTrip]) -> float:
    """Returns the seconds of one message between scheduler and runner; 0 if no plan was sent to an idle runner."""
    if not trips:
        return 0.0
    foretold = float(np.median([trip.seconds - model.step_seconds(trip.work) for trip in trips]))
    timed = float(np.median([trip.seconds - trip.runner_s for trip in trips]))
    return max(0.0, min(foretold, timed)) / 2
