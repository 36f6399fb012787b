"""Requests without a client stream, and requests past their deadline.

If a client closes its stream, its request is cancelled, or kept for the request's `keep_ms`. If the stream broke
because a process of the service died, the request is kept for at least `attach_s`. It is cancelled unless its client
attaches within that time.
"""

from __future__ import annotations

from scheduler_svc.model.sequence import End, FinishReason, Request
from scheduler_svc.requests.requests import Requests


class DisconnectedRequests:
    """Keeps, cancels and expires the requests of one engine."""

    def __init__(self, requests: Requests, attach_s: float) -> None:
        self._requests = requests
        self._attach_s = attach_s

    def disconnect(self, request: Request) -> None:
        """Cancels a request whose client closed its stream, or keeps it for its `keep_ms`."""
        if request.finished:
            return
        if not request.keep_s:
            self._leave(request)
        else:
            self._keep(request, request.keep_s)

    def detach(self, request: Request) -> None:
        """Keeps a request whose stream broke inside the service: a front worker or the former scheduler died."""
        self._keep(request, max(request.keep_s, self._attach_s))

    def _keep(self, request: Request, for_s: float) -> None:
        request.gone_until_at = self._requests.ledger.now_s + for_s
        self._requests.book.remind(request.gone_until_at, request)

    def _leave(self, request: Request) -> None:
        request.is_left = True
        self._requests.finish_request(request, End(FinishReason.CANCELLED))

    def expire(self) -> None:
        """Ends the requests whose time is up, and drops finished ones after their retention time."""
        now_s = self._requests.ledger.now_s
        for request in self._requests.book.due(now_s):
            if request.deadline_s is not None and request.deadline_s <= now_s:
                self._requests.finish_request(request, End(FinishReason.DEADLINE))
            elif request.gone_until_at is not None and request.gone_until_at <= now_s:
                self._leave(request)
        self._requests.book.expire(now_s)
