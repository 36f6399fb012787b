"""Events that the link to the runners reports to the engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from roster_protos import plan_pb2
from scheduler_svc.link.terms import Term


class Loss(Enum):
    """The cause of a session's end."""

    LEFT = "left"
    """It announced that it leaves."""
    GONE = "gone"
    """Its connection broke: it was killed, or the network was cut."""
    SILENT = "silent"
    """It sent nothing for too long: it was stopped, or the network was cut."""
    HUNG = "hung"
    """It answers pings, but has not answered its oldest plan in time."""
    FAULT = "fault"
    """It reported that it can't execute a plan."""
    MEMORY = "memory"
    """It reported that its memory does not suffice for a plan. The capacity of its device was measured at its start, so
    another process has taken memory since: the plan did not cause the loss."""
    REPLACED = "replaced"
    """A new process with the same id joined."""
    UNSOUND = "unsound"
    """It sent an impossible message."""

    @property
    def survivable(self) -> bool:
        """Whether the same process may come back unharmed, which clears the requests that it ran."""
        return self in (Loss.GONE, Loss.SILENT, Loss.LEFT)

    @property
    def story(self) -> str:
        """The cause for the client of a request that was computed there, a clause without full stop."""
        return _STORIES[self]

    @staticmethod
    def of_fault(reason: str) -> Loss:
        """Returns FAULT or MEMORY, by the reason that the runner gave."""
        return Loss.MEMORY if _OUT_OF_MEMORY.search(reason) else Loss.FAULT


_STORIES = {
    Loss.LEFT: "the runner that computed it left",
    Loss.GONE: "the process that computed it ended, or its connection broke",
    Loss.SILENT: "the runner that computed it stopped responding",
    Loss.HUNG: "the runner that computed it did not end its step in time",
    Loss.FAULT: "the runner that computed it answered with a fault",
    Loss.MEMORY: "the runner that computed it ran out of memory",
    Loss.REPLACED: "the process that computed it was replaced by a new one",
    Loss.UNSOUND: "the runner that computed it sent an impossible answer",
}
_OUT_OF_MEMORY = re.compile(r"out.?of.?memory|MemoryError|allocate memory|ALLOC_FAILED", re.IGNORECASE)


@dataclass(slots=True, frozen=True)
class Joined:
    """A runner said hello; `welcome`, `resume` or `reject` answers.

    `former` is its previous session, 0 for a new process. `holds` means that this was a session of an earlier
    scheduler, whose sequences it may still hold.
    """

    session: int
    hello: plan_pb2.Hello
    former: int = 0
    holds: bool = False


@dataclass(slots=True, frozen=True)
class GotSnapshot:
    """The state that a runner reports after `resume`."""

    session: int
    snapshot: plan_pb2.Snapshot


@dataclass(slots=True, frozen=True)
class GotResult:
    """A result of a runner in session; each is reported once, in the order of the plans."""

    session: int
    number: int
    result: plan_pb2.Result


@dataclass(slots=True, frozen=True)
class GotMoved:
    """A runner's answer to a grant or a pull; it may be repeated."""

    session: int
    moved: plan_pb2.Moved


@dataclass(slots=True, frozen=True)
class Leaving:
    """A runner that finishes its plans and then leaves; one that blocks can be moved from waits for a Dismissal."""

    session: int


@dataclass(slots=True, frozen=True)
class Lost:
    """A session that has ended: no more events follow."""

    session: int
    reason: str
    loss: Loss = Loss.GONE


@dataclass(slots=True, frozen=True)
class Fenced:
    """A runner reports a scheduler with a later term: this process has a successor."""

    term: Term


RunnerEvent = Joined | GotSnapshot | GotResult | GotMoved | Leaving | Lost | Fenced
