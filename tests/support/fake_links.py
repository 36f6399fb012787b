"""The engine's two links without a socket: what goes in and out is the test's to delay, to lose and to spoil."""

from __future__ import annotations

from collections import deque

from protos import engine_pb2, plan_pb2
from runner_svc.launched_plan import LaunchedPlan
from runner_svc.runner import Runner
from scheduler_svc.constrained.awaiting import AWAIT_MASK
from scheduler_svc.link.runner_events import GotResult, GotSnapshot, Joined, Leaving, Loss, Lost, RunnerEvent

WORKER = b"worker"


class FakeFront:
    """Stands for the front link: commands go in, messages are collected in order."""

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


class FakeRunners:
    """Stands for the runner link: plans are executed by real `Runner`s when the test says so.

    A runner that overlaps is told to launch them, and waits for the oldest when its result is to be delivered.
    """

    def __init__(self) -> None:
        self.events: list[RunnerEvent] = []
        self.runners: dict[int, Runner] = {}
        self.plans: dict[int, deque[tuple[int, plan_pb2.Plan]]] = {}
        self.launched: dict[int, deque[LaunchedPlan]] = {}
        self.most_launched = 0
        """Plans of one runner that were under way at once."""
        self.results: dict[int, deque[GotResult]] = {}
        self.masks: dict[tuple[int, int], plan_pb2.Masks] = {}
        self.rejected: dict[int, str] = {}
        self.garbled: set[int] = set()
        """Sessions that may be dropped: a result of theirs was spoilt on its way."""

    def connect(self, session: int, runner: Runner, former: int = 0, holds: bool = False) -> None:
        self.runners[session] = runner
        self.plans[session] = deque()
        self.launched[session] = deque()
        self.results[session] = deque()
        self.events.append(Joined(session, runner.hello(), former, holds))

    def kill(self, session: int, loss: Loss = Loss.GONE) -> Runner:
        """The session ends; the runner is returned for those that survive it."""
        runner = self.runners[session]
        self.dismiss(session)
        self.events.append(Lost(session, "killed by the test", loss))
        return runner

    def leave(self, session: int) -> None:
        """The runner says goodbye; what it has it still does."""
        self.events.append(Leaving(session))

    def dismiss(self, session: int) -> Runner | None:
        """The session is over, and nobody takes its results; the runner ends what it has launched."""
        self.plans.pop(session, None)
        abandons = False
        for plan in self.launched.pop(session, ()):
            abandons = abandons or plan.awaits_masks
            plan.abandon() if abandons else plan.wait()
        self.results.pop(session, None)
        return self.runners.pop(session, None)

    def receive(self) -> list[RunnerEvent]:
        events, self.events = self.events, []
        return events

    def welcome(self, session: int) -> None:
        if session in self.runners:
            self.runners[session].reset()

    def resume(self, session: int) -> None:
        if session in self.runners:
            self.runners[session].resume()
            snapshot = plan_pb2.Snapshot.FromString(self.runners[session].snapshot().SerializeToString())
            self.events.append(GotSnapshot(session, snapshot))

    def reject(self, session: int, reason: str) -> None:
        self.rejected[session] = reason

    def drop(self, session: int, reason: str) -> None:
        assert session in self.garbled, f"session {session} dropped: {reason}"
        if self.dismiss(session) is not None:
            self.events.append(Lost(session, reason, Loss.UNSOUND))

    def send_plan(self, session: int, number: int, plan: plan_pb2.Plan) -> None:
        if session in self.plans:
            self.plans[session].append((number, plan_pb2.Plan.FromString(plan.SerializeToString())))

    def send_masks(self, session: int, number: int, masks: plan_pb2.Masks) -> None:
        assert (session, number) not in self.masks, "masks sent twice"
        self.masks[session, number] = plan_pb2.Masks.FromString(masks.SerializeToString())
        for plan in self.launched.get(session, ()):
            self._mask(session, plan)

    def execute(self, session: int) -> bool:
        """The runner executes or launches its oldest plan; False when it has none, or execution lacks its masks."""
        if not self.plans.get(session):
            return False
        if self.runners[session].overlaps:
            launched = self.runners[session].launch(*self.plans[session].popleft())
            self.launched[session].append(launched)
            self.most_launched = max(self.most_launched, len(self.launched[session]))
            self._mask(session, launched)
            return True
        number, plan = self.plans[session][0]
        masks = self.masks.pop((session, number), None)
        if masks is None and any(flags & AWAIT_MASK for flags in plan.extent_flags):
            return False
        self.plans[session].popleft()
        self.results[session].append(GotResult(session, number, self.runners[session].execute(number, plan, masks)))
        return True

    def _mask(self, session: int, plan: LaunchedPlan) -> None:
        """Its masks, where they are here, are taken once."""
        if (masks := self.masks.pop((session, plan.number), None)) is not None:
            plan.mask(masks)

    def deliver(self, session: int) -> bool:
        """The oldest result reaches the engine; False when there is none."""
        launched = self.launched.get(session)
        if launched and not launched[0].awaits_masks:
            plan = launched.popleft()
            self.results[session].append(GotResult(session, plan.number, plan.wait()))
        if not self.results.get(session):
            return False
        self.events.append(self.results[session].popleft())
        return True

    def garble(self, session: int, column: str) -> bool:
        """The oldest result reaches the engine with its column cut short; False when there is none to cut."""
        if not self.results.get(session) or not getattr(self.results[session][0].result, column):
            return False
        event = self.results[session].popleft()
        result = plan_pb2.Result.FromString(event.result.SerializeToString())
        setattr(result, column, getattr(result, column)[: -4 if column == "tokens" else -1])
        self.garbled.add(session)
        self.events.append(GotResult(session, event.number, result))
        return True
