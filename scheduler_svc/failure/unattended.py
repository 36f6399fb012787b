"""Requests that nobody listens to, and requests whose time is up.

A client that cuts its stream has its request cancelled, or kept for its `keep_ms`. One whose stream was cut by a death
in the service is not to blame: its request is kept for at least `attach_s`. Who does not come back is cancelled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_svc.sequence import End, FinishReason, Request

if TYPE_CHECKING:
    from scheduler_svc.engine import Engine


class Unattended:
    """Keeps, cancels and expires requests of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def cut(self, request: Request) -> None:
        """The client's stream is gone."""
        if request.finished:
            return
        if not request.keep_s:
            self._leave(request)
        else:
            self._keep(request, request.keep_s)

    def orphan(self, request: Request) -> None:
        """What carried the client's stream is gone: a front worker, or the scheduler before this one."""
        self._keep(request, max(request.keep_s, self._engine.settings.attach_s))

    def _keep(self, request: Request, for_s: float) -> None:
        request.gone_until_s = self._engine.ledger.now_s + for_s
        self._engine.book.remind(request.gone_until_s, request)

    def _leave(self, request: Request) -> None:
        request.is_left = True
        self._engine.finish_request(request, End(FinishReason.CANCELLED))

    def expire(self) -> None:
        """Ends the requests whose time is up; forgets finished ones after their retention time."""
        engine, now_s = self._engine, self._engine.ledger.now_s
        for request in engine.book.due(now_s):
            if request.deadline_s is not None and request.deadline_s <= now_s:
                engine.finish_request(request, End(FinishReason.DEADLINE))
            elif request.gone_until_s is not None and request.gone_until_s <= now_s:
                self._leave(request)
        engine.book.expire(now_s)
        for sequence in engine.placement.given_up(engine.quarantine.session):
            tokens = f"that holds its {sequence.limit} tokens (prompt and max_tokens)"
            ill = engine.pool.expects(sequence.limit)
            message = f"the runner {tokens} loses every plan" if ill else f"no runner came in time {tokens}"
            engine.finish(sequence, End(FinishReason.UNAVAILABLE, message=message))
        alone_since_s = engine.attendance.alone_since_s
        if alone_since_s is not None and now_s - alone_since_s > engine.settings.no_runner_s:
            none = "the runners that are there lose every plan" if engine.probation.active else "no runner came in time"
            engine.finish_all(End(FinishReason.UNAVAILABLE, message=none))
