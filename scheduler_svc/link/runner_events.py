"""What the link to the runners tells the engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from protos import plan_pb2
from scheduler_svc.link.terms import Term


class Loss(Enum):
    """Why a session ended."""

    LEFT = "left"
    """It said goodbye first."""
    GONE = "gone"
    """Its connection broke: it was killed, or the network was cut."""
    SILENT = "silent"
    """Nothing was heard for too long: stopped, or the network was cut."""
    HUNG = "hung"
    """It answers, but not to its oldest plan."""
    FAULT = "fault"
    """It says that it can't execute a plan."""
    REPLACED = "replaced"
    """A new process of the same name came."""
    UNSOUND = "unsound"
    """It said what can't be."""

    @property
    def survivable(self) -> bool:
        """The same process may come back as if nothing had been: what it ran is then not to blame."""
        return self in (Loss.GONE, Loss.SILENT, Loss.LEFT)


@dataclass(slots=True, frozen=True)
class Joined:
    """A runner said hello; `welcome`, `resume` or `reject` answers.

    `former`: the session it was in, 0 for a new process. `holds`: that was an earlier scheduler's session, whose
    sequences it may still hold.
    """

    session: int
    hello: plan_pb2.Hello
    former: int = 0
    holds: bool = False


@dataclass(slots=True, frozen=True)
class GotSnapshot:
    """What a runner that was asked to `resume` holds."""

    session: int
    snapshot: plan_pb2.Snapshot


@dataclass(slots=True, frozen=True)
class GotResult:
    """A result of a runner in session; each once, in the order of the plans."""

    session: int
    number: int
    result: plan_pb2.Result


@dataclass(slots=True, frozen=True)
class Leaving:
    """A runner finishes the plans that it has, and goes."""

    session: int


@dataclass(slots=True, frozen=True)
class Lost:
    """A session ended: nothing more comes of it."""

    session: int
    reason: str
    loss: Loss = Loss.GONE


@dataclass(slots=True, frozen=True)
class Fenced:
    """A scheduler of a later term has a runner of ours: this process has a successor."""

    term: Term


RunnerEvent = Joined | GotSnapshot | GotResult | Leaving | Lost | Fenced
