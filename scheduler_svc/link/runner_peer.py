"""One runner process in one session: what was sent to it, what it owes, and when it was last heard."""

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
    """Features that both sides of the link support (`features`)."""
    longest_context: int = 0
    """The longest context that its Hello reports, its own or another runner's, in tokens."""
    welcome: plan_pb2.Welcome | None = None
    """The Welcome that opened the session; None until the engine has decided."""
    entered: bool = False
    """Whether a message of this session has arrived from it."""
    leaving: bool = False
    snapshot_asked_at: float | None = None
    """When the snapshot it owes was requested; None if it owes none."""
    pings: int = 0
    last_plan: int = 0
    """Number of the last plan sent."""
    unacknowledged: dict[int, tuple[bytes, float]] = field(default_factory=dict)
    """Plan number -> (frame, send time), oldest first; plans whose results arrived early are removed."""
    masks: dict[int, list[bytes]] = field(default_factory=dict)
    """Frames with masks of unacknowledged plans, by plan number."""
    early: dict[int, plan_pb2.Result] = field(default_factory=dict)
    """Results that arrived before the result of an earlier plan."""
    next_result: int = 1

    def sent(self, number: int, frame: bytes, now_s: float) -> None:
        """Records a plan that was sent."""
        self.unacknowledged[number] = (frame, now_s)
        self.last_plan = number

    def sent_masks(self, number: int, frame: bytes) -> None:
        """Records masks that were sent for an unacknowledged plan."""
        if number in self.unacknowledged:
            self.masks.setdefault(number, []).append(frame)

    def kept_masks(self) -> list[bytes]:
        """Returns the masks of all unacknowledged plans."""
        return [frame for frames in self.masks.values() for frame in frames]

    def take_result(self, number: int, result: plan_pb2.Result) -> list[tuple[int, plan_pb2.Result]]:
        """Returns the results that are now in order; none for a duplicate."""
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
        """Number of the plan whose result was overtaken by a later one; None if none was."""
        return self.next_result if self.early else None

    @property
    def oldest_debt_s(self) -> float | None:
        """When the oldest answer it owes was requested; None if it owes none."""
        if self.snapshot_asked_at is not None:
            return self.snapshot_asked_at
        return next(iter(self.unacknowledged.values()))[1] if self.unacknowledged else None

    def forgive(self, now_s: float) -> None:
        """Restarts all timers."""
        self.heard_at = now_s
        self.unacknowledged = {number: (frame, now_s) for number, (frame, _) in self.unacknowledged.items()}
        if self.snapshot_asked_at is not None:
            self.snapshot_asked_at = now_s
