"""Two processes of one runner id: a newcomer waits until it is known whether the other one is there.

A restarted runner says hello under its old id, maybe before anything shows that its former process is gone. Two runners
that were given one id say the same. So the holder of the id is pinged on the newcomer's Hello: if it answers in time,
the newcomer is refused; if not, or if its connection turns out to be broken, it is replaced. One that leaves is waited
for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from roster_protos import plan_pb2
from scheduler_svc.link.runner_events import Loss
from scheduler_svc.link.runner_peer import Peer

ANSWER_S = 1.0
"""Within this time a runner that is there answers a ping, also while it computes."""
_REPLACED = "replaced by a new process of the same name (--runner-id), while it answered no ping"

log = structlog.get_logger()


@dataclass(slots=True)
class Newcomer:
    """One that waits. `ping`: number of the ping that was sent on its Hello; None: the holder can't be asked now."""

    identity: bytes
    hello: plan_pb2.ToScheduler
    holder: int
    ping: int | None = None
    until_at: float = math.inf


class NameContests:
    """Those that are open. Times in seconds on the link's clock."""

    def __init__(
        self,
        sessions: Mapping[int, Peer],
        ping: Callable[[Peer, float], None],
        drop: Callable[[int, str, Loss], None],
        send: Callable[[bytes, bytes], str],
    ) -> None:
        """What it needs of the link: live sessions, and to ping, drop and send as the link does."""
        self._sessions = sessions
        self._ping = ping
        self._drop = drop
        self._send = send
        self._waiting: dict[bytes, Newcomer] = {}

    @property
    def due_at(self) -> float:
        """When an answer is overdue; infinity: none is awaited."""
        return min(newcomer.until_at for newcomer in self._waiting.values()) if self._waiting else math.inf

    def holds_up(self, identity: bytes, hello: plan_pb2.ToScheduler, now_s: float) -> bool:
        """Whether the newcomer has to wait, as another runner has its id. A holder that can't be reached is dropped."""
        if identity in self._waiting:
            return True
        for holder in list(self._sessions.values()):
            if holder.runner_id != hello.hello.runner_id:
                continue
            if hello.session == holder.session:
                self._drop(holder.session, "it has connected anew", Loss.REPLACED)
                continue
            newcomer = Newcomer(identity, hello, holder.session)
            self._ask(newcomer, holder, now_s)
            if holder.session in self._sessions:
                self._waiting[identity] = newcomer
                return True
        return False

    def _ask(self, newcomer: Newcomer, holder: Peer, now_s: float) -> None:
        """Pings the holder, unless it has no session yet in which it could answer."""
        if holder.welcome is not None and not holder.leaving:
            self._ping(holder, now_s)
            newcomer.ping, newcomer.until_at = holder.pings, now_s + ANSWER_S

    def answered(self, holder: Peer, ping: int) -> None:
        """The holder has answered that ping: newcomers that waited for it are turned away."""
        for newcomer in list(self._waiting.values()):
            asked = newcomer.holder == holder.session and newcomer.ping is not None and ping >= newcomer.ping
            if asked and not holder.leaving:
                del self._waiting[newcomer.identity]
                self._refuse(newcomer)

    def _refuse(self, newcomer: Newcomer) -> None:
        name = newcomer.hello.hello.runner_id
        reason = f"another runner is here as {name!r}, and answers: start this one with another --runner-id"
        log.error("a runner is refused", runner=name, reason=reason)
        rejection = plan_pb2.ToRunner(session=newcomer.holder, rejection=plan_pb2.Rejection(reason=reason))
        self._send(newcomer.identity, rejection.SerializeToString())  # unless it is gone meanwhile

    def decided(self, now_s: float) -> list[Newcomer]:
        """Newcomers that wait no longer, as the holder is gone or did not answer in time."""
        if not self._waiting:
            return []
        free = []
        for newcomer in list(self._waiting.values()):
            holder = self._sessions.get(newcomer.holder)
            if holder is not None and newcomer.ping is None:
                self._ask(newcomer, holder, now_s)
            elif holder is not None and now_s >= newcomer.until_at:
                self._drop(holder.session, _REPLACED, Loss.REPLACED)
            if newcomer.holder not in self._sessions:
                del self._waiting[newcomer.identity]
                free.append(newcomer)
        return free

    def forgive(self, now_s: float) -> None:
        """Starts all timers again."""
        for newcomer in self._waiting.values():
            if newcomer.ping is not None:
                newcomer.until_at = now_s + ANSWER_S
