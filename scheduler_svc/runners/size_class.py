"""Runners that hold sequences of the same length, found by load without looking at all of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class SizeClass:
    """The runners that hold `most_tokens` of one sequence, in a heap that is corrected lazily."""

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.members: set[int] = set()
        """Their sessions."""
        self.loads: dict[int, float] = {}
        """Of those whose load was noted."""
        self._by_load: list[tuple[float, int]] = []  # entries whose load has changed are void

    def note(self, session: int, load: float) -> None:
        """The runner's load is this now."""
        if self.loads.get(session) == load:
            return
        self.loads[session] = load
        heapq.heappush(self._by_load, (load, session))
        if len(self._by_load) > 64 + 4 * len(self.loads):
            self._by_load = [(load, session) for session, load in self.loads.items()]
            heapq.heapify(self._by_load)

    def remove(self, session: int) -> None:
        """The runner is gone."""
        self.members.discard(session)
        self.loads.pop(session, None)

    def least_loaded(self, has_room: Callable[[int], bool], most_asked: int) -> int | None:
        """The least loaded runner that has room, among the first `most_asked`; None if none of them has."""
        asked: list[tuple[float, int]] = []
        found = None
        while self._by_load and found is None and len(asked) < most_asked:
            load, session = self._by_load[0]
            if self.loads.get(session) != load:
                heapq.heappop(self._by_load)
                continue
            if has_room(session):
                found = session
                break
            asked.append(heapq.heappop(self._by_load))
        for entry in asked:
            heapq.heappush(self._by_load, entry)
        return found
