"""The engine's two links without sockets; a test can delay, lose and corrupt what passes."""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass

from roster_common.link_protocol import OURS
from roster_protos import engine_pb2, plan_pb2
from runner_svc.execution.plans_in_flight import LaunchedPlan
from runner_svc.execution.runner import Runner
from scheduler_svc.link.runner_events import GotResult, GotSnapshot, Joined, Leaving, Loss, Lost, RunnerEvent
from tests.support.fake_moves import FakeMoves

WORKER = b"worker"


class FakeFront:
    """A fake front link: commands go in, and messages are collected in order."""

    def __init__(self) -> None:
        self.commands: list[tuple[bytes, engine_pb2.Command]] = []
        self.messages: list[tuple[bytes, engine_pb2.FromEngine]] = []

    def receive(self) -> list[tuple[bytes, engine_pb2.Command]]:
        commands, self.commands = self.commands, []
        return commands

    def send(self, worker: bytes, message: engine_pb2.FromEngine) -> bool:
        self.messages.append((worker, engine_pb2.FromEngine.FromString(message.SerializeToString())))
        return True

    def put(self, worker: bytes = WORKER, **command: object) -> None:
        self.commands.append((worker, engine_pb2.Command(**command)))  # type: ignore[arg-type]


@dataclass
class MasksUnderWay:
    """Masks sent to a runner."""

    number: int
    """Number of the plan that they are for."""
    masks: plan_pb2.Masks
    behind: int
    """Number of the last plan sent before them."""
    delay: int

    def has_come(self, next_plan: int | None) -> bool:
        """Whether the runner receives them now, if its next plan is `next_plan`. Called once a turn."""
        self.delay -= 1
        return self.delay < 0 and (next_plan is None or next_plan > self.behind)


