"""Which runner a waiting sequence goes to, where there are several.

Sequences leave the shared queue in its order, as long as some runner has room, and wait in that runner's own short
queue for its next plan. The choice is between two: the least loaded runner (by the prompt positions that it has yet to
compute, and by its slots), and the one where the prefix of this prompt was placed last; the latter if the positions
that it spares outweigh its load. Both are found without looking at all runners: by a heap that is corrected lazily, and
by a bounded map from names of prefixes to runners.

What a plan could not seat goes back to the shared queue, so nothing is stuck behind a runner that turned out to be
full, and nothing has to be undone when a runner leaves. With a single runner the shared queue is its own.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable

from scheduler_svc.scheduler import Scheduler
from scheduler_svc.sequence import Sequence
from scheduler_svc.waiting.tenant_queues import Queue
from scheduler_svc.waiting.waiting_queue import WaitingQueue

CANDIDATES = 4
"""Least loaded runners that are asked for room; if none of them has any, the sequence waits."""
KNOWN_PREFIXES = 1 << 16
"""Names of prefixes whose runner is remembered."""


class PlacedQueue(WaitingQueue):
    """The sequences that are to go to one runner. Whoever is preempted there goes back to the shared queue."""

    def __init__(self, shared: Callable[[], Queue]) -> None:
        super().__init__()
        self._shared = shared

    def __len__(self) -> int:
        """All that wait, here and in the shared queue: what a policy sees."""
        return super().__len__() + len(self._shared())

    def __bool__(self) -> bool:
        return self.num_placed > 0

    @property
    def num_placed(self) -> int:
        """Sequences that wait here."""
        return super().__len__()

    @property
    def num_tokens(self) -> int:
        """Tokens of all that wait, here and in the shared queue."""
        return self._tokens + self._shared().num_tokens

    @property
    def placed_tokens(self) -> int:
        """Tokens of the sequences that wait here."""
        return self._tokens

    def push(self, sequence: Sequence) -> None:
        """See the class."""
        self._shared().push(sequence)

    def place(self, sequence: Sequence) -> None:
        """Adds a sequence that is to go to the runner."""
        super().push(sequence)


class Placement:
    """The runners' own queues. `shared` is the engine's queue at the moment: a policy swap makes a new one."""

    def __init__(self, shared: Callable[[], Queue], wake: Callable[[int], None]) -> None:
        """`wake` is told each runner that somebody waits for."""
        self._shared = shared
        self._wake = wake
        self._schedulers: dict[int, Scheduler] = {}
        self._queues: dict[int, PlacedQueue] = {}
        self._loads: dict[int, float] = {}
        self._by_load: list[tuple[float, int]] = []  # a heap; entries whose load has changed are void
        self._home: OrderedDict[bytes, int] = OrderedDict()  # name of a prefix -> where it was placed last
        self._closed: set[int] = set()

    # ------------------------------------------------------------------ runners

    def join(self, session: int, scheduler: Scheduler) -> None:
        """A runner is there."""
        if len(self._schedulers) == 1:  # its queue was the shared one: who stepped aside there for it comes back
            next(iter(self._schedulers.values())).prefix.dissolve()
        self._schedulers[session] = scheduler
        self._queues[session] = PlacedQueue(self._shared)
        for other in self._schedulers if len(self._schedulers) == 2 else (session,):
            self.touch(other)

    def leave(self, session: int) -> None:
        """A runner is gone: who waited for it waits for any."""
        self._closed.discard(session)
        if self._schedulers.pop(session, None) is None:
            return
        self._loads.pop(session, None)
        self._recall(self._queues.pop(session))
        if len(self._schedulers) == 1:
            self.recall_all()

    def touch(self, session: int) -> None:
        """The runner's load may have changed."""
        if len(self._schedulers) == 1:  # there is nothing to choose
            return
        scheduler = self._schedulers.get(session)
        if scheduler is None:
            return
        load = _load(scheduler, self._queues[session])
        if self._loads.get(session) != load:
            self._loads[session] = load
            heapq.heappush(self._by_load, (load, session))
            if len(self._by_load) > 64 + 4 * len(self._loads):
                self._by_load = [(load, session) for session, load in self._loads.items()]
                heapq.heapify(self._by_load)

    def close(self, session: int) -> None:
        """The runner gets nothing from here, until `open`."""
        self._closed.add(session)
        if self._queues[session]:
            self._schedulers[session].prefix.dissolve()
            self._recall(self._queues[session])

    def open(self, session: int) -> None:
        """The runner is like any other again."""
        self._closed.discard(session)

    @property
    def num_placed(self) -> int:
        """Sequences that wait in a runner's own queue."""
        return sum(queue.num_placed for queue in self._queues.values())

    @property
    def placed_tokens(self) -> int:
        """Tokens of those."""
        return sum(queue.placed_tokens for queue in self._queues.values())

    # ------------------------------------------------------------------ queues

    def queue_for(self, session: int) -> Queue:
        """Where the runner's next plan takes sequences from."""
        if len(self._schedulers) == 1 and session not in self._closed:
            return self._shared()
        return self._queues[session]

    def settle(self, session: int) -> None:
        """The runner has planned: who it did not take is placed anew, unless he waits for a block of this runner."""
        if len(self._schedulers) == 1 and session not in self._closed:  # it has taken from the shared queue itself
            return
        queue = self._queues[session]
        while queue and (sequence := queue.peek()) is not None:
            queue.discard(sequence)
            self._shared().push(sequence)
        self.touch(session)

    def discard(self, sequence: Sequence) -> None:
        """A waiting sequence has ended."""
        for queue in self._queues.values() if len(self._schedulers) > 1 else ():
            queue.discard(sequence)

    def recall_all(self) -> None:
        """Everybody who is placed waits in the shared queue again."""
        for session, queue in self._queues.items():
            if queue:
                self._schedulers[session].prefix.dissolve()
                self._recall(queue)

    def _recall(self, queue: PlacedQueue) -> None:
        for sequence in list(queue):
            queue.discard(sequence)
            self._shared().push(sequence)

    # ------------------------------------------------------------------ choosing

    def place(self) -> None:
        """Gives the first of the shared queue to runners, as far as they have room."""
        shared = self._shared()
        if len(self._schedulers) < 2:
            if shared:
                for only in self._schedulers:
                    self._wake(only)
            return
        while (sequence := shared.peek()) is not None and not sequence.stale:
            session = self._choose(sequence)
            if session is None:
                return
            shared.discard(sequence)
            self._queues[session].place(sequence)
            self.touch(session)
            self._wake(session)

    def _choose(self, sequence: Sequence) -> int | None:
        least = self._least_loaded(sequence)
        if least is None:
            return None
        names = self._schedulers[least].prefix.prompt_names(sequence)
        landmarks = _landmarks(names)
        home = next((self._home[name] for name in reversed(landmarks) if name in self._home), least)
        chosen = home if home != least and self._is_worth(home, least, sequence) else least
        for name in landmarks:
            self._home[name] = chosen
            self._home.move_to_end(name)
        while len(self._home) > KNOWN_PREFIXES:
            self._home.popitem(last=False)
        return chosen

    def _is_worth(self, home: int, least: int, sequence: Sequence) -> bool:
        """Does the prefix at `home` spare more positions than its load costs? A full runner costs a whole step more."""
        if home not in self._schedulers or not self._has_room(home, sequence):
            return False
        scheduler = self._schedulers[home]
        size = scheduler.pool.block_size
        spared = size * (len(scheduler.prefix.match(sequence).blocks) - self._hit(least, sequence))
        return spared > (self._loads[home] - self._loads[least]) * scheduler.hello.max_step_tokens

    def _hit(self, session: int, sequence: Sequence) -> int:
        return len(self._schedulers[session].prefix.match(sequence).blocks)

    def _least_loaded(self, sequence: Sequence) -> int | None:
        """The least loaded runner that has room, among the first few."""
        looked_at: list[tuple[float, int]] = []
        found = None
        while self._by_load and found is None and len(looked_at) < CANDIDATES + len(self._closed):
            load, session = self._by_load[0]
            if self._loads.get(session) != load:
                heapq.heappop(self._by_load)
                continue
            if self._has_room(session, sequence):
                found = session
                break
            looked_at.append(heapq.heappop(self._by_load))
        for entry in looked_at:
            heapq.heappush(self._by_load, entry)
        return found

    def _has_room(self, session: int, sequence: Sequence) -> bool:
        if session in self._closed:
            return False
        scheduler, queue = self._schedulers[session], self._queues[session]
        pool = scheduler.pool
        needed = pool.blocks_for(len(sequence.tokens)) + pool.blocks_for(queue.placed_tokens) + queue.num_placed
        return (
            not scheduler.leaving
            and len(scheduler.table.free) > queue.num_placed
            and (needed <= pool.num_free or not (scheduler.table.num_running or queue))
        )


def _load(scheduler: Scheduler, queue: PlacedQueue) -> float:
    """Full steps that a prompt waits for if it goes there now; a runner whose slots are all taken counts as one more.

    By slots alone a runner with long prompts before it would seem free, and one beside it have nothing to compute.
    """
    table = scheduler.table
    slots = (table.num_running + queue.num_placed) / table.num_slots
    return slots + (table.backlog + queue.placed_tokens) / scheduler.hello.max_step_tokens


def _landmarks(names: list[bytes]) -> list[bytes]:
    """Names of the prefixes of 1, 2, 4, 8, ... blocks, and of the longest."""
    chosen = [names[(1 << power) - 1] for power in range(len(names).bit_length())]
    return chosen if not names or chosen[-1] is names[-1] else [*chosen, names[-1]]
