"""Subscriptions to the prefix cache in one worker: each gateway's stream, at its own pace.

The engine tells a worker every change once; here it waits for each subscriber that has not read so far. One that falls
behind too far loses its place: DATA_LOSS, on which gateways forget what they knew and subscribe anew.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from smg_grpc_proto.generated import common_pb2

from roster_protos import engine_pb2
from scheduler_svc.front.base.refusal import Refusal
from scheduler_svc.front.base.service_refusals import engine_lost
from scheduler_svc.front.gateway.kv_batches import changes_batch, first_batches, num_blocks
from scheduler_svc.front.stream.engine_client import EngineClient

BEHIND_BLOCKS = 1 << 16
"""Blocks of changes that wait for a slow subscriber, at most: 6 MB, and 80 where each speaks of one."""


class _Subscription:
    """What one call has not sent yet."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.fell_behind = False
        """It has not read for too long: changes are missing."""
        self._waiting: deque[engine_pb2.KvChanges] = deque()
        self._num_blocks = 0  # that `_waiting` speaks of

    def put(self, changes: engine_pb2.KvChanges) -> None:
        """News; dropped with all that wait if there are too many."""
        self._num_blocks += num_blocks(changes)
        if self._num_blocks > BEHIND_BLOCKS:
            self.fell_behind = True
            self._waiting.clear()
        if not self.fell_behind:
            self._waiting.append(changes)
        self.changed.set()

    def next_changes(self) -> engine_pb2.KvChanges | None:
        """The oldest; None if none waits. Raises Refusal (DATA_LOSS) if some are missing."""
        if self.fell_behind:
            raise _too_slow()
        if not self._waiting:
            return None
        changes = self._waiting.popleft()
        self._num_blocks -= num_blocks(changes)
        return changes


class KvSubscriptions:
    """All of one worker's."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._subscriptions: set[_Subscription] = set()
        self._lost = False
        client.on_kv_changes = self._publish

    def lose(self) -> None:
        """The engine is gone: every subscription ends UNAVAILABLE."""
        self._lost = True
        for subscription in self._subscriptions:
            subscription.changed.set()

    @asynccontextmanager
    async def follow(self, after: int) -> AsyncIterator[AsyncIterator[common_pb2.KvEventBatch]]:
        """Batches from behind the one numbered `after` on, 0: from a snapshot. Raises Refusal.

        Refusals: OUT_OF_RANGE (those after `after` are not kept) at once; DATA_LOSS (read too slowly) and UNAVAILABLE
        from the iterator.
        """
        handle, subscription = self._client.new_handle(), _Subscription()
        self._subscriptions.add(subscription)
        try:
            ask = engine_pb2.KvSubscribe(handle=handle, after=after)
            answer = await self._client.call(handle, engine_pb2.Command(kv_subscribe=ask))
            yield self._batches(subscription, answer.kv_subscribed)
        finally:
            self._subscriptions.discard(subscription)
            over = engine_pb2.KvUnsubscribe(handle=handle)
            self._client.send(engine_pb2.Command(kv_unsubscribe=over))

    async def _batches(
        self, subscription: _Subscription, start: engine_pb2.KvSubscribed
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        # A large cache takes tenths of a second to be put in order: in a thread, as other streams must not wait for it.
        for batch in await asyncio.to_thread(_listed, start):
            yield batch
        while not self._lost:
            while (changes := subscription.next_changes()) is not None:
                if changes.number > start.number:  # those before it came for other subscribers
                    yield changes_batch(changes)
            await subscription.changed.wait()
            subscription.changed.clear()
        raise engine_lost()

    def _publish(self, changes: engine_pb2.KvChanges) -> None:
        for subscription in self._subscriptions:
            subscription.put(changes)


def _listed(start: engine_pb2.KvSubscribed) -> list[common_pb2.KvEventBatch]:
    return list(first_batches(start, time.time()))


def _too_slow() -> Refusal:
    message = "the changes came faster than they were read: forget what is known and subscribe again with 0"
    return Refusal(grpc.StatusCode.DATA_LOSS, message)
