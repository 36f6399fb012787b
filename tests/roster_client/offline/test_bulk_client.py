"""Many requests over one session: what is sent again, and what is given up, against a scripted session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from roster_client.client.errors import InvalidRequestError, OverloadedError, StreamGapError, UnavailableError
from roster_client.client.events import FinishReason
from roster_client.client.requests import build_request
from roster_client.offline import bulk_client as module
from roster_client.offline.bulk_client import BulkClient
from roster_protos import inference_pb2 as pb

Script = Callable[[int, pb.SessionRequest], "list[pb.SessionResponse] | grpc.RpcError"]


class ScriptedSession:
    """Stands in for a RosterClient: `script(number of the request, its message)` returns what the server sends."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.sent: list[pb.SessionRequest] = []
        self.sessions = 0

    def session_call(self, actions: AsyncIterator[pb.SessionRequest]) -> Any:
        self.sessions += 1
        return _Call(self, actions)

    async def responses(self, actions: AsyncIterator[pb.SessionRequest]) -> AsyncIterator[pb.SessionResponse]:
        async for action in actions:
            self.sent.append(action)
            answer = self._script(len(self.sent), action)
            if isinstance(answer, grpc.RpcError):
                raise answer
            for response in answer:
                yield response


class _Call:
    def __init__(self, script: ScriptedSession, actions: AsyncIterator[pb.SessionRequest]) -> None:
        self._responses = script.responses(actions)

    def __aiter__(self) -> AsyncIterator[pb.SessionResponse]:
        return self._responses

    def cancel(self) -> None: ...


def answer(tag: int, reason: int = pb.FINISH_REASON_LENGTH) -> list[pb.SessionResponse]:
    """Returns an answer of two choices in two messages, with log-probabilities of the first token."""
    rows = pb.SessionResponse(
        tags=[tag, tag], indexes=[1, 0], first_indexes=[0, 0], token_counts=[1, 2], token_ids=[7, 8, 9],
        text_lengths=[1, 3], text="xé!".encode(),
    )  # fmt: skip
    rows.events.add(tag=tag, accepted="id")
    rows.logprobs.add(row=0, logprobs=pb.Logprobs(sampled=[-1.0], top=1, top_token_ids=[4], top_logprobs=[-0.5]))
    last = pb.SessionResponse(tags=[tag], first_indexes=[2], token_ids=[3], text_lengths=[0])
    for index, count in ((0, 3), (1, 1)):
        last.events.add(tag=tag, finish=pb.Finish(index=index, reason=reason, num_tokens=count))  # type: ignore[arg-type]
    last.events.add(tag=tag, usage=pb.Usage(prompt_tokens=1, completion_tokens=4))
    return [rows, last]


def refusal(tag: int, code: grpc.StatusCode, retry_s: float | None = None) -> list[pb.SessionResponse]:
    status = status_pb2.Status(code=code.value[0], message="refused")
    if retry_s is not None:
        delay = duration_pb2.Duration(nanos=round(retry_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    refused = pb.Status(code=code.value[0], message="refused", details=status.SerializeToString())
    return [pb.SessionResponse(events=[pb.SessionEvent(tag=tag, refused=refused)])]


def broken() -> grpc.RpcError:
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone")


def bulk(script: Script, **options: Any) -> tuple[BulkClient, ScriptedSession]:
    session = ScriptedSession(script)
    return BulkClient(session, **options), session  # type: ignore[arg-type]


REQUEST = build_request([1], {})


async def test_an_answer_is_assembled() -> None:
    client, _ = bulk(lambda number, action: answer(action.tag))
    async with client:
        completion = await client.ask(REQUEST)
    assert [(c.index, c.text, c.token_ids, c.finish_reason) for c in completion.choices] == [
        (0, "é!", [8, 9, 3], FinishReason.LENGTH), (1, "x", [7], FinishReason.LENGTH)
    ]  # fmt: skip
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("é!", [8, 9, 3], FinishReason.LENGTH)
    assert [(entry.sampled, entry.top) for entry in completion.choices[1].logprobs] == [(-1.0, ((4, -0.5),))]
    assert completion.request_id == "id" and completion.usage is not None and client.tokens_received == 4


async def test_what_the_server_can_not_take_now_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECONNECT_PAUSE_S", 0.01)

    def script(number: int, action: pb.SessionRequest) -> list[pb.SessionResponse] | grpc.RpcError:
        match number:
            case 1:
                return refusal(action.tag, grpc.StatusCode.RESOURCE_EXHAUSTED, 0.01)
            case 2:
                return broken()
            case 3:
                return answer(action.tag, pb.FINISH_REASON_UNAVAILABLE)
            case _:
                return answer(action.tag)

    client, session = bulk(script)
    async with client:
        completion = await client.ask(REQUEST)
        assert completion.finish_reason is FinishReason.LENGTH
        assert (len(session.sent), session.sessions) == (4, 2)
        assert client.tokens_received == 8


async def test_a_refusal_for_good_is_an_error_and_others_continue() -> None:
    def script(number: int, action: pb.SessionRequest) -> list[pb.SessionResponse]:
        if number == 1:
            return refusal(action.tag, grpc.StatusCode.INVALID_ARGUMENT)
        if number == 2:
            return [pb.SessionResponse(tags=[action.tag], first_indexes=[5], token_ids=[1], text_lengths=[0])]
        return answer(action.tag)

    client, _ = bulk(script, patience_s=0)
    async with client:
        results = await asyncio.gather(*[client.ask(REQUEST) for _ in range(5)], return_exceptions=True)
    assert isinstance(results[0], InvalidRequestError) and isinstance(results[1], StreamGapError)
    assert not any(isinstance(result, BaseException) for result in results[2:])


async def test_a_server_that_is_gone_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECONNECT_PAUSE_S", 0.01)
    client, session = bulk(lambda number, action: broken(), patience_s=0.1)
    async with client:
        with pytest.raises(UnavailableError, match="gone"):
            await client.ask(REQUEST)
    assert session.sessions > 2
    full, _ = bulk(lambda number, action: refusal(action.tag, grpc.StatusCode.RESOURCE_EXHAUSTED, 0.01))
    async with full:  # a request with a deadline is not repeated beyond it
        with pytest.raises(OverloadedError):
            await full.ask(build_request([1], {"timeout_ms": 50}))


async def test_a_cancelled_caller_cancels_the_request() -> None:
    client, session = bulk(lambda number, action: [])
    async with client:
        asking = asyncio.create_task(client.ask(REQUEST))
        while not session.sent:
            await asyncio.sleep(0.001)
        asking.cancel()
        while len(session.sent) < 2:
            await asyncio.sleep(0.001)
    assert [action.WhichOneof("action") for action in session.sent] == ["generate", "cancel"]


async def test_the_first_of_several_requests_with_an_error_is_named_once() -> None:
    client, _ = bulk(lambda number, message: broken(), patience_s=0.0)
    answered: list[None] = []
    async with client:
        with pytest.raises(UnavailableError) as error:
            await client.ask_all([build_request([5], {}), build_request([6], {})], lambda: answered.append(None))
        assert error.value.message.startswith("prompt 0: ") and error.value.message.count("prompt") == 1
        with pytest.raises(UnavailableError) as alone:
            await client.ask_all([build_request([5], {})])
    assert "prompt" not in alone.value.message and answered == []
