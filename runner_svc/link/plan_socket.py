"""The runner's end of the link to the scheduler: sessions, heartbeats, resending.

| situation | response |
| --- | --- |
| no session, a fault, a new connection, or silence for `silence_s` | Hello, every second, until the scheduler answers |
| the same, while a plan computes | none yet: Hello means that the runner can execute plans |
| the same, if the plan takes longer than `plan_timeout_s`, without pauses | HungBackend: the process must restart |
| no answer to Hello for 5 s | a warning, which repeats every 30 s; see answer_watch |
| Welcome of a new session | none: the old session's plans, queued ones included, are dropped |
| Welcome of a session that was left, or of an earlier term | Event: fenced, with the current term |
| any other message of another session | the same: its scheduler may have been paused while a successor took over |
| a plan that was executed before | its result again |
| a plan after a missing one | Event: resend from the missing one |
| an invalid plan, or an error in the backend | Event: fault; no more plans until a new session |
| another rank of the runner's group is lost | the same, then RankLost: no Hello until the group has formed again |
| an error that the backend can't survive | the same, then BrokenBackend: the process must restart |
| Masks | none: the plan's result follows; masks of a plan that is done are duplicates, sent after a resend |
| Grant, Pull | Moved, once the blocks may be read or are there; Revoke is not answered |
| `stop`, with blocks that can move | Event: draining; plans go on until Dismissal, or for `move_out_s` |
| Ping | Pong, also while a plan computes; and resend, if a plan that it names never arrived. Hello then has its term |
| end of silence within the same session | recent results again, and resend from the next plan: either may be lost |

Sequences and KV survive the scheduler: only a Welcome without `resume` releases them.
"""

from __future__ import annotations

import time
from collections import deque

import structlog
import zmq
from google.protobuf.message import DecodeError

from roster_common.endpoints import is_local
from roster_common.link_protocol import EARLY, MOVES, TERMS, shared
from roster_protos import plan_pb2
from runner_svc.execution.busy_watch import TICK_S, BusyWatch
from runner_svc.execution.compute_thread import ComputeThread
from runner_svc.execution.jobs import BeginSession, ExecutePlan, Executor, Stop, TakeMasks, TakeSnapshot
from runner_svc.execution.overlapping_executor import OverlappingExecutor
from runner_svc.execution.runner import Runner
from runner_svc.interface.ranks import RankLost
from runner_svc.link.answer_watch import AnswerWatch
from runner_svc.link.curve import CurveClient
from runner_svc.link.greeting import Greeting
from runner_svc.link.mover_link import MoverLink
from runner_svc.link.scheduler_connection import SchedulerConnection
from runner_svc.transfer.mover import Mover

_LONGEST_POLL_S = TICK_S  # bounds the delay of `stop` and the interval at which plans are watched
_KEPT_RESULTS = 8  # more than the greatest number of plans in flight
_WATCHING_TURN_S = 0.005  # between full turns of the loop while plans compute
_SLEEP_S = 0.001  # between looks at a device that computes, if the thread may not poll
_LINGER_MS = 1000

log = structlog.get_logger()


class Rejected(Exception):
    """The scheduler rejected this runner; the message says why."""


class BrokenBackend(Exception):
    """This process can no longer use the device."""


class HungBackend(BrokenBackend):
    """A plan exceeded `plan_timeout_s`."""


