"""Which runner a waiting sequence goes to, where there are several.

Sequences leave the shared queue in its order, as long as some runner has room, and wait in that runner's own short
queue for its next plan. The choice is between two: the least loaded runner (by the prompt positions that it has yet to
compute, and by its slots), and the one where the prefix of this prompt was placed last; the latter if the positions
that it spares outweigh its load. Both are found without looking at all runners: by a heap that is corrected lazily, and
by a bounded map from names of prefixes to runners.

Runners may differ in size: those that hold equally long sequences are a class, and a sequence goes to runners that can
hold it to its end. One that finds all of those busy keeps its rank, and keeps them for itself: those behind it get
smaller runners only, so that it is never passed for a place that it could have had. One that no open runner can hold
steps aside until one comes, for a bounded time (`Misfits`).

What a plan could not seat goes back to the shared queue, so nothing is stuck behind a runner that turned out to be
full, and nothing has to be undone when a runner leaves. With a single runner the shared queue is its own.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator

from scheduler_svc.model.ledger import Ledger
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.queue.overtaken import Overtaken
from scheduler_svc.queue.placed_queue import PlacedQueue
from scheduler_svc.queue.tenant_queues import Queue
from scheduler_svc.runners.misfits import Misfits
from scheduler_svc.runners.runner_pool import NEARLY
from scheduler_svc.runners.size_class import SizeClass
from scheduler_svc.scheduler.scheduler import Scheduler

CANDIDATES = 4
"""Least loaded runners of a class that are asked for room; if none of them has any, the sequence waits."""
KNOWN_PREFIXES = 1 << 16
"""Names of prefixes whose runner is remembered."""


class Placement:
    """The runners' own queues. `shared` is the engine's queue at the moment: a policy swap makes a new one."""

    def __init__(
        self, shared: Callable[[], Queue], wake: Callable[[int], None], misfits: Misfits | None = None
    ) -> None:
        """`wake` is told each runner that somebody waits for."""
        self._shared = shared
        self._wake = wake
        self._schedulers: dict[int, Scheduler] = {}
        self._queues: dict[int, PlacedQueue] = {}
        self._classes: list[SizeClass] = []  # the smallest first
        self._class_of: dict[int, SizeClass] = {}
        self._home: OrderedDict[bytes, int] = OrderedDict()  # name of a prefix -> where it was placed last
        self._closed: set[int] = set()
        self._overtaken = Overtaken()
        self.misfits = Misfits(shared, Ledger(), math.inf) if misfits is None else misfits

    # ------------------------------------------------------------------ runners

    def join(self, session: int, scheduler: Scheduler) -> None:
        """A runner is there."""
        if len(self._schedulers) == 1:  # its queue was the shared one: who stepped aside there for it comes back
            next(iter(self._schedulers.values())).prefix.clear()
        self._schedulers[session] = scheduler
        self._queues[session] = PlacedQueue(self._shared)
        self._overtaken.recall(self._shared())
        self._classify(session, scheduler.most_tokens)
        self.misfits.recall(scheduler.most_tokens)
        for other in self._schedulers if len(self._schedulers) == 2 else (session,):
            self.touch(other)

    def _classify(self, session: int, most_tokens: int) -> None:
        found = next((each for each in self._classes if each.most_tokens == most_tokens), None)
        if found is None:
            found = SizeClass(most_tokens)
            insort(self._classes, found, key=_size)
        found.members.add(session)
        self._class_of[session] = found

    def leave(self, session: int) -> None:
        """A runner is gone: who waited for it waits for any."""
        self._closed.discard(session)
        if self._schedulers.pop(session, None) is None:
            return
        self._overtaken.recall(self._shared())
        its_class = self._class_of.pop(session)
        its_class.remove(session)
        if not its_class.members:
            self._classes.remove(its_class)
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
        self._class_of[session].note(session, _load(scheduler, self._queues[session]))

    def close(self, session: int) -> None:
        """The runner gets nothing from here, until `open`."""
        self._closed.add(session)
        if self._queues[session]:
            self._schedulers[session].prefix.clear()
            self._recall(self._queues[session])

    def open(self, session: int) -> None:
        """The runner is like any other again."""
        self._closed.discard(session)
        if session in self._schedulers:
            self.misfits.recall(self._schedulers[session].most_tokens)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait in a runner's own queue."""
        return sum(queue.num_waiting for queue in self._queues.values())

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

    def give_back(self, session: int) -> None:
        """The runner has planned: who it did not take is placed anew, unless he waits for a block of this runner."""
        if len(self._schedulers) == 1 and session not in self._closed:  # it has taken from the shared queue itself
            misfits = self._schedulers[session].admission.misfits
            for misfit in misfits:
                self._strand(misfit)
            misfits.clear()
            return
        queue = self._queues[session]
        while queue and (sequence := queue.peek()) is not None:
            queue.discard(sequence)
            self._shared().push(sequence)
        self.touch(session)

    def discard(self, sequence: Sequence) -> None:
        """A waiting sequence has ended."""
        self.misfits.discard(sequence)
        self._overtaken.discard(sequence)
        for queue in self._queues.values() if len(self._schedulers) > 1 else ():
            queue.discard(sequence)

    def recall_all(self) -> None:
        """All that wait, here or aside, wait in the shared queue's order again."""
        self._overtaken.recall(self._shared())
        self.misfits.recall(math.inf)
        for session, queue in self._queues.items():
            if queue:
                self._schedulers[session].prefix.clear()
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
        end = len(self._classes)  # runners of the classes from here on are kept for sequences that go first
        while end and (sequence := self._overtaken.first(shared, end)) is not None:
            index = self._class_index(sequence.limit)
            session = None if sequence.stale else self._choose(sequence, self._classes[index:end])
            if session is not None:
                self._overtaken.discard(sequence)
                shared.discard(sequence)
                self._queues[session].place(sequence)
                self.touch(session)
                self._wake(session)
            elif not self.can_hold(sequence.limit):
                self._overtaken.discard(sequence)
                self._strand(sequence)
            else:
                end = min(end, index)
                if end:
                    self._overtaken.add(sequence, index, shared)

    def takes_now(self, sequence: Sequence) -> bool:
        """Would a new sequence be placed at once, past all that wait for other runners than it would get?"""
        if self._shared().peek() is not None:
            return False
        end = min(len(self._classes), self._overtaken.lowest)
        return any(
            self._has_room(session, sequence)
            for each in self._classes[self._class_index(sequence.limit) : int(end)]
            for session in each.members
        )

    def _class_index(self, num_tokens: int) -> int:
        """Index of the first class that holds so many tokens of a sequence."""
        return bisect_left(self._classes, num_tokens, key=_size)

    def _choose(self, sequence: Sequence, classes: list[SizeClass]) -> int | None:
        """A runner of one of these classes; None where none has room."""
        least = self._least_loaded(sequence, classes)
        if least is None:
            return None
        names = self._schedulers[least].prefix.prompt_names(sequence)
        landmarks = _landmarks(names)
        home = next((self._home[name] for name in reversed(landmarks) if name in self._home), least)
        is_better = home != least and self._class_of.get(home) in classes and self._is_worth(home, least, sequence)
        chosen = home if is_better else least
        for name in landmarks:
            self._home[name] = chosen
            self._home.move_to_end(name)
        while len(self._home) > KNOWN_PREFIXES:
            self._home.popitem(last=False)
        return chosen

    def _is_worth(self, home: int, least: int, sequence: Sequence) -> bool:
        """Does the prefix at `home` spare more positions than its load costs? A full runner costs a whole step more."""
        if not self._has_room(home, sequence):
            return False
        scheduler = self._schedulers[home]
        size = scheduler.pool.block_size
        spared = size * (len(scheduler.prefix.match(sequence).blocks) - self._hit(least, sequence))
        return spared > (self._load_of(home) - self._load_of(least)) * scheduler.hello.max_step_tokens

    def _load_of(self, session: int) -> float:
        return self._class_of[session].loads[session]

    def _hit(self, session: int, sequence: Sequence) -> int:
        return len(self._schedulers[session].prefix.match(sequence).blocks)

    def _least_loaded(self, sequence: Sequence, classes: list[SizeClass]) -> int | None:
        """The least loaded runner that has room; of equally loaded ones the smallest."""
        most_asked = CANDIDATES + len(self._closed)
        found = [each.least_loaded(lambda session: self._has_room(session, sequence), most_asked) for each in classes]
        return min((session for session in found if session is not None), key=self._load_of, default=None)

    def _has_room(self, session: int, sequence: Sequence) -> bool:
        if session in self._closed:
            return False
        scheduler, queue = self._schedulers[session], self._queues[session]
        pool = scheduler.pool
        needed = pool.blocks_for(len(sequence.tokens)) + pool.blocks_for(queue.placed_tokens) + queue.num_waiting
        return not scheduler.leaving and len(scheduler.table.free) > queue.num_waiting and needed <= pool.num_free

    # ------------------------------------------------------------------ too long for all that are there

    def can_hold(self, num_tokens: int) -> bool:
        """Does some runner that is neither leaving nor closed hold so many tokens of one sequence?"""
        return any(True for _ in self.holders(num_tokens))

    def holders(self, num_tokens: int) -> Iterator[Scheduler]:
        """Runners that are neither leaving nor closed, and hold so many tokens of one sequence."""
        for each in self._classes[self._class_index(num_tokens) :]:
            for session in each.members:
                if session not in self._closed and not self._schedulers[session].leaving:
                    yield self._schedulers[session]

    def _strand(self, sequence: Sequence) -> None:
        """No open runner holds the sequence, a member of the shared queue: it steps aside, if it can't be shortened."""
        self.misfits.add(sequence)
        if self.shorten(sequence, NEARLY):
            self.misfits.recall(sequence.limit)

    def shorten(self, sequence: Sequence, least: float = 0.0) -> bool:
        """Makes an open-ended sequence as long as the largest open runner holds, if that is `least` of its length at
        least, and leaves room for a token."""
        sizes = [each.most_tokens for each in self._classes if self.can_hold(each.most_tokens)]
        most = max(sizes, default=0)
        if not sequence.request.open_ended or most < least * sequence.limit or most <= len(sequence.tokens):
            return False
        sequence.limit = min(sequence.limit, most)
        return True

    def given_up(self, tried: int | None = None) -> list[Sequence]:
        """Sequences that have waited long enough for a runner that can hold them. As long as such a one computes,
        though it is closed or leaving, or is the one that an isolated group has (`tried`, a session), they wait on;
        those that are open-ended make do with what is there."""
        over = self.misfits.due()
        if not over:
            return over
        runners = self._schedulers.items()
        busy = max((s.most_tokens for session, s in runners if s.table.num_running or session == tried), default=0)
        lost = []
        for sequence in over:
            if self.can_hold(sequence.limit):
                continue
            if self.shorten(sequence):
                self.misfits.recall(sequence.limit)
            elif sequence.limit <= busy:
                self.misfits.begin(sequence)
            else:
                lost.append(sequence)
        return lost


def _size(each: SizeClass) -> int:
    return each.most_tokens


def _load(scheduler: Scheduler, queue: PlacedQueue) -> float:
    """Full steps that a prompt waits for if it goes there now; a runner whose slots are all taken counts as one more.

    By slots alone a runner with long prompts before it would seem free, and one beside it have nothing to compute.
    """
    table = scheduler.table
    slots = (table.num_running + queue.num_waiting) / table.num_slots
    return slots + (table.backlog + queue.placed_tokens) / scheduler.hello.max_step_tokens


def _landmarks(names: list[bytes]) -> list[bytes]:
    """Names of the prefixes of 1, 2, 4, 8, ... blocks, and of the longest."""
    chosen = [names[(1 << power) - 1] for power in range(len(names).bit_length())]
    return chosen if not names or chosen[-1] is names[-1] else [*chosen, names[-1]]
