"""Requests that nobody listens to, and requests whose time is up.

A client that cuts its stream has its request cancelled, or kept for its `keep_ms`. One whose stream was cut by a death
in the service is not to blame: its request is kept for at least `attach_s`. Who does not come back is cancelled.
"""

from __future__ import annotations

from scheduler_svc.model.sequence import End, FinishReason, Request
from scheduler_svc.requests.requests import Requests


class DisconnectedRequests:
    """Keeps, cancels and expires requests of one engine."""

    def __init__(self, requests: Requests, attach_s: float) -> None:
        self._requests = requests
        self._attach_s = attach_s

    def disconnect(self, request: Request) -> None:
        """The client's stream is gone."""
        if request.finished:
            return
        if not request.keep_s:
            self._leave(request)
        else:
            self._keep(request, request.keep_s)

    def detach(self, request: Request) -> None:
        """What carried the client's stream is gone: a front worker, or the scheduler before this one."""
        self._keep(request, max(request.keep_s, self._attach_s))

    def _keep(self, request: Request, for_s: float) -> None:
        request.gone_until_at = self._requests.ledger.now_s + for_s
        self._requests.book.remind(request.gone_until_at, request)

    def _leave(self, request: Request) -> None:
        request.is_left = True
        self._requests.finish_request(request, End(FinishReason.CANCELLED))

    def expire(self) -> None:
        """Ends the requests whose time is up; forgets finished ones after their retention time."""
        now_s = self._requests.ledger.now_s
        for request in self._requests.book.due(now_s):
            if request.deadline_s is not None and request.deadline_s <= now_s:
                self._requests.finish_request(request, End(FinishReason.DEADLINE))
            elif request.gone_until_at is not None and request.gone_until_at <= now_s:
                self._leave(request)
        self._requests.book.expire(now_s)
