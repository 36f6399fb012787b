"""Generate over real gRPC with a fake engine: the messages, their order, and the engine's commands."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator

import grpc
import pytest

from roster_protos import inference_pb2 as pb
from roster_protos import inference_pb2_grpc
from tests.support.fake_engine import FakeEngine
from tests.support.front_stack import FrontStack, front_stack
from tests.support.gathered import echo, gather, random_text, request


async def _heard(engine: FakeEngine, kind: str, count: int = 1) -> None:
    """Waits until the engine has received `count` commands of a kind."""
    async with asyncio.timeout(5):
        while len(engine.commands_of(kind)) < count:
            await asyncio.sleep(0.005)


async def _forgotten(stack: FrontStack) -> None:
    """Waits until the worker follows no requests."""
    async with asyncio.timeout(5):
        while stack.worker.num_requests:
            await asyncio.sleep(0.005)


async def test_streams_arrive_whole_with_one_finish_and_one_usage() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    async with front_stack(step_s=0.001) as stack:
        texts = [random_text(generator, generator.randint(1, 30)) for _ in range(40)]
        lengths = [generator.randint(1, 120) for _ in texts]
        streams = [stack.stub.Generate(request(text, length)) for text, length in zip(texts, lengths, strict=True)]
        for text, length, gathered in zip(
            texts, lengths, await asyncio.gather(*(gather(stream) for stream in streams)), strict=True
        ):
            tokens = echo(text, length)
            assert gathered.tokens[0] == tokens
            assert gathered.texts[0] == bytes(tokens).decode("utf-8", "replace")
            assert gathered.finishes[0].reason == pb.FINISH_REASON_LENGTH
            assert len(gathered.request_id) == 32
            assert gathered.usage == pb.Usage(
                prompt_tokens=len(text.encode()),
                completion_tokens=length,
                cached_tokens=3,
                drafted_tokens=4,
                accepted_tokens=min(2, length),
            )
        await _forgotten(stack)


async def test_choices_have_their_own_deltas_and_finishes() -> None:
    async with front_stack() as stack:
        gathered = await gather(stack.stub.Generate(request("wörter", 20, n=3, request_id="mine")))
        assert gathered.request_id == "mine"
        assert sorted(gathered.finishes) == [0, 1, 2]
        assert all(gathered.tokens[index] == echo("wörter", 20) for index in range(3))
        assert gathered.usage is not None and gathered.usage.completion_tokens == 60


async def test_logprobs_follow_their_tokens() -> None:
    async with front_stack() as stack:
        output = pb.OutputOptions(logprobs=2, prompt_logprobs=1, prompt_token_ids=True)
        gathered = await gather(stack.stub.Generate(request("añb🎉", 30, output=output)))
        tokens = echo("añb🎉", 30)
        assert gathered.sampled[0] == [-token / 256 for token in tokens]
        assert gathered.top_ids[0] == [(token + 1 + rank) % 256 for token in tokens for rank in range(2)]
        assert gathered.prompt is not None
        prompt = list("añb🎉".encode())
        assert list(gathered.prompt.token_ids) == prompt
        assert list(gathered.prompt.logprobs.sampled) == [-token / 256 for token in prompt[1:]]
        assert list(gathered.prompt.logprobs.top_token_ids) == [(token + 1) % 256 for token in prompt[1:]]


async def test_stop_string_ends_the_choice_here_and_in_the_engine() -> None:
    async with front_stack() as stack:
        stop = pb.StopConditions(strings=["fgh", "zz"], max_tokens=500)
        asked = pb.GenerateRequest(prompt=pb.Prompt(text="abcdefghij"), stop=stop, n=2)
        gathered = await gather(stack.stub.Generate(asked))
        for index in range(2):
            assert gathered.texts[index] == "abcde"
            assert gathered.finishes[index] == pb.Finish(
                index=index, reason=pb.FINISH_REASON_STOP, stop_string="fgh", num_tokens=8
            )
        cuts = [command.cut for command in stack.engine.commands_of("cut")]
        assert [(cut.num_tokens, cut.stop_string) for cut in cuts] == [(8, "fgh")] * 2
        await _forgotten(stack)


async def test_accepted_drafts_behind_a_stop_string_are_not_counted() -> None:
    """The engine's end says 2, and comes with the token in which the stop string is found."""
    async with front_stack() as stack:
        stop = pb.StopConditions(strings=["a"], max_tokens=1)
        gathered = await gather(stack.stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="ab"), stop=stop)))
        assert gathered.usage is not None
        assert (gathered.usage.completion_tokens, gathered.usage.accepted_tokens) == (1, 1)


async def test_received_tokens_are_neither_repeated_nor_lost() -> None:
    async with front_stack() as stack:
        received = echo("añb🎉", 9)
        gathered = await gather(stack.stub.Generate(request("añb🎉", 30, received_token_ids=received)))
        assert gathered.first_indexes[0] == 9
        assert gathered.tokens[0] == echo("añb🎉", 30)[9:]
        assert gathered.finishes[0].num_tokens == 30