class FakeRunners:
    """A fake runner link: real `Runner`s execute plans when the test calls `execute`.

    A runner takes plans and masks in the order in which they were sent, so the next plan may be launched while rows of
    the previous one await masks. An overlapping runner waits for its oldest plan when that plan's result is to be
    delivered; any other runner completes a plan as soon as its masks are there.
    """

    def __init__(self) -> None:
        self.events: list[RunnerEvent] = []
        self.runners: dict[int, Runner] = {}
        self.plans: dict[int, deque[tuple[int, plan_pb2.Plan]]] = {}
        self.launched: dict[int, deque[LaunchedPlan]] = {}
        self.most_launched = 0
        """Largest number of one runner's plans that were in flight at once."""
        self.results: dict[int, deque[GotResult]] = {}
        self.masks: dict[int, deque[MasksUnderWay]] = {}
        self.mask_delay = 0
        """Calls of `execute` by which masks sent from now on are delayed, as those of a slow constraint are."""
        self.early: random.Random | None = None
        """Draws by how much plans were early, if results say so: with it, the engine holds plans back."""
        self.features: list[str] = sorted(OURS)
        """Features of the runners that connect from now on."""
        self.secretive: random.Random | None = None
        """Draws which runners keep the secret of their host pool's names to themselves; None: none does."""
        self._sent: dict[int, int] = {}  # number of the last plan sent, by session
        self.rejected: dict[int, str] = {}
        self.garbled: set[int] = set()
        """Sessions that the engine may drop because a result of theirs was corrupted in transit."""
        self.worthless: int | None = None
        """Number of runners dropped because none of a result's rows was finite, which then began another session;
        None: no runner may be."""
        self.ill: dict[Runner, int] = {}
        """Remaining plans that a runner answers with a fault; after each fault it reconnects."""
        self._after_faults = itertools.count(1 << 20)
        self.moves: FakeMoves | None = None
        """The part of runners that connect from now on in moves; None: they take part in none."""
        self.roles: dict[str, str] = {}
        """Roles by runner id."""

    def connect(self, session: int, runner: Runner, former: int = 0, holds: bool = False) -> None:
        self.runners[session] = runner
        self.plans[session] = deque()
        self.launched[session] = deque()
        self.results[session] = deque()
        self.masks[session] = deque()
        self._sent[session] = 0
        hello = runner.hello()
        hello.features.extend(self.features)
        if self.secretive is None or self.secretive.random() < 0.7:
            hello.naming_secret = runner.naming_secret
        if self.moves is not None:
            self.moves.hello(runner, hello)
        hello.role = self.roles.get(runner.runner_id, "")
        self.events.append(Joined(session, hello, former, holds))

    def kill(self, session: int, loss: Loss = Loss.GONE) -> Runner:
        """Ends the session; returns the runner, for tests in which it survives."""
        runner = self.runners[session]
        self.dismiss(session)
        if self.moves is not None and loss is Loss.GONE:
            self.moves.die(runner)
        self.events.append(Lost(session, "killed by the test", loss))
        return runner

    def leave(self, session: int) -> None:
        """Lets the runner announce its departure; it still executes the plans that it has."""
        self.events.append(Leaving(session))

    def dismiss(self, session: int) -> Runner | None:
        """Ends the session and discards its results; the runner finishes or abandons its launched plans."""
        self.plans.pop(session, None)
        self.masks.pop(session, None)
        abandons = False
        for plan in self.launched.pop(session, ()):
            abandons = abandons or plan.awaits_masks
            plan.abandon() if abandons else plan.wait()
        self.results.pop(session, None)
        return self.runners.pop(session, None)

    def receive(self) -> list[RunnerEvent]:
        if self.moves is not None:
            self.events += self.moves.progress()
        events, self.events = self.events, []
        return events

    def welcome(self, session: int, naming_secret: bytes = b"") -> None:
        if session in self.runners:
            self.runners[session].reset(naming_secret)
            if naming_secret:
                self._report(session)

    def resume(self, session: int, naming_secret: bytes = b"") -> None:
        if session in self.runners:
            self.runners[session].resume(naming_secret)
            self._report(session)

    def _report(self, session: int) -> None:
        snapshot = plan_pb2.Snapshot.FromString(self.runners[session].snapshot().SerializeToString())
        self.events.append(GotSnapshot(session, snapshot))

    def reject(self, session: int, reason: str) -> None:
        self.rejected[session] = reason

    def drop(self, session: int, reason: str) -> None:
        if session not in self.runners:  # lost already, behind a result that is applied only now
            return
        if self.worthless is not None and reason == "none of its results was finite":
            self.worthless += 1
            self.garbled.add(session)  # a result behind this one may have been received already
            self.connect(next(self._after_faults), self.kill(session, Loss.UNSOUND), former=session)
            return
        assert session in self.garbled, f"session {session} dropped: {reason}"
        self.dismiss(session)
        self.events.append(Lost(session, reason, Loss.UNSOUND))

    def send_plan(self, session: int, number: int, plan: plan_pb2.Plan) -> None:
        if session in self.plans:
            self.plans[session].append((number, plan_pb2.Plan.FromString(plan.SerializeToString())))
            self._sent[session] = number

    def send_move(self, session: int, message: plan_pb2.ToRunner) -> None:
        if self.moves is not None:
            self.moves.send(session, message)

    def send_masks(self, session: int, number: int, masks: plan_pb2.Masks) -> None:
        if session in self.masks:
            sent = plan_pb2.Masks.FromString(masks.SerializeToString())
            self.masks[session].append(MasksUnderWay(number, sent, self._sent[session], self.mask_delay))

    def execute(self, session: int) -> bool:
        """Executes the runner's oldest plan and delivers the masks before the next; False if there is neither."""
        plans, masks = self.plans.get(session), self.masks.get(session)
        if not plans and not masks:
            return False
        if plans and self.ill.get(self.runners[session]):
            self._fault(session)
            return True
        if plans:
            self._launch(session, *plans.popleft())
        while masks and masks[0].has_come(plans[0][0] if plans else None):
            came = masks.popleft()
            (plan,) = (plan for plan in self.launched[session] if plan.number == came.number)
            assert plan.awaits_masks, "masks sent twice"
            plan.mask(came.masks)
        if not self.runners[session].overlaps:
            while self._take_result(session):
                pass
        return True

    def _fault(self, session: int) -> None:
        """Ends the session with a fault; the same runner reconnects in a new one."""
        runner = self.kill(session, Loss.FAULT)
        self.ill[runner] -= 1
        self.connect(next(self._after_faults), runner, former=session)

    def _launch(self, session: int, number: int, plan: plan_pb2.Plan) -> None:
        launched, runner = self.launched[session], self.runners[session]
        launched.append(runner.launch(number, plan))
        if runner.overlaps:
            self.most_launched = max(self.most_launched, len(launched))

    def _take_result(self, session: int, waits: bool = False) -> bool:
        """Waits for the oldest plan in flight; returns False if there is none or it awaits masks.

        A result that is held until a copy is done is taken then, or later, unless `waits`.
        """
        launched = self.launched.get(session)
        if not launched or launched[0].awaits_masks:
            return False
        if launched[0].is_held and not waits and not launched[0].done():
            return False
        plan = launched.popleft()
        self.results[session].append(GotResult(session, plan.number, plan.wait()))
        return True

    def finish(self, session: int) -> None:
        """Ends all launched plans, as a runner does before it sends a snapshot: those behind a row that awaits its mask
        have no result."""
        while self._take_result(session, waits=True):
            pass
        while self.launched[session]:
            self.launched[session].popleft().abandon()

    def deliver(self, session: int) -> bool:
        """Delivers the oldest result to the engine; returns False if there is none."""
        self._take_result(session)
        if not self.results.get(session):
            return False
        event = self.results[session].popleft()
        if self.early is not None:
            event.result.timings.early_ns = 20_000_000 if self.early.random() < 0.99 else -1_000_000
        self.events.append(event)
        return True

    def garble(self, session: int, column: str) -> bool:
        """Delivers the oldest result with one column truncated; returns False if there is nothing to truncate."""
        if not self.results.get(session) or not getattr(self.results[session][0].result, column):
            return False
        event = self.results[session].popleft()
        result = plan_pb2.Result.FromString(event.result.SerializeToString())
        setattr(result, column, getattr(result, column)[: -4 if column == "tokens" else -1])
        self.garbled.add(session)
        self.events.append(GotResult(session, event.number, result))
        return True
