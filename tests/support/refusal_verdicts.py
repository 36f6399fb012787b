"""What became of a trial's requests with deadlines, and how accurate their refusals were."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.model.sequence import FinishReason

OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class Verdict:
    """A request with a deadline: the engine's decision and its outcome."""

    request_id: str
    at_s: float
    timeout_s: float
    refused: bool
    weight: float = 1.0
    """Number of requests that it represents."""
    retry_s: float = 0.0
    reason: int = 0
    """Reason for its end, real or in the fork; 0: it was sent again to a new scheduler and refused there."""
    took_s: float = 0.0
    accepted_after_s: float | None = None
    """Seconds from the refusal to the first time at which it would have been accepted; None: no such time was found."""

    promised: bool = False
    """Whether it was accepted only because of a reservation made with an earlier refusal."""

    @property
    def met(self) -> bool:
        """Whether it reached its own end in time, really or in the fork."""
        return self.reason in OWN_ENDS and self.took_s <= self.timeout_s

    @property
    def missed(self) -> bool:
        """Whether its time ran out first, also if it was sent again to a new scheduler, where its time starts over."""
        return self.reason == FinishReason.DEADLINE or (self.reason in OWN_ENDS and self.took_s > self.timeout_s)


@dataclass(slots=True)
class Report:
    """Results of one world, or of several."""

    verdicts: list[Verdict] = field(default_factory=list)
    requests: int = 0

    def add(self, other: Report) -> None:
        self.verdicts += other.verdicts
        self.requests += other.requests

    def _count(self, refused: bool, met: bool) -> float:
        return sum(v.weight for v in self.verdicts if v.refused == refused and (v.met if met else v.missed))

    @property
    def refused(self) -> float:
        return sum(v.weight for v in self.verdicts if v.refused)

    @property
    def wrongly(self) -> float:
        """Weighted number of refusals of requests that would have met their deadlines."""
        return self._count(True, True)

    @property
    def met(self) -> float:
        """Weighted number of requests that met their deadlines or would have."""
        return self.wrongly + self._count(False, True)

    @property
    def rightly(self) -> float:
        """Weighted number of refusals of requests that would have missed their deadlines."""
        return self._count(True, False)

    @property
    def missed(self) -> float:
        """Weighted number of requests that missed their deadlines or would have."""
        return self.rightly + self._count(False, False)

    @property
    def kept(self) -> int:
        """Number of requests accepted only because of a reservation."""
        return sum(v.promised for v in self.verdicts)

    @property
    def kept_met(self) -> int:
        """Number of these that met their deadlines."""
        return sum(v.promised and v.met for v in self.verdicts)

    @property
    def timed(self) -> list[Verdict]:
        """Refusals for which the time at which the same request would have been accepted is known."""
        return [v for v in self.verdicts if v.refused and v.accepted_after_s is not None]

    @property
    def true_times(self) -> int:
        """Number of these with an accurate RetryInfo: within a factor of 2 or half a second, whichever is wider."""
        return sum(is_true(v.retry_s, v.accepted_after_s or 0.0) for v in self.timed)

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, {self.refused:.0f} refused: "
            f"wrongly {self.wrongly:.0f} of {self.met:.0f} in time ({share(self.wrongly, self.met):.2%}; "
            f"{share(self.wrongly, self.refused):.1%} of refusals), "
            f"rightly {self.rightly:.0f} of {self.missed:.0f} too late ({share(self.rightly, self.missed):.1%}), "
            f"RetryInfo true {self.true_times} of {len(self.timed)} ({share(self.true_times, len(self.timed)):.1%}), "
            f"accepted by reservation {self.kept}, {self.kept_met} in time"
        )


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def is_true(said_s: float, was_s: float) -> bool:
    """Within a factor of 2, or half a second."""
    return abs(said_s - was_s) <= 0.5 or was_s / 2 <= said_s <= was_s * 2
