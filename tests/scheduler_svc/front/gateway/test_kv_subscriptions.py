"""SubscribeKvEvents over real gRPC with a fake engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import grpc
import numpy as np
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc

from roster_protos import engine_pb2
from scheduler_svc.front.gateway import kv_subscriptions
from tests.support.front_stack import FrontStack, front_stack

WAIT_S = 200
BIG = 64
"""Blocks per message in the test of a slow reader; each has 256 tokens, so that buffers fill."""

Call = grpc.aio.UnaryStreamCall[common_pb2.SubscribeKvEventsRequest, common_pb2.KvEventBatch]


@pytest.fixture
async def stack() -> AsyncIterator[FrontStack]:
    async with front_stack() as opened:
        yield opened


def subscribe(stack: FrontStack, after: int = 0) -> Call:
    stub = vllm_grpc.VllmEngineStub(stack.channel)
    call: Call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=after))
    return call


def news(number: int, blocks: int = 1, size: int = 4) -> engine_pb2.KvChanges:
    names = number * 1000 + np.arange(blocks, dtype="<i8")
    stored = engine_pb2.KvStored(names=names.tobytes(), tokens=np.full(blocks * size, 70_000, "<i4").tobytes())
    return engine_pb2.KvChanges(number=number, unix_s=1, changes=[engine_pb2.KvChange(stored=stored)])


async def unsubscribed(stack: FrontStack) -> None:
    async with asyncio.timeout(WAIT_S):
        while not stack.engine.commands_of("kv_unsubscribe"):
            await asyncio.sleep(0.005)


async def test_a_snapshot_then_the_news_until_the_caller_goes(stack: FrontStack) -> None:
    call = subscribe(stack)
    async with asyncio.timeout(WAIT_S):
        first = await call.read()
        assert first.HasField("snapshot") and first.sequence_number == 100
        stack.engine.kv_news.extend([news(99), news(100), news(101), news(102)])
        assert [(await call.read()).sequence_number for _ in range(2)] == [101, 102]
    call.cancel()
    await unsubscribed(stack)
    (ask,) = stack.engine.commands_of("kv_subscribe")
    (over,) = stack.engine.commands_of("kv_unsubscribe")
    assert ask.kv_subscribe.handle == over.kv_unsubscribe.handle and ask.kv_subscribe.after == 0


async def test_other_streams_go_on_while_a_snapshot_is_put_in_order(
    stack: FrontStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_batches, others = kv_subscriptions.first_batches, threading.Event()

    def slow(start: engine_pb2.KvSubscribed, unix_s: float) -> Iterator[common_pb2.KvEventBatch]:
        assert others.wait(WAIT_S), "the event loop is blocked"
        return first_batches(start, unix_s)

    monkeypatch.setattr(kv_subscriptions, "first_batches", slow)
    call = subscribe(stack)
    async with asyncio.timeout(WAIT_S):
        await call.initial_metadata()
        await vllm_grpc.VllmEngineStub(stack.channel).GetModelInfo(vllm.GetModelInfoRequest())
        others.set()
        assert (await call.read()).HasField("snapshot")


async def test_two_subscribers_each_get_everything(stack: FrontStack) -> None:
    calls = [subscribe(stack), subscribe(stack)]
    async with asyncio.timeout(WAIT_S):
        for call in calls:
            await call.read()
        stack.engine.kv_news.append(news(101))
        assert [(await call.read()).sequence_number for call in calls] == [101, 101]
        calls[0].cancel()
        await unsubscribed(stack)
        stack.engine.kv_news.append(news(102))
        assert (await calls[1].read()).sequence_number == 102


async def test_a_resumed_one_has_begun_before_there_is_news(stack: FrontStack) -> None:
    """Gateways give up on a subscription without headers after two seconds."""
    stack.engine.kv_start = lambda ask: engine_pb2.KvSubscribed(number=ask.after, replay=engine_pb2.KvReplay())
    call = subscribe(stack, after=55)
    async with asyncio.timeout(WAIT_S):
        await call.initial_metadata()
        stack.engine.kv_news.append(news(56))
        assert (await call.read()).sequence_number == 56


async def test_an_old_cursor_is_refused_before_it_begins(stack: FrontStack) -> None:
    stack.engine.kv_start = lambda ask: engine_pb2.Refused(code=11, message="too old")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await subscribe(stack, after=3).read()
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.OUT_OF_RANGE, "too old")


async def test_a_slow_subscriber_gets_data_loss(stack: FrontStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_subscriptions, "BEHIND_BLOCKS", 4 * BIG)
    slow, quick = subscribe(stack), subscribe(stack)
    async with asyncio.timeout(WAIT_S):
        await slow.read()
        await quick.read()
        for number in range(101, 401):  # 19,200 blocks: 15 MB
            stack.engine.kv_news.append(news(number, BIG, 256))
            assert (await quick.read()).sequence_number == number
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            while True:
                batch = await slow.read()
                assert batch is not grpc.aio.EOF
    assert lost.value.code() is grpc.StatusCode.DATA_LOSS
    assert "subscribe again" in (lost.value.details() or "")


async def test_the_engines_end_ends_it(stack: FrontStack) -> None:
    call = subscribe(stack)
    async with asyncio.timeout(WAIT_S):
        await call.read()
        stack.worker._gateway_service.lose()  # type: ignore[union-attr]
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await call.read()
    assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
