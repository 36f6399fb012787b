"""What the link to the runners tells the engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from roster_protos import plan_pb2
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
    MEMORY = "memory"
    """It says that its memory does not suffice for a plan. What its device can do was measured when it started: so
    another process has taken some since, and the plan is not to blame."""
    REPLACED = "replaced"
    """A new process of the same name came."""
    UNSOUND = "unsound"
    """It said what can't be."""

    @property
    def survivable(self) -> bool:
        """The same process may come back as if nothing had been: what it ran is then not to blame."""
        return self in (Loss.GONE, Loss.SILENT, Loss.LEFT)

    @property
    def story(self) -> str:
        """What happened, for the client of a request that was computed there; no full stop."""
        return _STORIES[self]

    @staticmethod
    def of_fault(reason: str) -> Loss:
        """FAULT or MEMORY, by the reason that the runner gave."""
        return Loss.MEMORY if _OUT_OF_MEMORY.search(reason) else Loss.FAULT


_STORIES = {
    Loss.LEFT: "the runner that computed it left",
    Loss.GONE: "the process that computed it ended, or its connection broke",
    Loss.SILENT: "the runner that computed it fell silent",
    Loss.HUNG: "the runner that computed it did not end its step in time",
    Loss.FAULT: "the runner that computed it answered with a fault",
    Loss.MEMORY: "the runner that computed it ran out of memory",
    Loss.REPLACED: "the process that computed it was replaced by a new one",
    Loss.UNSOUND: "the runner that computed it answered what can't be",
}
_OUT_OF_MEMORY = re.compile(r"out.?of.?memory|MemoryError|allocate memory|ALLOC_FAILED", re.IGNORECASE)


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
