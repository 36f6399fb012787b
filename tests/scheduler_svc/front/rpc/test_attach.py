"""Attach: a stream continues exactly at every cursor, while the request runs and after its end."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator

import grpc
import pytest

from roster_protos import inference_pb2 as pb
from tests.support.front_stack import FrontStack, front_stack
from tests.support.gathered import Gathered, echo, gather, random_text, request
from tests.support.pieces import in_pieces_async


async def _attached(stack: FrontStack, request_id: str, received: list[int]) -> Gathered:
    async def responses() -> AsyncIterator[pb.GenerateResponse]:
        async for response in stack.stub.Attach(pb.AttachRequest(request_id=request_id, received=received)):
            yield response.response

    return await gather(responses())


async def _boundaries(stack: FrontStack, asked: pb.GenerateRequest) -> tuple[dict[int, str], Gathered]:
    """Runs a request; returns the text up to each cursor at which a delta ended, and the whole text."""
    texts = {0: ""}
    gathered = Gathered()
    async for response in stack.stub.Generate(asked):
        gathered.add(response)
        texts[len(gathered.tokens[0])] = gathered.texts[0]
    return texts, gathered


async def test_every_cursor_of_an_ended_request() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    text = random_text(random.Random(seed), 12)
    async with front_stack() as stack:
        ids = itertools.count()

        async def ask() -> tuple[str, dict[int, str], Gathered]:
            stack.engine.step_s = min(0.1, 2 * stack.engine.step_s)
            asked = request(text, 60, request_id=f"ended {next(ids)}", output=pb.OutputOptions(logprobs=1))
            return asked.request_id, *await _boundaries(stack, asked)

        ended, texts, whole = await in_pieces_async(ask, lambda answer: answer[1], least=4)
        for cursor, before in texts.items():
            rest = await _attached(stack, ended, [cursor])
            assert rest.tokens[0] == whole.tokens[0][cursor:]
            assert before + rest.texts[0] == whole.texts[0]
            assert rest.sampled[0] == whole.sampled[0][cursor:]
            assert rest.finishes[0] == whole.finishes[0]
            assert rest.usage == whole.usage


async def test_every_cursor_up_to_a_stop_string() -> None:
    async with front_stack() as stack:
        stop = pb.StopConditions(strings=["漢 a"], max_tokens=100)
        asked = pb.GenerateRequest(prompt=pb.Prompt(text="a🎉漢 "), stop=stop, request_id="stopped")
        texts, whole = await _boundaries(stack, asked)
        assert whole.texts[0] == "a🎉"
        for cursor, before in texts.items():
            rest = await _attached(stack, "stopped", [cursor])
            assert before + rest.texts[0] == "a🎉"
            assert rest.finishes[0] == whole.finishes[0]


async def test_a_running_request_changes_hands_without_a_gap() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    async with front_stack(step_s=0.003) as stack:
        text = random_text(generator, 20)
        call = stack.stub.Generate(request(text, 300, request_id="moving", n=2))
        delivered: dict[int, list[int]] = {0: [], 1: []}
        texts = {0: "", 1: ""}

        async def read(call: grpc.aio.UnaryStreamCall, messages: int) -> bool:
            """Reads some messages; returns whether the stream has ended."""
            for _ in range(messages):
                message = await call.read()
                if message is grpc.aio.EOF:
                    return True
                response = message.response if isinstance(message, pb.AttachResponse) else message
                for delta in response.deltas:
                    assert delta.first_index == len(delivered[delta.index])
                    delivered[delta.index] += delta.token_ids
                    texts[delta.index] += delta.text
            return False

        await read(call, 10)
        hops = 0
        while True:
            received = [len(delivered[0]), len(delivered[1])]
            former, call = call, stack.stub.Attach(pb.AttachRequest(request_id="moving", received=received))
            ended = await read(call, generator.randint(2, 30))
            if hops == 0:
                with pytest.raises(grpc.aio.AioRpcError) as detached:
                    while True:  # messages in transit when the other call attached arrive twice
                        await asyncio.wait_for(former.read(), 5)
                assert detached.value.code() is grpc.StatusCode.ABORTED
            hops += 1
            if ended:
                break
        tokens = echo(text, 300)
        assert hops > 3
        for index in range(2):
            assert delivered[index] == tokens
            assert texts[index] == bytes(tokens).decode("utf-8", "replace")


async def test_what_can_not_be_attached() -> None:
    async with front_stack() as stack:
        await gather(stack.stub.Generate(request("abc", 10, request_id="known")))
        for tenant, request_id, received, code in (
            ("", "unknown", [], grpc.StatusCode.NOT_FOUND),
            ("other", "known", [], grpc.StatusCode.NOT_FOUND),
            ("", "known", [11], grpc.StatusCode.INVALID_ARGUMENT),
        ):
            attach = pb.AttachRequest(request_id=request_id, received=received)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in stack.stub.Attach(attach, metadata=(("roster-tenant", tenant),)):
                    pass
            assert refused.value.code() is code


async def test_cancel_by_id() -> None:
    async with front_stack() as stack:
        call = stack.stub.Generate(request("abc", 4000, request_id="long"))
        await call.read()
        await call.read()
        for tenant in ("other", ""):
            cancel = stack.stub.Cancel(pb.CancelRequest(request_id="long"), metadata=(("roster-tenant", tenant),))
            if tenant:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await cancel
                assert refused.value.code() is grpc.StatusCode.NOT_FOUND
            else:
                await cancel
        finishes = []
        while (response := await call.read()) is not grpc.aio.EOF:
            finishes += response.finishes
        assert [finish.reason for finish in finishes] == [pb.FINISH_REASON_CANCELLED]
