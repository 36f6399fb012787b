"""A session leaves nothing of a broken call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc.aio import AioRpcError, Metadata

from roster_client.client.session import Session
from roster_protos import inference_pb2 as pb


async def test_a_broken_call_sends_nothing_more() -> None:
    """Its queue ends, so that its reader does. The next call sends the requests again."""
    read: list[asyncio.Task[list[str]]] = []

    async def requests(actions: AsyncIterator[pb.SessionRequest]) -> list[str]:
        return [action.WhichOneof("action") or "" async for action in actions]

    async def call(actions: AsyncIterator[pb.SessionRequest], breaks: bool) -> AsyncIterator[pb.SessionResponse]:
        read.append(asyncio.create_task(requests(actions)))
        await asyncio.sleep(0)
        yield pb.SessionResponse(events=[pb.SessionEvent(tag=1, accepted="r")])
        if breaks:
            raise AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), "gone")
        await asyncio.Event().wait()

    class Call:
        """The part of a grpc.aio call that a session uses."""

        def __init__(self, messages: AsyncIterator[pb.SessionResponse]) -> None:
            self._messages = messages

        def __aiter__(self) -> AsyncIterator[pb.SessionResponse]:
            return self._messages

        def cancel(self) -> None:
            """Does nothing: there is no call."""

    def open_call(actions: AsyncIterator[pb.SessionRequest]) -> Any:
        return Call(call(actions, breaks=not read))

    async with Session(open_call) as session:
        session.generate("a prompt", request_id="r")
        async with asyncio.timeout(10):
            while len(read) < 2:
                await asyncio.sleep(0.01)
            assert await read[0] == ["generate"]
        assert not read[1].done()
        read[1].cancel()
