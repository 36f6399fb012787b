"""Placement: chooses the runner of each waiting sequence if there are several.

Sequences leave the shared queue in its order while a runner has room, and wait in that runner's own short queue for
its next plan. There are two candidates: the least loaded runner (by its uncomputed prompt positions and its used
slots), and the one where a prefix of this prompt was placed last. The latter is chosen if the positions that the
prefix saves outweigh its load. Neither needs a scan of all runners: one comes from a lazily corrected heap, the other
from a bounded map from prefix names to runners.

Runners may differ in size. Those with the same maximum sequence length are a class, and a sequence goes only to runners
that can hold its maximum length. If all of those are busy, the sequence keeps its rank and reserves them: sequences
behind it get smaller runners only, so none takes a slot that it could have had. A sequence that no open runner can hold
is parked until one joins, for a bounded time (`Misfits`).

Sequences that a plan could not admit return to the shared queue. So none is stuck behind a runner that turned out to be
full, and nothing has to be undone when a runner leaves. A single runner takes sequences from the shared queue directly.
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
"""Number of least loaded runners of a class that are checked for room; if none has any, the sequence waits."""
KNOWN_PREFIXES = 1 << 16
"""Maximum number of prefix names in the map to runners."""


class Placement:
    """The runners' own queues, and the choice between them."""

    def __init__(
        self, shared: Callable[[], Queue], wake: Callable[[int], None], misfits: Misfits | None = None
    ) -> None:
        """`shared` returns the engine's present queue, which a policy swap replaces.

        `wake` is called with the session of each runner for which a sequence waits.
        """
        self._shared = shared
        self._wake = wake
        self._schedulers: dict[int, Scheduler] = {}
        self._queues: dict[int, PlacedQueue] = {}
        self._classes: list[SizeClass] = []  # the smallest first
        self._class_of: dict[int, SizeClass] = {}
        self._home: OrderedDict[bytes, int] = OrderedDict()  # prefix name -> session where it was placed last
        self._closed: set[int] = set()
        self._decoders: set[int] = set()  # runners that are only for decoding
        self._overtaken = Overtaken()
        self._passed_over: int | None = None
        """The runner that has the prefix of the sequence chosen for last, if another one was chosen."""
        self.fetch: Callable[[Sequence, int | None, int], bool] = lambda sequence, donor, target: False
        """Takes a sequence if its prefix, which the runner `donor` has, is first copied to the runner `target`."""
        self.misfits = Misfits(shared, Ledger(), math.inf) if misfits is None else misfits

    # ------------------------------------------------------------------ runners

    def join(self, session: int, scheduler: Scheduler) -> None:
        """Adds a runner."""
        if len(self._schedulers) == 1:  # its queue was the shared one: sequences parked there for its prefixes return
            next(iter(self._schedulers.values())).prefix.clear()
        self._schedulers[session] = scheduler
        if scheduler.hello.role == "decode":
            self._decoders.add(session)
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
        """Removes a runner; the sequences in its queue return to the shared queue."""
        self._closed.discard(session)
        self._decoders.discard(session)
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
        """Updates the runner's load."""
        if len(self._schedulers) == 1:  # there is no choice to make
            return
        scheduler = self._schedulers.get(session)
        if scheduler is None:
            return
        self._class_of[session].note(session, _load(scheduler, self._queues[session]))

    def close(self, session: int) -> None:
        """Stops placement on the runner until `open`; the sequences in its queue return to the shared queue."""
        self._closed.add(session)
        if self._queues[session]:
            self._schedulers[session].prefix.clear()
            self._recall(self._queues[session])

    def open(self, session: int) -> None:
        """Resumes placement on the runner after `close`."""
        self._closed.discard(session)
        if session in self._schedulers:
            self.misfits.recall(self._schedulers[session].most_tokens)

    def is_open(self, session: int) -> bool:
        """Whether sequences may be placed on the runner."""
        return session in self._schedulers and session not in self._closed and not self._schedulers[session].leaving

    @property
    def num_waiting(self) -> int:
        """Number of sequences in the runners' own queues."""
        return sum(queue.num_waiting for queue in self._queues.values())

    @property
    def placed_tokens(self) -> int:
        """Number of tokens of the sequences in the runners' own queues."""
        return sum(queue.placed_tokens for queue in self._queues.values())

    # ------------------------------------------------------------------ queues

    def queue_for(self, session: int) -> Queue:
        """Returns the queue from which the runner's next plan takes sequences."""
        if len(self._schedulers) == 1 and session not in self._closed:
            return self._shared()
        return self._queues[session]

    def give_back(self, session: int) -> None:
        """Moves the sequences that the runner's plan did not take back to the shared queue, to be placed again.

        Those that wait for a block of this runner stay in its queue.
        """
        if len(self._schedulers) == 1 and session not in self._closed:  # its plan took from the shared queue directly
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

    def put(self, sequence: Sequence, session: int) -> bool:
        """Places a waiting sequence, which is in no queue, on this runner; returns False if it is not open."""
        if len(self._schedulers) < 2 or not self.is_open(session):
            return False
        self._queues[session].place(sequence)
        self.touch(session)
        self._wake(session)
        return True

    def discard(self, sequence: Sequence) -> None:
        """Drops a waiting sequence that has ended."""
        self.misfits.discard(sequence)
        self._overtaken.discard(sequence)
        for queue in self._queues.values() if len(self._schedulers) > 1 else ():
            queue.discard(sequence)

    def recall_all(self) -> None:
        """Moves all waiting sequences, in runners' queues or parked, back into the shared queue's order."""
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
        """Places the first sequences of the shared queue on runners, as far as they have room."""
        shared = self._shared()
        if len(self._schedulers) < 2:
            if shared:
                for only in self._schedulers:
                    self._wake(only)
            return
        end = len(self._classes)  # runners of the classes from here on are reserved for earlier sequences
        while end and (sequence := self._overtaken.first(shared, end)) is not None:
            index = self._class_index(sequence.limit)
            session = None if sequence.stale else self._choose(sequence, self._classes[index:end])
            if session is not None:
                self._overtaken.discard(sequence)
                shared.discard(sequence)
                donor, self._passed_over = self._passed_over, None
                if self.fetch(sequence, donor, session):
                    continue
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
        """Returns whether a new sequence would be placed at once.

        It may overtake sequences that wait for larger runners.
        """
        if self._shared().peek() is not None:
            return False
        end = min(len(self._classes), self._overtaken.lowest)
        return any(
            self._has_room(session, sequence)
            for each in self._classes[self._class_index(sequence.limit) : int(end)]
            for session in each.members
        )

    def _class_index(self, num_tokens: int) -> int:
        """Returns the index of the first class that can hold a sequence of `num_tokens`."""
        return bisect_left(self._classes, num_tokens, key=_size)

    def _choose(self, sequence: Sequence, classes: list[SizeClass]) -> int | None:
        """Returns a runner of one of these classes, or None if none has room."""
        least = self._least_loaded(sequence, classes)
        if least is None:
            return None
        names = self._schedulers[least].prefix.prompt_names(sequence)
        landmarks = _landmarks(names)
        home = next((self._home[name] for name in reversed(landmarks) if name in self._home), least)
        is_better = home != least and self._class_of.get(home) in classes and self._is_worth(home, least, sequence)
        chosen = home if is_better else least
        self._passed_over = home if chosen != home and home in self._schedulers else None
        for name in landmarks:
            self._home[name] = chosen
            self._home.move_to_end(name)
        while len(self._home) > KNOWN_PREFIXES:
            self._home.popitem(last=False)
        return chosen

    def _is_worth(self, home: int, least: int, sequence: Sequence) -> bool:
        """Returns whether the prefix at `home` saves more positions than its load costs (see `_load`)."""
        if not self._has_room(home, sequence):
            return False
        scheduler = self._schedulers[home]
        spared = scheduler.prefix.num_reachable(sequence) - self._schedulers[least].prefix.num_reachable(sequence)
        return spared > (self._load_of(home) - self._load_of(least)) * scheduler.hello.max_step_tokens

    def _load_of(self, session: int) -> float:
        return self._class_of[session].loads[session]

    def _least_loaded(self, sequence: Sequence, classes: list[SizeClass]) -> int | None:
        """Returns the least loaded runner that has room, the smallest if loads are equal; None if there is none."""
        most_asked = CANDIDATES + len(self._closed | self._decoders)
        found = [each.least_loaded(lambda session: self._has_room(session, sequence), most_asked) for each in classes]
        return min((session for session in found if session is not None), key=self._load_of, default=None)

    def _has_room(self, session: int, sequence: Sequence) -> bool:
        if not self.is_open(session) or not self._takes_prompts(session, sequence.limit):
            return False
        scheduler, queue = self._schedulers[session], self._queues[session]
        pool, tiers = scheduler.pool, scheduler.tiers
        needed = pool.blocks_for(len(sequence.tokens)) + pool.blocks_for(queue.placed_tokens) + queue.num_waiting
        taken = queue.num_waiting + scheduler.moves.expected + len(scheduler.moves.arrivals)
        if len(scheduler.table.free) <= taken:
            return False
        # What is kept for waiting sequences, perhaps for this one, gives way to it at its admission.
        return needed <= pool.num_free or (tiers is not None and needed <= pool.num_free + tiers.loads.num_kept)

    def _takes_prompts(self, session: int, num_tokens: int) -> bool:
        """Whether prompts of sequences of up to `num_tokens` go to the runner: it is not only for decoding, or there is
        none for prompts that can hold them."""
        return session not in self._decoders or not any(
            self.is_open(other) and scheduler.most_tokens >= num_tokens
            for other, scheduler in self._schedulers.items()
            if other not in self._decoders
        )

    # ------------------------------------------------------------------ misfits

    def can_hold(self, num_tokens: int) -> bool:
        """Returns whether a runner that is neither leaving nor closed can hold a sequence of `num_tokens`."""
        return any(True for _ in self.holders(num_tokens))

    def holders(self, num_tokens: int) -> Iterator[Scheduler]:
        """Yields the runners that are neither leaving nor closed and can hold a sequence of `num_tokens`."""
        for each in self._classes[self._class_index(num_tokens) :]:
            for session in each.members:
                if self.is_open(session):
                    yield self._schedulers[session]

    def _strand(self, sequence: Sequence) -> None:
        """Parks a sequence of the shared queue that no open runner can hold, unless it can be shortened."""
        self.misfits.add(sequence)
        if self.shorten(sequence, NEARLY):
            self.misfits.recall(sequence.limit)

    def shorten(self, sequence: Sequence, least: float = 0.0) -> bool:
        """Shortens an open-ended sequence to the maximum length of the largest open runner; returns whether it did.

        That length must be at least the fraction `least` of the present one, and leave room for one more token.
        """
        sizes = [each.most_tokens for each in self._classes if self.can_hold(each.most_tokens)]
        most = max(sizes, default=0)
        if not sequence.request.open_ended or most < least * sequence.limit or most <= len(sequence.tokens):
            return False
        sequence.limit = min(sequence.limit, most)
        return True

    def given_up(self, tried: int | None = None) -> list[Sequence]:
        """Returns the sequences whose wait for a runner that can hold them has timed out.

        Open-ended ones are shortened instead if possible. The timeout restarts while a runner that can hold the
        sequence computes, though closed or leaving, or is an isolation's (`tried`, its session).
        """
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
    """Returns the number of full steps that a new prompt would wait for; a runner without a free slot counts one more.

    By slots alone a runner with a backlog of long prompts would seem free, and another would have nothing to compute.
    """
    table = scheduler.table
    slots = (table.num_running + queue.num_waiting) / table.num_slots
    return slots + (table.backlog + queue.placed_tokens) / scheduler.hello.max_step_tokens


def _landmarks(names: list[bytes]) -> list[bytes]:
    """Returns the names of the prefixes of 1, 2, 4, 8, ... blocks, and of the longest."""
    chosen = [names[(1 << power) - 1] for power in range(len(names).bit_length())]
    return chosen if not names or chosen[-1] is names[-1] else [*chosen, names[-1]]
