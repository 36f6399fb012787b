"""All requests that the engine knows: by handle, by public id, by sequence; finished ones for their retention time."""

from __future__ import annotations

import heapq
from collections import Counter, deque

from scheduler_svc.model.sequence import NOBODY, Request, Sequence


class RequestBook:
    """Finds requests, and says when something about them is due."""

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
        """Requests that have not finished."""
        return self._owners.total()

    @property
    def sole_owner(self) -> bytes | None:
        """The worker that owns every live request; None if they are of several, or there is none."""
        return next(iter(self._owners)) if len(self._owners) == 1 else None

    def add(self, request: Request) -> None:
        """A new, live request whose sequences are set."""
        self._by_handle[request.handle] = request
        self._by_key[request.key] = request
        for sequence in request.sequences:
            self._by_sequence[sequence.id] = sequence
        self._owners[request.owner] += 1
        if request.deadline_s is not None:
            self.remind(request.deadline_s, request)

    def by_handle(self, handle: int) -> Request | None:
        """The request that a worker named so."""
        return self._by_handle.get(handle)

    def by_key(self, tenant: str, request_id: str) -> Request | None:
        """The tenant's request of this public id, live or retained."""
        return self._by_key.get((tenant, request_id))

    def sequence(self, sequence_id: int) -> Sequence | None:
        """The sequence of this internal id."""
        return self._by_sequence.get(sequence_id)

    def live(self) -> list[Request]:
        """Requests that have not finished."""
        return [request for request in self._by_handle.values() if not request.finished]

    def known(self) -> list[Request]:
        """All requests, live and retained."""
        return list(self._by_handle.values())

    def rename(self, request: Request, handle: int, owner: bytes) -> None:
        """The request now belongs to another worker, or another stream of the same one."""
        del self._by_handle[request.handle]
        if not request.finished:
            self._disown(request)
            self._owners[owner] += 1
        request.handle, request.owner, request.gone_until_at = handle, owner, None
        self._by_handle[handle] = request

    def abandon(self, request: Request) -> None:
        """The worker that a live request belongs to is gone."""
        self._disown(request)
        request.owner = NOBODY
        self._owners[NOBODY] += 1

    def _disown(self, request: Request) -> None:
        self._owners[request.owner] -= 1
        if not self._owners[request.owner]:
            del self._owners[request.owner]

    def retire(self, request: Request, now_s: float) -> None:
        """The request has finished: kept attachable for a time, unless it was left.

        A client that lost its connection, and so its request, must not find it cut short when it comes back, but send
        it again.
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
        """Nobody finds a finished request any more; its id may be used again. Harmless when repeated."""
        self._by_handle.pop(request.handle, None)
        if self._by_key.get(request.key) is request:
            del self._by_key[request.key]
        for sequence in request.sequences:
            self._by_sequence.pop(sequence.id, None)
        request.drop_sequences()

    def remind(self, at_s: float, request: Request) -> None:
        """`due` returns the request once `at_s` has come."""
        self._serial += 1
        heapq.heappush(self._due, (at_s, self._serial, request))

    @property
    def next_due_at(self) -> float | None:
        """When the next reminder falls due; those of requests that have finished are dropped on the way."""
        while self._due and self._due[0][2].finished:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def due(self, now_s: float) -> list[Request]:
        """Live requests whose reminders have come, each reminder once."""
        found = []
        while self._due and self._due[0][0] <= now_s:
            request = heapq.heappop(self._due)[2]
            if not request.finished:
                found.append(request)
        return found
