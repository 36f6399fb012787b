"""Conflicts over a runner id: a newcomer waits until it is known whether the holder of its id is alive.

A restarted runner says hello under its old id, perhaps before the loss of its former process is detected. Two runners
configured with one id do the same. So the newcomer's Hello triggers a ping of the holder. If the holder answers in
time, the newcomer is refused; if it does not, or its connection is broken, it is replaced. If the holder is leaving,
the newcomer waits.
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
"""Time within which a live runner answers a ping, even while it computes."""
_REPLACED = "replaced by a new process with the same --runner-id, since it did not answer a ping"

log = structlog.get_logger()


@dataclass(slots=True)
class Newcomer:
    """A waiting newcomer. `ping`: number of the ping sent on its Hello; None while the holder can't be pinged."""

    identity: bytes
    hello: plan_pb2.ToScheduler
    holder: int
    ping: int | None = None
    until_at: float = math.inf


class NameContests:
    """The open conflicts. Times in seconds on the link's clock."""

    def __init__(
        self,
        sessions: Mapping[int, Peer],
        ping: Callable[[Peer, float], None],
        drop: Callable[[int, str, Loss], None],
        send: Callable[[bytes, bytes], str],
    ) -> None:
        """Takes from the link its live sessions and its ping, drop and send functions."""
        self._sessions = sessions
        self._ping = ping
        self._drop = drop
        self._send = send
        self._waiting: dict[bytes, Newcomer] = {}

    @property
    def due_at(self) -> float:
        """When the next answer is overdue; infinity if none is awaited."""
        return min(newcomer.until_at for newcomer in self._waiting.values()) if self._waiting else math.inf

    def holds_up(self, identity: bytes, hello: plan_pb2.ToScheduler, now_s: float) -> bool:
        """Whether the newcomer must wait because another runner has its id. Drops a holder that can't be reached."""
        if identity in self._waiting:
            return True
        for holder in list(self._sessions.values()):
            if holder.runner_id != hello.hello.runner_id:
                continue
            if hello.session == holder.session:
                self._drop(holder.session, "it has reconnected", Loss.REPLACED)
                continue
            newcomer = Newcomer(identity, hello, holder.session)
            self._ask(newcomer, holder, now_s)
            if holder.session in self._sessions:
                self._waiting[identity] = newcomer
                return True
        return False

    def _ask(self, newcomer: Newcomer, holder: Peer, now_s: float) -> None:
        """Pings the holder, unless its session is not open yet or it is leaving."""
        if holder.welcome is not None and not holder.leaving:
            self._ping(holder, now_s)
            newcomer.ping, newcomer.until_at = holder.pings, now_s + ANSWER_S

    def answered(self, holder: Peer, ping: int) -> None:
        """Refuses the newcomers that waited for this ping: the holder has answered it."""
        for newcomer in list(self._waiting.values()):
            asked = newcomer.holder == holder.session and newcomer.ping is not None and ping >= newcomer.ping
            if asked and not holder.leaving:
                del self._waiting[newcomer.identity]
                self._refuse(newcomer)

    def _refuse(self, newcomer: Newcomer) -> None:
        name = newcomer.hello.hello.runner_id
        reason = f"another live runner has the id {name!r}: start this one with another --runner-id"
        log.error("a runner is refused", runner=name, reason=reason)
        rejection = plan_pb2.ToRunner(session=newcomer.holder, rejection=plan_pb2.Rejection(reason=reason))
        self._send(newcomer.identity, rejection.SerializeToString())  # a send error is ignored: the newcomer is gone

    def decided(self, now_s: float) -> list[Newcomer]:
        """Drops holders that did not answer in time; removes and returns the newcomers whose holder is gone.

        Pings holders that could not be pinged before.
        """
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
        """Restarts all timers."""
        for newcomer in self._waiting.values():
            if newcomer.ping is not None:
                newcomer.until_at = now_s + ANSWER_S
