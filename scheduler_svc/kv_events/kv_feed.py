"""Numbers the changes of the prefix caches by engine turn, and serves subscriptions to them.

| a subscriber that has                                     | gets first                                             |
|-----------------------------------------------------------|--------------------------------------------------------|
| nothing (`after` = 0)                                     | a snapshot                                             |
| changes that are still kept                               | the changes that it lacks                              |
| older ones, a former scheduler's, or a part of a snapshot | OUT_OF_RANGE: it discards its state and starts again   |

Recording starts with the first subscription and stops `LINGER_S` after the last one has ended: a broken subscription is
usually renewed at once, and then lacks few changes. Kept changes are bounded by their number of blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import structlog

from roster_protos import engine_pb2
from scheduler_svc.kv_events.catalog import CHUNK_BLOCKS, Catalog
from scheduler_svc.kv_events.pool_recorder import PoolEventRecorder
from scheduler_svc.model.refusal import EngineRefusal
from scheduler_svc.requests.requests import Requests
from scheduler_svc.runners.runner_pool import RunnerPool
from scheduler_svc.scheduler.scheduler import Scheduler

LINGER_S = 60.0
"""Seconds for which recording continues without a subscriber."""
KEPT_BLOCKS = 1 << 16
"""Maximum number of blocks in the kept changes: 6 MB, or 60 MB if each change has one block."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Recording:
    """State that exists only while changes are recorded."""

    catalog: Catalog = field(default_factory=Catalog)
    recorders: dict[int, PoolEventRecorder] = field(default_factory=dict)
    """Recorders by session."""
    partial: bool = False
    """Whether blocks of unknown content were cached before the recording began."""
    kept: deque[engine_pb2.KvChanges] = field(default_factory=deque)
    """The latest changes, by ascending number."""
    sizes: deque[int] = field(default_factory=deque)
    """Number of blocks in each of `kept`."""
    num_kept: int = 0
    """Sum of `sizes`."""
    snapshots: dict[int, int] = field(default_factory=dict)
    """Snapshots of several messages: number of the last message -> number of the first."""

    def keep(self, changes: engine_pb2.KvChanges, size: int) -> None:
        """Keeps changes of `size` blocks, and drops the oldest ones beyond the bound."""
        self.kept.append(changes)
        self.sizes.append(size)
        self.num_kept += size
        while self.num_kept > KEPT_BLOCKS:
            self.kept.popleft()
            self.num_kept -= self.sizes.popleft()

    def note_snapshot(self, number: int) -> None:
        """Records that a snapshot is sent whose messages have the numbers up to `number`."""
        num_messages = -(-len(self.catalog) // CHUNK_BLOCKS)
        if num_messages > 1:
            oldest = self.kept[0].number if self.kept else number
            self.snapshots = {last: first for last, first in self.snapshots.items() if last >= oldest}
            self.snapshots[number] = number - num_messages + 1

    def may_lack(self, after: int, number: int) -> bool:
        """Returns whether a subscriber at number `after` may lack more than the kept changes up to `number`.

        If `after` is a number within a snapshot, the subscriber lost the rest of that snapshot, which later changes do
        not replace.
        """
        oldest = self.kept[0].number if self.kept else number + 1
        cut_off = any(first <= after < last for last, first in self.snapshots.items())
        return cut_off or not oldest - 1 <= after <= number


class KvFeed:
    """Feed of prefix cache changes. One per engine, in the engine's thread."""

    def __init__(self, requests: Requests, pool: RunnerPool, wall_clock: Callable[[], float]) -> None:
        self._requests = requests
        self._pool = pool
        self._wall_clock = wall_clock
        self._recording: _Recording | None = None
        self._number = int(wall_clock() * 1e6)
        """Number of the last changes. It starts at the wall clock in microseconds. As a turn takes longer than a
        microsecond, all numbers of a former scheduler are smaller."""
        self._subscribers: dict[bytes, set[int]] = {}
        self._asking: list[tuple[bytes, engine_pb2.KvSubscribe]] = []
        self._followed_at = 0.0

    @property
    def active(self) -> bool:
        """Whether `publish` has work: there are subscribers or new subscriptions, or recording lingers."""
        return self._recording is not None or bool(self._asking)

    @property
    def num_subscribers(self) -> int:
        """Number of subscriptions that have begun."""
        return sum(len(handles) for handles in self._subscribers.values())

    # ------------------------------------------------------------------ subscriptions

    def subscribe(self, worker: bytes, ask: engine_pb2.KvSubscribe) -> None:
        """Queues a subscription. `publish` answers it when all changes of the turn are known."""
        self._asking.append((worker, ask))

    def unsubscribe(self, worker: bytes, handle: int) -> None:
        """Ends a subscription."""
        self._asking = [(asking, ask) for asking, ask in self._asking if ask.handle != handle]
        handles = self._subscribers.get(worker, set())
        handles.discard(handle)
        if not handles:
            self._subscribers.pop(worker, None)

    def forget(self, worker: bytes) -> None:
        """Ends the subscriptions of a worker that is gone."""
        self._asking = [(asking, ask) for asking, ask in self._asking if asking != worker]
        self._subscribers.pop(worker, None)

    # ------------------------------------------------------------------ runners

    def join(self, session: int, scheduler: Scheduler) -> None:
        """Records the pool of a new runner, which has no named blocks yet."""
        if self._recording is not None:
            host = None if scheduler.tiers is None else scheduler.tiers.host
            recorder = PoolEventRecorder(scheduler.pool, self._recording.catalog, host)
            self._recording.recorders[session] = recorder
            scheduler.prefix.record(recorder)

    def leave(self, session: int, scheduler: Scheduler) -> None:
        """Removes the cached blocks of a runner that is gone."""
        if self._recording is not None:
            scheduler.prefix.record(None)
            self._recording.recorders.pop(session).close()

    # ------------------------------------------------------------------ publishing

    def publish(self) -> None:
        """Sends the changes of the turn to subscribers, then answers new subscriptions."""
        now_s = self._requests.ledger.now_s
        recording = self._recording or self._begin()
        self._tell_changes(recording)
        for worker, ask in self._asking:
            self._answer(recording, worker, ask)
        if self._subscribers or self._asking:
            self._followed_at = now_s
        elif now_s - self._followed_at > LINGER_S:
            self._end()
        self._asking.clear()

    def _begin(self) -> _Recording:
        """Begins recording. The numbering skips one number, for the changes since recording last ended."""
        recording = self._recording = _Recording()
        sequences = [sequence for request in self._requests.book.known() for sequence in request.sequences]
        for session, scheduler in self._pool.schedulers.items():
            self.join(session, scheduler)
            for sequence in sequences:
                scheduler.prefix.describe(sequence)
            recording.partial |= recording.recorders[session].is_partial
        recording.catalog.take_changes()  # the snapshot includes them
        self._number += 1
        log.info("the prefix cache is followed", blocks=len(recording.catalog), partial=recording.partial)
        return recording

    def _end(self) -> None:
        if self._recording is not None:
            for recorder in self._recording.recorders.values():
                recorder.close()
        for scheduler in self._pool.schedulers.values():
            scheduler.prefix.record(None)
        self._recording = None
        log.info("the prefix cache is no longer followed")

    def _tell_changes(self, recording: _Recording) -> None:
        size = recording.catalog.num_changes
        if not size:
            return
        self._number += 1
        told = engine_pb2.KvChanges(
            number=self._number, unix_s=self._wall_clock(), changes=recording.catalog.take_changes()
        )
        recording.keep(told, size)
        for worker in self._subscribers:
            self._requests.outbox.message(worker, engine_pb2.FromEngine(kv_changes=told))

    def _answer(self, recording: _Recording, worker: bytes, ask: engine_pb2.KvSubscribe) -> None:
        answer = engine_pb2.KvSubscribed(handle=ask.handle, number=self._number)
        if not ask.after:
            answer.snapshot.CopyFrom(recording.catalog.snapshot())
            answer.snapshot.partial = recording.partial
            recording.note_snapshot(self._number)
        elif recording.may_lack(ask.after, self._number):
            self._requests.outbox.message(worker, _too_old(ask.after).to_message(ask.handle))
            return
        else:
            answer.replay.changes.extend(changes for changes in recording.kept if changes.number > ask.after)
            answer.replay.SetInParent()
        self._subscribers.setdefault(worker, set()).add(ask.handle)
        self._requests.outbox.message(worker, engine_pb2.FromEngine(kv_subscribed=answer))


def _too_old(after: int) -> EngineRefusal:
    message = f"the changes after {after} are no longer kept: discard the recorded state and subscribe again with 0"
    return EngineRefusal(grpc.StatusCode.OUT_OF_RANGE, message, "start_sequence_number")