async def test_a_request_whose_received_tokens_end_with_a_stop_string_only_ends() -> None:
    """A client sends this if it received the last token but not the finish before the service died."""
    async with front_stack() as stack:
        stop = pb.StopConditions(strings=["fgh"], max_tokens=500)
        received = list(b"abcdefgh")
        asked = pb.GenerateRequest(prompt=pb.Prompt(text="abcdefghij"), stop=stop, received_token_ids=received)
        gathered = await gather(stack.stub.Generate(asked))
        assert not gathered.tokens[0]
        assert gathered.finishes[0] == pb.Finish(reason=pb.FINISH_REASON_STOP, stop_string="fgh", num_tokens=8)
        assert gathered.usage is not None and gathered.usage.completion_tokens == 8
        await _forgotten(stack)


async def test_same_id_and_body_takes_the_stream_over_and_another_body_is_refused() -> None:
    async with front_stack() as stack:
        asked = request("takeover", 400, request_id="twice")
        first = stack.stub.Generate(asked)
        async for response in first:
            if response.deltas and response.deltas[0].first_index > 3:
                break
        stack.engine.stepping.clear()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await gather(stack.stub.Generate(request("takeover", 401, request_id="twice")))
        assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
        taking_over = asyncio.create_task(gather(stack.stub.Generate(asked)))
        await _heard(stack.engine, "submit", 3)
        stack.engine.stepping.set()
        second = await taking_over
        assert second.tokens[0] == echo("takeover", 400)
        with pytest.raises(grpc.aio.AioRpcError) as detached:
            async for _ in first:
                pass
        assert detached.value.code() is grpc.StatusCode.ABORTED
        other = await gather(stack.stub.Generate(asked, metadata=(("roster-tenant", "other"),)))
        assert other.tokens[0] == second.tokens[0]
        assert ("other", "twice") in stack.engine.requests


@pytest.mark.parametrize("after", [0, 1, 5])
async def test_disconnect_reaches_the_engine_at_once(after: int) -> None:
    async with front_stack() as stack:
        call = stack.stub.Generate(request("abc", 4000))
        seen = 0
        async for _ in call:
            seen += 1
            if seen > after:
                break
        cancelled_at = time.monotonic()
        call.cancel()
        await _heard(stack.engine, "disconnect")
        assert time.monotonic() - cancelled_at < 4, "the stream's own end is 8 s away"
        await _forgotten(stack)


async def test_disconnect_before_the_engine_has_answered() -> None:
    async with front_stack(with_model=True) as stack:
        stack.engine.stepping.clear()
        call = stack.stub.Generate(request("abc", 4000))
        await _heard(stack.engine, "submit")
        call.cancel()
        await _heard(stack.engine, "disconnect")
        await _forgotten(stack)


async def test_a_kept_request_still_stops_at_its_stop_string() -> None:
    async with front_stack() as stack:
        stack.engine.stepping.clear()
        stop = pb.StopConditions(strings=["ba"], max_tokens=500)
        asked = pb.GenerateRequest(
            prompt=pb.Prompt(text="aab"), stop=stop, on_disconnect=pb.ON_DISCONNECT_KEEP, request_id="kept"
        )
        call = stack.stub.Generate(asked)
        await call.read()
        call.cancel()
        await _heard(stack.engine, "disconnect")
        stack.engine.stepping.set()
        await _heard(stack.engine, "cut")
        await _forgotten(stack)
        attach = stack.stub.Attach(pb.AttachRequest(request_id="kept"))
        gathered = await gather(response.response async for response in attach)
        assert gathered.texts[0] == "aa"
        assert gathered.finishes[0].stop_string == "ba"


async def test_timeout_and_deadline_travel_to_the_engine() -> None:
    async with front_stack() as stack:
        gathered = await gather(stack.stub.Generate(request("abc", 4000, timeout_ms=80), timeout=30))
        assert gathered.finishes[0].reason == pb.FINISH_REASON_DEADLINE
        stack.engine.stepping.clear()  # gRPC's own status for the deadline can arrive first
        call = stack.stub.Generate(request("abc", 4000, timeout_ms=60_000), timeout=0.7)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await gather(call)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        submits = [command.submit for command in stack.engine.commands_of("submit")]
        assert submits[0].timeout_ms == 80
        assert 0 < submits[1].timeout_ms <= 700


async def test_a_slow_reader_gets_merged_messages_and_delays_no_other() -> None:
    small_window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))
    async with (
        front_stack(step_s=0.001, flush_ms=0) as stack,
        grpc.aio.insecure_channel(stack.address, options=small_window) as channel,
    ):
        output = pb.OutputOptions(logprobs=20)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        slow = stub.Generate(request("slow", 3000, output=output))
        first = await slow.read()
        quick = await asyncio.wait_for(gather(stack.stub.Generate(request("quick", 3000, output=output))), 30)
        assert quick.tokens[0] == echo("quick", 3000)
        gathered = await gather(_messages(first, slow))
        assert gathered.tokens[0] == echo("slow", 3000)
        assert gathered.sampled[0] == [-token / 256 for token in gathered.tokens[0]]
        assert gathered.messages < quick.messages / 2


async def _messages(
    first: pb.GenerateResponse, call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]
) -> AsyncIterator[pb.GenerateResponse]:
    """Yields all messages of a stream whose first message was read before."""
    yield first
    while (response := await call.read()) is not grpc.aio.EOF:
        yield response
