"""Prefix cache subscriptions of one worker. Each gateway reads at its own pace.

The engine sends every change to a worker once; the worker queues it for each subscriber. A subscriber that falls too
far behind gets DATA_LOSS, upon which gateways discard their state and subscribe again.
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
"""Maximum number of blocks in the changes queued for a slow subscriber: 6 MB, or 80 MB if each change has one block."""


class _Subscription:
    """Changes that one call has not sent yet."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.fell_behind = False
        """The subscriber read too slowly, and changes were dropped."""
        self._waiting: deque[engine_pb2.KvChanges] = deque()
        self._num_blocks = 0  # in `_waiting`

    def put(self, changes: engine_pb2.KvChanges) -> None:
        """Queues changes. If the queue exceeds its limit, drops all of them."""
        self._num_blocks += num_blocks(changes)
        if self._num_blocks > BEHIND_BLOCKS:
            self.fell_behind = True
            self._waiting.clear()
        if not self.fell_behind:
            self._waiting.append(changes)
        self.changed.set()

    def next_changes(self) -> engine_pb2.KvChanges | None:
        """Removes and returns the oldest changes, None if there are none. Raises Refusal (DATA_LOSS) after a drop."""
        if self.fell_behind:
            raise _too_slow()
        if not self._waiting:
            return None
        changes = self._waiting.popleft()
        self._num_blocks -= num_blocks(changes)
        return changes


class KvSubscriptions:
    """The prefix cache subscriptions of one worker."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._subscriptions: set[_Subscription] = set()
        self._lost = False
        client.on_kv_changes = self._publish

    def lose(self) -> None:
        """Ends every subscription with UNAVAILABLE, as the engine is gone."""
        self._lost = True
        for subscription in self._subscriptions:
            subscription.changed.set()

    @asynccontextmanager
    async def follow(self, after: int) -> AsyncIterator[AsyncIterator[common_pb2.KvEventBatch]]:
        """Yields an iterator over the batches that follow number `after`; 0 starts with a snapshot. Raises Refusal.

        Raises OUT_OF_RANGE if the changes after `after` are no longer kept. The iterator raises DATA_LOSS if it is read
        too slowly, and UNAVAILABLE when the engine is gone.
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
        # Ordering a large cache takes tenths of a second; in a thread, it does not block other streams.
        for batch in await asyncio.to_thread(_listed, start):
            yield batch
        while not self._lost:
            while (changes := subscription.next_changes()) is not None:
                if changes.number > start.number:  # earlier changes were sent for other subscribers
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
    message = (
        "the changes arrived faster than they were read: discard the recorded state and subscribe again with "
        "start_sequence_number 0"
    )
    return Refusal(grpc.StatusCode.DATA_LOSS, message)
