"""All requests known to the engine: by handle, public id and sequence; finished ones for their retention time."""

from __future__ import annotations

import heapq
from collections import Counter, deque

from scheduler_svc.model.sequence import NOBODY, Request, Sequence


class RequestBook:
    """Finds requests, and returns those with due reminders."""

    def __init__(self, retention_s: float, retention_requests: int) -> None:
        self._retention_s = retention_s
        self._retention_requests = retention_requests
        self._by_handle: dict[int, Request] = {}
        self._by_key: dict[tuple[str, str], Request] = {}
        self._by_sequence: dict[int, Sequence] = {}
        self._retired: deque[tuple[float, Request]] = deque()
        self._due: list[tuple[float, int, Request]] = []
        self._serial = 0
        self._owners: Counter[bytes] = Counter()  # of live requests

    @property
    def num_live(self) -> int:
        """Number of requests that have not finished."""
        return self._owners.total()

    @property
    def sole_owner(self) -> bytes | None:
        """The worker that owns every live request; None if there are several, or no live request."""
        return next(iter(self._owners)) if len(self._owners) == 1 else None

    def add(self, request: Request) -> None:
        """Adds a new, live request with its sequences."""
        self._by_handle[request.handle] = request
        self._by_key[request.key] = request
        for sequence in request.sequences:
            self._by_sequence[sequence.id] = sequence
        self._owners[request.owner] += 1
        if request.deadline_s is not None:
            self.remind(request.deadline_s, request)

    def by_handle(self, handle: int) -> Request | None:
        """Returns the request with this handle of its worker."""
        return self._by_handle.get(handle)

    def by_key(self, tenant: str, request_id: str) -> Request | None:
        """Returns the tenant's request with this public id, live or retained."""
        return self._by_key.get((tenant, request_id))

    def sequence(self, sequence_id: int) -> Sequence | None:
        """Returns the sequence with this internal id."""
        return self._by_sequence.get(sequence_id)

    def live(self) -> list[Request]:
        """Returns the requests that have not finished."""
        return [request for request in self._by_handle.values() if not request.finished]

    def known(self) -> list[Request]:
        """Returns all requests, live and retained."""
        return list(self._by_handle.values())

    def rename(self, request: Request, handle: int, owner: bytes) -> None:
        """Moves the request to another worker, or to another stream of the same one."""
        del self._by_handle[request.handle]
        if not request.finished:
            self._disown(request)
            self._owners[owner] += 1
        request.handle, request.owner, request.gone_until_at = handle, owner, None
        self._by_handle[handle] = request

    def abandon(self, request: Request) -> None:
        """Clears the owner of a live request whose worker is gone."""
        self._disown(request)
        request.owner = NOBODY
        self._owners[NOBODY] += 1

    def _disown(self, request: Request) -> None:
        self._owners[request.owner] -= 1
        if not self._owners[request.owner]:
            del self._owners[request.owner]

    def retire(self, request: Request, now_s: float) -> None:
        """Keeps a finished request attachable for its retention time, unless its client left it.

        A client that lost its connection, and so its request, must send it again rather than find it cut short.
        """
        self._disown(request)
        if request.is_left or not self._retention_requests:
            self.forget(request)
            return
        self._retired.append((now_s, request))
        if len(self._retired) > self._retention_requests:
            self.forget(self._retired.popleft()[1])

    def expire(self, now_s: float) -> None:
        """Forgets finished requests whose retention time is over."""
        while self._retired and self._retired[0][0] + self._retention_s <= now_s:
            self.forget(self._retired.popleft()[1])

    def forget(self, request: Request) -> None:
        """Removes a finished request, so that its id may be used again. Idempotent."""
        self._by_handle.pop(request.handle, None)
        if self._by_key.get(request.key) is request:
            del self._by_key[request.key]
        for sequence in request.sequences:
            self._by_sequence.pop(sequence.id, None)
        request.drop_sequences()

    def remind(self, at_s: float, request: Request) -> None:
        """Makes `due` return the request once `at_s` has come."""
        self._serial += 1
        heapq.heappush(self._due, (at_s, self._serial, request))

    @property
    def next_due_at(self) -> float | None:
        """Time of the next reminder; drops those of finished requests."""
        while self._due and self._due[0][2].finished:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def due(self, now_s: float) -> list[Request]:
        """Returns live requests with due reminders, once per reminder."""
        found = []
        while self._due and self._due[0][0] <= now_s:
            request = heapq.heappop(self._due)[2]
            if not request.finished:
                found.append(request)
        return found
