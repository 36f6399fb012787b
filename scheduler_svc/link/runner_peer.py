"""One runner process in one session, as the link knows it: what it was sent, what it still owes, when it was heard."""

from __future__ import annotations

from dataclasses import dataclass, field

from roster_protos import plan_pb2


@dataclass(slots=True)
class Peer:
    """State of one session. Times in seconds on the link's clock."""

    identity: bytes
    session: int
    runner_id: str
    heard_at: float
    pinged_at: float
    features: frozenset[str] = frozenset()
    """What both sides of this link have (`features`)."""
    longest_context: int = 0
    """Of the contexts that its Hello tells of, in tokens."""
    welcome: plan_pb2.Welcome | None = None
    """What opened the session; None until the engine has decided."""
    entered: bool = False
    """It has spoken in this session."""
    leaving: bool = False
    snapshot_asked_at: float | None = None
    """Since when a snapshot is owed; None: none is."""
    pings: int = 0
    last_plan: int = 0
    """Number of the last plan sent."""
    unacknowledged: dict[int, tuple[bytes, float]] = field(default_factory=dict)
    """Plan number -> (frame, when sent), oldest first; without those whose results came too early."""
    masks: dict[int, list[bytes]] = field(default_factory=dict)
    """Frames with masks of unacknowledged plans, by plan number."""
    early: dict[int, plan_pb2.Result] = field(default_factory=dict)
    """Results that came before one of an earlier plan."""
    next_result: int = 1

    def sent(self, number: int, frame: bytes, now_s: float) -> None:
        """The plan is on its way."""
        self.unacknowledged[number] = (frame, now_s)
        self.last_plan = number

    def sent_masks(self, number: int, frame: bytes) -> None:
        """Masks of the plan are on their way."""
        if number in self.unacknowledged:
            self.masks.setdefault(number, []).append(frame)

    def kept_masks(self) -> list[bytes]:
        """The masks of all plans that are not acknowledged."""
        return [frame for frames in self.masks.values() for frame in frames]

    def take_result(self, number: int, result: plan_pb2.Result) -> list[tuple[int, plan_pb2.Result]]:
        """The results that are in order now that this one came; a repeated one brings none."""
        if self.unacknowledged.pop(number, None) is None:
            return []
        self.masks.pop(number, None)
        self.early[number] = result
        ready = []
        while self.next_result in self.early:
            ready.append((self.next_result, self.early.pop(self.next_result)))
            self.next_result += 1
        return ready

    @property
    def missing_result(self) -> int | None:
        """Number of a plan whose result was overtaken by a later one's."""
        return self.next_result if self.early else None

    @property
    def oldest_debt_s(self) -> float | None:
        """Since when the runner owes the oldest thing that it was asked for; None: nothing."""
        if self.snapshot_asked_at is not None:
            return self.snapshot_asked_at
        return next(iter(self.unacknowledged.values()))[1] if self.unacknowledged else None

    def forgive(self, now_s: float) -> None:
        """Starts all timers again."""
        self.heard_at = now_s
        self.unacknowledged = {number: (frame, now_s) for number, (frame, _) in self.unacknowledged.items()}
        if self.snapshot_asked_at is not None:
            self.snapshot_asked_at = now_s
