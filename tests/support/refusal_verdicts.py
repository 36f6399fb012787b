"""What came of the requests of a trial that have a deadline, and how true their refusals were."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.model.sequence import FinishReason

OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class Verdict:
    """A request with a deadline: what the engine said of it, and what came of it."""

    request_id: str
    at_s: float
    timeout_s: float
    refused: bool
    weight: float = 1.0
    """Requests that it stands for."""
    retry_s: float = 0.0
    reason: int = 0
    """How it ended, or would have; 0: it was sent again to a new scheduler, and refused there."""
    took_s: float = 0.0
    accepted_after_s: float | None = None
    """Seconds from the refusal to the first time at which it would have been accepted; None: never judged so."""

    promised: bool = False
    """It was accepted as it had been told to come back, and would have been refused otherwise."""

    @property
    def met(self) -> bool:
        """It came to its own end in time, or would have."""
        return self.reason in OWN_ENDS and self.took_s <= self.timeout_s

    @property
    def missed(self) -> bool:
        """Time was up before: also for one that was sent again to a new scheduler, which counts its time anew."""
        return self.reason == FinishReason.DEADLINE or (self.reason in OWN_ENDS and self.took_s > self.timeout_s)


@dataclass(slots=True)
class Report:
    """What came of one world, or of several."""

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
        """Refused, and would have met their deadlines."""
        return self._count(True, True)

    @property
    def met(self) -> float:
        """Requests that met their deadlines or would have."""
        return self.wrongly + self._count(False, True)

    @property
    def rightly(self) -> float:
        """Refused, and would have missed their deadlines."""
        return self._count(True, False)

    @property
    def missed(self) -> float:
        """Requests that missed their deadlines or would have."""
        return self.rightly + self._count(False, False)

    @property
    def kept(self) -> int:
        """Requests that were accepted only because they had been told to come back."""
        return sum(v.promised for v in self.verdicts)

    @property
    def kept_met(self) -> int:
        """Of these, those that met their deadlines."""
        return sum(v.promised and v.met for v in self.verdicts)

    @property
    def timed(self) -> list[Verdict]:
        """Refusals of which it is known when the same request would have been accepted."""
        return [v for v in self.verdicts if v.refused and v.accepted_after_s is not None]

    @property
    def true_times(self) -> int:
        """Of these, those whose RetryInfo was true: within a factor of 2 or half a second, whichever is wider."""
        return sum(is_true(v.retry_s, v.accepted_after_s or 0.0) for v in self.timed)

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, {self.refused:.0f} refused: "
            f"wrongly {self.wrongly:.0f} of {self.met:.0f} that meet theirs ({share(self.wrongly, self.met):.2%}; "
            f"{share(self.wrongly, self.refused):.1%} of refusals), "
            f"rightly {self.rightly:.0f} of {self.missed:.0f} that miss it ({share(self.rightly, self.missed):.1%}), "
            f"RetryInfo true {self.true_times} of {len(self.timed)} ({share(self.true_times, len(self.timed)):.1%}), "
            f"by promise {self.kept}, of which {self.kept_met} met it"
        )


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def is_true(said_s: float, was_s: float) -> bool:
    """Within 2 times, or half a second."""
    return abs(said_s - was_s) <= 0.5 or was_s / 2 <= said_s <= was_s * 2
