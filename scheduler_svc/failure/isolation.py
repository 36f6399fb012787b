"""An isolation: suspects alone with one another on a runner, which one that is, and what its loss proves."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.failure.runner_illness import RunnerIllness
from scheduler_svc.link.runner_events import Loss
from scheduler_svc.model.sequence import Phase, Request, Sequence
from scheduler_svc.queue.waiting_queue import WaitingQueue
from scheduler_svc.scheduler.scheduler import Scheduler


@dataclass(slots=True)
class Isolation:
    """A group on its runner. `marks`: tokens of each sequence at the beginning, until it has got further."""

    session: int
    runner_id: str
    marks: dict[Sequence, int]
    queue: WaitingQueue
    beyond_limit: list[Sequence]
    """Of the same requests, those that wait as their tenant runs as many as it may."""
    probed: bool
    """The runner had computed a probe in this session."""
    worked: bool
    """It had finished a plan of other requests."""

    def proves(self, request: Request, loss: Loss) -> bool:
        """Does this loss count against the request, which was alone? Not a second one of a runner that may be ill."""
        anew = not request.suspicion.failed_on(self.runner_id)
        return anew or self.worked or (self.probed and loss is not Loss.MEMORY)


def choose_runner(
    schedulers: dict[int, Scheduler], illness: RunnerIllness, group: list[Request], reserved: int | None
) -> int | None:
    """The session of the runner for the group; None where no runner stays that holds it.

    One that was not lost to it before, and has shown that it computes, if there is any; the one that is `reserved`
    already, then the least loaded.
    """

    def cost(item: tuple[int, Scheduler]) -> tuple[bool, bool, bool, int]:
        session, scheduler = item
        computes = scheduler.has_finished or (scheduler.probed and not illness.is_held(scheduler.hello.runner_id))
        return has_failed_on(group, scheduler), not computes, session != reserved, scheduler.table.num_running

    runners = [item for item in schedulers.items() if not item[1].leaving and fits(group, item[1])]
    return min(runners, key=cost)[0] if runners else None


def fits(group: list[Request], scheduler: Scheduler) -> bool:
    """Whether the runner can hold each of the group's sequences that wait to its end."""
    return max(map(waiting_limit, group), default=0) <= scheduler.most_tokens


def waiting_limit(request: Request) -> int:
    """Most tokens that a sequence of the request comes to which waits; 0 where none does.

    The others have no need of a runner, and may be longer: each open-ended sequence is shortened by itself.
    """
    return max((s.limit for s in request.sequences if s.phase is Phase.WAITING), default=0)


def has_failed_on(group: list[Request], scheduler: Scheduler) -> bool:
    """Was this runner lost while the group, a single request, had it for itself?"""
    return len(group) == 1 and group[0].suspicion.failed_on(scheduler.hello.runner_id)
