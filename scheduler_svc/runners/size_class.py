"""Runners with the same maximum sequence length, ordered by load in a heap, so that no scan of all is needed."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class SizeClass:
    """The runners that can hold sequences of `most_tokens` tokens, in a lazily corrected heap."""

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.members: set[int] = set()
        """Sessions of the runners."""
        self.loads: dict[int, float] = {}
        """Last noted load by session, in full steps."""
        self._by_load: list[tuple[float, int]] = []  # heap; entries with an outdated load are skipped

    def note(self, session: int, load: float) -> None:
        """Sets the runner's load."""
        if self.loads.get(session) == load:
            return
        self.loads[session] = load
        heapq.heappush(self._by_load, (load, session))
        if len(self._by_load) > 64 + 4 * len(self.loads):
            self._by_load = [(load, session) for session, load in self.loads.items()]
            heapq.heapify(self._by_load)

    def remove(self, session: int) -> None:
        """Removes a runner."""
        self.members.discard(session)
        self.loads.pop(session, None)

    def least_loaded(self, has_room: Callable[[int], bool], most_asked: int) -> int | None:
        """Returns the least loaded runner with room among the `most_asked` least loaded; None if none has any."""
        asked: dict[int, float] = {}
        found = None
        while self._by_load and len(asked) < most_asked:
            load, session = self._by_load[0]
            if self.loads.get(session) == load and session not in asked:  # a load that comes back has two entries
                if has_room(session):
                    found = session
                    break
                asked[session] = load
            heapq.heappop(self._by_load)
        for session, load in asked.items():
            heapq.heappush(self._by_load, (load, session))
        return found
