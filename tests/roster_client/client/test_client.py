"""Both clients against a scripted server: each scenario runs on the asyncio and on the blocking client."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from roster_client.client import EventStream, RosterClient
from roster_client.client.errors import (
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestCancelledError,
    StreamGapError,
    UnavailableError,
)  # fmt: skip
from roster_client.client.events import Delta, Finish, FinishReason, Started, Usage
from roster_client.client.requests import Message, OnDisconnect
from roster_client.client.resumption import repeatable
from roster_client.client.session import SessionStream
from roster_client.client.sync_client import SyncEventStream, SyncRosterClient
from roster_protos import inference_pb2 as pb
from tests.support.scripted_server import ScriptedServer, refuse, word_answer


class SyncAsAsync:
    """The blocking client, called from threads, so that a scenario can await either."""

    def __init__(self, target: str, tenant: str = "") -> None:
        self._client = SyncRosterClient(target, tenant=tenant)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if name in ("generate", "chat", "attach", "send"):
            return method
        return lambda *args, **kwargs: asyncio.to_thread(method, *args, **kwargs)


@pytest.fixture(params=["asyncio", "sync"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    clients: list[Any] = []

    def connect(target: str, tenant: str = "") -> Any:
        kind = RosterClient if request.param == "asyncio" else SyncAsAsync
        clients.append(kind(target, tenant=tenant))
        return clients[-1]

    yield connect
    for client in clients:
        await client.close()


async def events_of(stream: Any) -> list[Any]:
    if isinstance(stream, SyncEventStream):
        return await asyncio.to_thread(list, stream)
    return [event async for event in stream]


async def completion_of(stream: Any) -> Any:
    if isinstance(stream, SyncEventStream):
        return await asyncio.to_thread(stream.completion)
    return await stream.completion()


async def test_generate_streams_typed_events(server: ScriptedServer, connect: Any) -> None:
    stream = connect(server.target).generate("a bb ccc", request_id="mine", max_tokens=3)
    assert await events_of(stream) == [
        Started("mine"),
        Delta(0, 0, (1,), "a "),
        Delta(0, 1, (2,), "bb "),
        Delta(0, 2, (3,), "ccc "),
        Finish(0, FinishReason.LENGTH, 3),
        Usage(3, 3, 1, 2, 1),
    ]
    assert (stream.request_id, stream.received) == ("mine", [3])
    prompt, stop = pb.Prompt(user_message="a bb ccc"), pb.StopConditions(max_tokens=3)
    assert server.requests == [repeatable(pb.GenerateRequest(request_id="mine", prompt=prompt, stop=stop))]


async def test_completion_of_n_choices(server: ScriptedServer, connect: Any) -> None:
    words = ["x" * random.randrange(1, 9) for _ in range(20)]
    print(words)
    completion = await completion_of(connect(server.target).generate(" ".join(words), n=3))
    assert [choice.text for choice in completion.choices] == [" ".join(words) + " "] * 3
    assert all(choice.token_ids == [len(word) for word in words] for choice in completion.choices)
    assert completion.usage == Usage(20, 60, 1, 2, 1)


async def test_received_tokens_continue(server: ScriptedServer, connect: Any) -> None:
    stream = connect(server.target).generate("a bb ccc", received_token_ids=[1, 2])
    assert (await completion_of(stream)).text == "ccc "
    assert stream.received == [3]


async def test_chat_and_tenant(server: ScriptedServer, connect: Any) -> None:
    stream = connect(server.target, tenant="acme").chat([Message("system", "be"), Message("user", "hi you")])
    assert (await completion_of(stream)).text == "hi you "
    assert [message.role for message in server.requests[0].prompt.chat.messages] == ["system", "user"]
    assert server.metadata[0]["roster-tenant"] == "acme"


async def test_refusal_names_the_field(server: ScriptedServer, connect: Any) -> None:
    server.script = refuse(3, "bad request", {"sampling.top_p": "must be in (0, 1]"})
    with pytest.raises(InvalidRequestError, match=r"sampling\.top_p: must be in") as caught:
        await events_of(connect(server.target).generate("a", top_p=3.0))
    assert caught.value.violations[0].field == "sampling.top_p"


async def test_full_queue_says_when(server: ScriptedServer, connect: Any) -> None:
    server.script = refuse(8, "the queue is full", retry_s=1.25)
    with pytest.raises(OverloadedError) as caught:
        await events_of(connect(server.target).generate("a"))
    assert caught.value.retry_after_s == 1.25


async def test_lost_tokens_are_noticed(server: ScriptedServer, connect: Any) -> None:
    server.script = lambda request, context: (m for i, m in enumerate(word_answer(request, context)) if i != 2)
    with pytest.raises(StreamGapError):
        await events_of(connect(server.target).generate("a b c d"))


def endless(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    position = 0
    while context.is_active():
        yield pb.GenerateResponse(deltas=[pb.Delta(first_index=position, token_ids=[1], text="x")])
        position += 1
        time.sleep(0.01)


async def test_leaving_the_stream_cancels_on_the_server(server: ScriptedServer, connect: Any) -> None:
    server.script = endless
    stream = connect(server.target).generate("a", on_disconnect=OnDisconnect.CANCEL)
    if isinstance(stream, EventStream):
        async with stream:
            async for _ in stream:
                break
    else:
        with stream:
            await asyncio.to_thread(next, stream)
    assert await asyncio.to_thread(server.cancelled.wait, 5)


async def test_cut_stream_raises_cancelled(server: ScriptedServer, connect: Any) -> None:
    server.script = endless
    stream = connect(server.target).generate("a")
    asyncio.get_running_loop().call_later(0.2, stream.cancel)
    with pytest.raises(RequestCancelledError):
        await events_of(stream)


async def test_cancelling_the_task_is_not_swallowed(server: ScriptedServer) -> None:
    server.script = endless
    async with RosterClient(server.target) as client:
        task = asyncio.create_task(events_of(client.generate("a")))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await asyncio.to_thread(server.cancelled.wait, 5)


async def test_a_stream_ends_at_its_deadline_with_the_partial_answer(server: ScriptedServer, connect: Any) -> None:
    server.script = lambda request, context: itertools.chain(
        [pb.GenerateResponse(request_id="r")], endless(request, context)
    )
    started = time.monotonic()
    completion = await completion_of(connect(server.target).generate("a", n=2, deadline_s=0.5))
    assert 0.4 < time.monotonic() - started < 5
    first, second = completion.choices
    assert first.text == "x" * len(first.token_ids) != ""
    assert first.finish == Finish(0, FinishReason.DEADLINE, len(first.token_ids))
    assert second.finish == Finish(1, FinishReason.DEADLINE, 0)


async def test_a_deadline_before_any_answer_is_one_sentence_of_ours(server: ScriptedServer, connect: Any) -> None:
    def silent(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        while context.is_active():
            time.sleep(0.01)
        yield pb.GenerateResponse()

    server.script = silent
    with pytest.raises(DeadlineError, match=r"^the call's deadline passed before the server had answered$"):
        await events_of(connect(server.target).generate("a", deadline_s=0.3))


async def test_attach_goes_on_from_the_cursor(server: ScriptedServer, connect: Any) -> None:
    cursor = random.randrange(4)
    print(f"cursor {cursor}")
    stream = connect(server.target).attach("r", [cursor])
    completion = await completion_of(stream)
    assert completion.choices[0].token_ids == list(range(cursor, 4))
    assert completion.choices[0].finish == Finish(0, FinishReason.STOP, 4, stop_token_id=2)
    assert server.attaches == [pb.AttachRequest(request_id="r", received=[cursor])]
    assert stream.received == [4]


async def test_unary_calls(server: ScriptedServer, connect: Any) -> None:
    client = connect(server.target)
    assert (await client.get_model()).name == "words"
    assert await client.tokenize("a bb") == [1, 2]
    assert await client.detokenize([4, 5]) == "[4, 5] unset"
    assert await client.detokenize([4], skip_special_tokens=False) == "[4] False"
    await client.cancel("r")
    assert server.cancels == ["r"]
    with pytest.raises(NotFoundError, match="no such request"):
        await client.cancel("unknown")


async def test_a_server_that_does_not_listen_is_unavailable(connect: Any) -> None:
    with pytest.raises(UnavailableError):
        await connect("127.0.0.1:1").get_model(deadline_s=5)


def test_both_clients_have_the_same_methods() -> None:
    def signatures(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(method).parameters)
            for name, method in vars(kind).items()
            if inspect.isfunction(method) and not name.startswith("_")
        }

    sessions_need_a_loop = {"session": ["self"], "session_call": ["self", "actions"]}
    assert signatures(RosterClient) == signatures(SyncRosterClient) | sessions_need_a_loop
    assert signatures(EventStream) == signatures(SyncEventStream)
    assert signatures(EventStream).items() <= signatures(SessionStream).items()
