"""An isolation: a group of quarantined requests alone on a runner; the choice of that runner, and fault attribution."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.failure.runner_illness import RunnerIllness
from scheduler_svc.link.runner_events import Loss
from scheduler_svc.model.sequence import Phase, Request, Sequence
from scheduler_svc.queue.waiting_queue import WaitingQueue
from scheduler_svc.scheduler.scheduler import Scheduler


@dataclass(slots=True)
class Isolation:
    """A group on its runner. `marks`: initial number of tokens of each sequence that has made no progress yet."""

    session: int
    runner_id: str
    marks: dict[Sequence, int]
    queue: WaitingQueue
    beyond_limit: list[Sequence]
    """Sequences of these requests that wait because their tenant is at its limit of running sequences."""
    probed: bool
    """Whether the runner had computed a probe in this session."""
    worked: bool
    """Whether the runner had finished a plan of other requests in this session."""

    def proves(self, request: Request, loss: Loss) -> bool:
        """Returns whether this loss is attributed to the request, which was alone on the runner.

        A second loss on the same runner is not, unless the runner has shown in between that it works.
        """
        anew = not request.suspicion.failed_on(self.runner_id)
        return anew or self.worked or (self.probed and loss is not Loss.MEMORY)


def choose_runner(
    schedulers: dict[int, Scheduler], illness: RunnerIllness, group: list[Request], reserved: int | None
) -> int | None:
    """Returns the session of the runner for the group, or None if no runner that stays can hold it.

    Prefers, in this order: a runner that was not lost with this group alone before, one that has shown that it
    computes, the one that is `reserved` already, the least loaded.
    """

    def cost(item: tuple[int, Scheduler]) -> tuple[bool, bool, bool, int]:
        session, scheduler = item
        computes = scheduler.has_finished or (scheduler.probed and not illness.is_held(scheduler.hello.runner_id))
        return has_failed_on(group, scheduler), not computes, session != reserved, scheduler.table.num_running

    runners = [item for item in schedulers.items() if not item[1].leaving and fits(group, item[1])]
    return min(runners, key=cost)[0] if runners else None


def fits(group: list[Request], scheduler: Scheduler) -> bool:
    """Returns whether the runner can hold each waiting sequence of the group up to its maximum length."""
    return max(map(waiting_limit, group), default=0) <= scheduler.most_tokens


def waiting_limit(request: Request) -> int:
    """Returns the maximum length, in tokens, of the request's waiting sequences; 0 if none waits.

    The others need no runner and may be longer, because each open-ended sequence is shortened by itself.
    """
    return max((s.limit for s in request.sequences if s.phase is Phase.WAITING), default=0)


def has_failed_on(group: list[Request], scheduler: Scheduler) -> bool:
    """Returns whether this runner was lost before while the group, a single request, was alone on it."""
    return len(group) == 1 and group[0].suspicion.failed_on(scheduler.hello.runner_id)