class PlanSocket:
    """The socket on which plans arrive. Runs in the thread that calls `run`; only `stop` is thread-safe."""

    def __init__(
        self,
        runner: Runner,
        endpoint: str,
        silence_s: float = 3.0,
        curve: CurveClient | None = None,
        plan_timeout_s: float = 120.0,
    ) -> None:
        """`silence_s`: seconds without a message after which Hello is sent again. `curve`: None does not encrypt.

        `plan_timeout_s`: seconds that a plan may take when no scheduler waits for it any more, pauses not counted.
        """
        self.answers = AnswerWatch(endpoint)
        self._silence_s = silence_s
        self._watch = BusyWatch(plan_timeout_s)
        self._runner = runner
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        wake_endpoint = f"inproc://wake-{id(self)}"
        self._wake = self._context.socket(zmq.PULL)
        self._wake.bind(wake_endpoint)
        self._compute: Executor = (
            OverlappingExecutor(runner) if runner.overlaps else ComputeThread(runner, self._context, wake_endpoint)
        )
        self._connection = SchedulerConnection(self._context, endpoint, curve, self._wake)
        is_private = curve is not None or is_local(endpoint)
        self._greeting = Greeting(runner, self._connection, self.answers, is_private=is_private)
        self._mover: MoverLink | None = None
        self._wake_endpoint = wake_endpoint
        self._move_out_s = 0.0
        self._dismissed = self._hurries = False
        self.sleeps = False
        """Sleep while an overlapping backend computes, instead of polling it."""
        self._stopping = False
        self._session = 0
        self._features: frozenset[str] = frozenset()  # common to both sides of the session
        self._left: dict[int, frozenset[str]] = {}  # features of sessions that are over
        self._next_plan = 1
        self._last_done = 0
        self._faulted = False
        self._results: deque[tuple[int, bytes]] = deque(maxlen=_KEPT_RESULTS)
        self._heard_at = 0.0
        self._next_turn_at = 0.0

    def take_part_in_moves(self, mover: Mover, move_out_s: float) -> None:
        """Passes grants and pulls to `mover`. Called before `run`.

        `move_out_s`: seconds after `stop` for which the runner goes on, so that its sequences can move elsewhere.
        """
        self._mover, self._move_out_s = MoverLink(mover, self._context, self._wake_endpoint), move_out_s
        self._greeting.add_mover(mover)

    def stop(self) -> None:
        """Makes `run` finish its queued plans and return; a second call ends the wait for sequences to move."""
        self._hurries = self._stopping
        self._stopping = True

    def run(self) -> None:
        """Serves until `stop`.

        Raises Rejected if the scheduler rejects the runner, BrokenBackend if the backend can no longer compute. After
        HungBackend the process must exit without waiting for its threads: the computing thread is stuck. Raises
        RankLost, after a fault was reported, if the runner's group is given up.
        """
        self._compute.start()
        try:
            while not self._stopping:
                self._turn()
                if self._faulted and self._compute.broken:
                    raise BrokenBackend
                if self._runner.lost:
                    self._leave_group()
            self._post(plan_pb2.ToScheduler(session=self._session, event=plan_pb2.Event(draining=True)))
            self._await_dismissal()
            self._compute.submit(Stop())
            while self._compute.is_alive() or self._compute.finished:
                self._turn()
                if self._watch.over:
                    raise HungBackend
            self._connection.flush()
        finally:
            if not self._watch.over:
                self._compute.submit(Stop())
                self._connection.close(linger_ms=_LINGER_MS)
                if self._mover is not None:
                    self._mover.close()
                self._wake.close(linger=0)
                self._context.term()

    def _leave_group(self) -> None:
        """Ends the computing thread, whose exchanges fail by now, and reports a fault. Raises RankLost."""
        self._compute.submit(Stop())
        while self._compute.is_alive() or self._compute.finished:
            self._turn()
        if not self._faulted:
            fault = plan_pb2.Event(fault=self._runner.lost)
            self._post(plan_pb2.ToScheduler(session=self._session, event=fault))
        self._connection.flush()
        raise RankLost(self._runner.lost)

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping

    @property
    def heard(self) -> plan_pb2.Hello:
        """The part of Hello that schedulers have reported, for the next socket of this runner."""
        return self._greeting.heard

    def remember(self, heard: plan_pb2.Hello) -> None:
        """Adds what a former socket has `heard` to Hello. Called before `run`."""
        self._greeting.know(heard.term, heard.term_id)
        self._greeting.know_context(heard.longest_context)

    def _await_dismissal(self) -> None:
        """Goes on executing plans while the scheduler moves the sequences to other runners, for a limited time."""
        if self._mover is None or MOVES not in self._features:
            return
        now = time.monotonic()
        until_at = now + self._move_out_s
        while now < min(until_at, self._heard_at + self._silence_s):
            if self._dismissed or self._hurries or self._faulted or self._greeting.seeking:
                return
            self._turn()
            now = time.monotonic()

    # ------------------------------------------------------------------ one turn of the loop

    def _turn(self) -> None:
        now = time.monotonic()
        under_way = self._compute.look()
        if self._compute.finished or (self._mover is not None and self._mover.has_finished):
            self._forward()
        if under_way and not self.sleeps and now < self._next_turn_at and not self._connection.has_message:
            return
        self._next_turn_at = now + _WATCHING_TURN_S
        self._watch.look(self._compute.oldest_began_at, now)
        wait_s = _LONGEST_POLL_S
        if under_way:
            wait_s = _SLEEP_S if self.sleeps else 0.0
        if self._greeting.seeking:
            wait_s = min(wait_s, self._greeting.wait_s(now))
        ready = self._connection.poll(wait_s)
        if ready.woken:
            self._forward()
        if ready.connected:
            self._greeting.seek()
        if ready.received:
            self._receive()
        self._connection.flush()
        if not self._stopping:
            self._greet(time.monotonic())

    def _receive(self) -> None:
        for frame in self._connection.messages():
            try:
                self._take_message(plan_pb2.ToRunner.FromString(frame))
            except DecodeError:
                log.warning("ignored a frame that is not a message", bytes=len(frame))

    def _forward(self) -> None:
        """Sends finished results, events and answers about moves, except those of a session that is over."""
        for moved in self._mover.finished() if self._mover is not None else ():
            if moved.session == self._session:
                self._post(moved)
        while self._compute.finished:
            message = self._compute.finished.popleft()
            if message.session != self._session:
                continue
            kind = message.WhichOneof("body")
            if kind == "event":
                self._faulted = True
                self._greeting.seek()
            elif kind == "result" and EARLY not in self._features:
                message.result.timings.ClearField("early_ns")
            frame = self._post(message)
            if kind == "result":
                self._last_done = message.number
                self._results.append((message.number, frame))

    def _greet(self, now: float) -> None:
        greeting = self._greeting
        if not greeting.seeking and now - self._heard_at > self._silence_s:
            log.warning("the scheduler is silent", seconds=round(now - self._heard_at, 1))
            greeting.seek()
        if not greeting.is_due(now) or self._compute.broken or self._runner.lost:
            return
        if self._compute.oldest_began_at is None:
            greeting.send(self._session, self._last_done, now)
        elif self._watch.over:
            raise HungBackend
        else:
            greeting.put_off(now)

    # ------------------------------------------------------------------ messages

    def _take_message(self, message: plan_pb2.ToRunner) -> None:
        kind = message.WhichOneof("body")
        if kind == "welcome":
            self._begin_session(message.session, message.welcome)
            return
        if kind == "rejection" and self._greeting.seeking:
            raise Rejected(message.rejection.reason)
        if message.session != self._session or self._session == 0:
            if self._greeting.hello.term and message.session:
                self._fence(message.session, self._left.get(message.session, frozenset()))
            return
        self._heard()
        if kind == "plan":
            self._take_plan(message.number, message.plan)
        elif kind == "masks":
            self._compute.submit(TakeMasks(self._session, message.number, message.masks))
        elif kind == "ping":
            self._greeting.know(message.ping.term, message.ping.term_id)
            self._greeting.know_context(message.ping.longest_context)
            if message.ping.last_plan >= self._next_plan and not self._faulted:
                self._ask_again()
            pong = plan_pb2.Pong(last_plan=self._last_done)
            self._post(plan_pb2.ToScheduler(session=self._session, number=message.number, pong=pong))
        elif kind == "snapshot_request":
            self._compute.submit(TakeSnapshot(self._session))
        elif kind == "dismissal":
            self._dismissed = True
        elif self._mover is not None:
            self._mover.take(message)

    def _begin_session(self, session: int, welcome: plan_pb2.Welcome) -> None:
        if session in (0, self._session):
            return  # answers a repeated Hello
        features = shared(welcome.features)
        known = self._greeting.hello
        if session in self._left or (welcome.term, welcome.term_id) < (known.term, known.term_id):
            self._fence(session, features)
            return
        log.info("session begins", session=session, resume=welcome.resume)
        self._left[self._session] = self._features
        self._features = features
        self._greeting.know(welcome.term, welcome.term_id)
        self._session = self._compute.session = session
        self._next_plan, self._last_done, self._faulted = 1, 0, False
        self._results.clear()
        self._connection.drop_waiting()
        self._greeting.seeking = False
        self._heard_at = time.monotonic()
        self._greeting.answered()
        if self._mover is not None:
            self._mover.begin_session(session)
        self._compute.submit(BeginSession(session, welcome.resume, welcome.naming_secret))

    def _fence(self, session: int, features: frozenset[str]) -> None:
        """Reports the current term to the scheduler of `session`, which thereby learns that the session is over."""
        known = self._greeting.hello
        event = plan_pb2.Event(fenced=known.term)
        if TERMS in features:
            event.fenced_id = known.term_id
        self._post(plan_pb2.ToScheduler(session=session, event=event))

    def _ask_again(self) -> None:
        event = plan_pb2.Event(resend_from=self._next_plan)
        self._post(plan_pb2.ToScheduler(session=self._session, event=event))

    def _heard(self) -> None:
        self._heard_at = time.monotonic()
        self._greeting.answered()
        if not self._greeting.seeking or self._faulted:
            return
        self._greeting.seeking = False
        for _, frame in self._results:
            self._connection.send_later(frame)
        self._ask_again()

    def _take_plan(self, number: int, plan: plan_pb2.Plan) -> None:
        if self._faulted:
            return
        if number == self._next_plan:
            self._next_plan += 1
            self._compute.submit(ExecutePlan(self._session, number, plan))
        elif number > self._next_plan:
            self._ask_again()
        else:
            for done, frame in self._results:
                if done == number:
                    self._connection.send_later(frame)

    def _post(self, message: plan_pb2.ToScheduler) -> bytes:
        frame = message.SerializeToString()
        self._connection.send_later(frame)
        return frame
