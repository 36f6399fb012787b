"""The HTTP client of the benchmarks against a scripted endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from roster_client.bench.load.openai_target import OpenAITarget, served_model
from roster_client.bench.load.target import Answer, RequestFailed
from roster_client.bench.load.workload import LoadRequest
from roster_client.bench.records.record import Status

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
REQUEST = LoadRequest("r", 0.0, "the of and", 3, 4)


@asynccontextmanager
async def endpoint(handler: Handler) -> AsyncIterator[str]:
    """Yields the base URL of a server on a free loopback port."""
    app = web.Application()
    for path in ("completions", "chat/completions"):
        app.router.add_post(f"/v1/{path}", handler)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m"}]})


def streaming(*events: Any, seen: list[Any] | None = None) -> Handler:
    """Returns a handler that answers with these events and [DONE]."""

    async def handler(request: web.Request) -> web.StreamResponse:
        if seen is not None:
            seen.append((await request.json(), request.headers.get("Authorization")))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    return handler


def text(words: str, **usage: int) -> dict[str, Any]:
    return {"choices": [{"text": words}], **({"usage": usage} if usage else {})}


async def serve(url: str, request: LoadRequest = REQUEST, **options: Any) -> tuple[Answer, list[int]]:
    counts: list[int] = []
    async with OpenAITarget(url, "m", **options) as target:
        return await target.serve(target.prepare(request), counts.append), counts


async def test_usage_of_the_last_event_counts() -> None:
    final = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4,
             "prompt_tokens_details": {"cached_tokens": 5}}}  # fmt: skip
    seen: list[Any] = []
    async with endpoint(streaming(text("a"), text(" b c"), text(""), final, seen=seen)) as url:
        answer, counts = await serve(url, api_key="k", extra_body={"top_k": 1})
    assert answer == Answer(9, 4, 5)
    assert counts == [1, 1], "an event without text is not a message; tokens per message are unknown"
    ((body, authorization),) = seen
    assert body["prompt"] == "the of and" and body["max_tokens"] == 4 and body["temperature"] == 0
    assert body["ignore_eos"] is True and body["top_k"] == 1 and authorization == "Bearer k"


async def test_usage_of_every_event_gives_each_messages_tokens() -> None:
    events = (
        text("a", prompt_tokens=9, completion_tokens=1),
        text(" b c d", prompt_tokens=9, completion_tokens=4),
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}},
    )
    async with endpoint(streaming(*events)) as url:
        answer, counts = await serve(url)
    assert (answer, counts) == (Answer(9, 4), [1, 3])


async def test_chat() -> None:
    seen: list[Any] = []
    events = (
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "a"}}]},
        {"choices": [{"delta": {}, "finish_reason": "length"}], "usage": {"prompt_tokens": 9, "completion_tokens": 1}},
    )
    async with endpoint(streaming(*events, seen=seen)) as url:
        answer, counts = await serve(url, chat=True, ignore_eos=False)
        assert await served_model(url) == "m"
    assert (answer, counts) == (Answer(9, 1), [1])
    assert seen[0][0]["messages"] == [{"role": "user", "content": "the of and"}]
    assert "ignore_eos" not in seen[0][0]


async def test_token_ids_are_sent_as_such() -> None:
    seen: list[Any] = []
    final = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 0}}
    async with endpoint(streaming(final, seen=seen)) as url:
        await serve(url, LoadRequest("r", 0.0, np.array([7, 8], np.int32), 2, 4))
    assert seen[0][0]["prompt"] == [7, 8]


@pytest.mark.parametrize(
    ("code", "status"),
    [(429, Status.REFUSED), (400, Status.REFUSED), (504, Status.TIMEOUT), (500, Status.FAILED), (503, Status.FAILED)],
)
async def test_http_errors(code: int, status: Status) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=code, text="no room")

    async with endpoint(handler) as url:
        with pytest.raises(RequestFailed, match=f"HTTP {code}: no room") as raised:
            await serve(url)
    assert raised.value.status is status


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ((text("a"), {"error": {"message": "the runner is gone"}}), "the runner is gone"),
        ((text("a"),), "without usage"),
        (("what", 7), "not a JSON object"),
    ],
)
async def test_streams_that_go_wrong(events: tuple[Any, ...], said: str) -> None:
    async with endpoint(streaming(*events)) as url:
        with pytest.raises(RequestFailed, match=said) as raised:
            await serve(url)
    assert raised.value.status is Status.FAILED


async def test_a_connection_that_breaks_is_a_failure() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        await asyncio.sleep(0)
        assert request.transport is not None
        request.transport.abort()
        return response

    async with endpoint(handler) as url:
        with pytest.raises(RequestFailed) as raised:
            await serve(url)
    assert raised.value.status is Status.FAILED
    with pytest.raises(RequestFailed, match="Connect"):
        await serve(url)
    with pytest.raises(ValueError, match="name one with --model"):
        await served_model(url)
