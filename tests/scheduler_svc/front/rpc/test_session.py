"""Session: many requests over one stream, tags, refusals as events, cancel, attach and the end of a session."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from roster_protos import inference_pb2 as pb
from tests.support.front_stack import front_stack
from tests.support.gathered import echo, random_text, request
from tests.support.session_client import SessionClient


async def test_many_requests_share_messages() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    async with front_stack(step_s=0.005) as stack:
        session = SessionClient(stack.stub)
        texts = {tag: random_text(generator, generator.randint(1, 30)) for tag in range(60)}
        choices = {tag: generator.choice((1, 1, 1, 3)) for tag in texts}
        for tag, text in texts.items():
            output = pb.OutputOptions(logprobs=0) if tag % 7 == 0 else None
            await session.generate(tag, request(text, 40 + tag, n=choices[tag], output=output))
        await session.until(*texts)
        for tag, text in texts.items():
            state, tokens = session.tags[tag], echo(text, 40 + tag)
            for index in range(choices[tag]):
                assert state.tokens[index] == tokens
                assert state.texts[index].decode() == bytes(tokens).decode("utf-8", "replace")
                assert state.finishes[index].num_tokens == len(tokens)
                if tag % 7 == 0:
                    assert state.sampled[index] == [-token / 256 for token in tokens]
            assert state.accepted and len(state.finishes) == choices[tag]
            assert state.usage is not None and state.usage.completion_tokens == choices[tag] * len(tokens)
        total = sum(choices[tag] * (40 + tag) for tag in texts)
        assert session.messages < total / 10
        await session.call.done_writing()
        await asyncio.wait_for(session.reading, 5)
        assert await session.call.code() is grpc.StatusCode.OK


async def test_tags_are_free_again_after_the_last_event() -> None:
    async with front_stack() as stack:
        session = SessionClient(stack.stub)
        for turn in range(3):
            await session.generate(5, request("abc", 10 + turn))
            await session.until(5)
            assert session.tags[5].tokens[0] == echo("abc", 10 + turn)
        await session.generate(5, pb.GenerateRequest(prompt=pb.Prompt(text="")))
        await session.until(5)
        await session.generate(5, request("abc", 3))
        await session.until(5)
        assert session.tags[5].tokens[0] == echo("abc", 3)
        session.call.cancel()


@pytest.mark.parametrize("misuse", ["tag in use", "no action"])
async def test_misuse_ends_the_session_and_frees_its_requests(misuse: str) -> None:
    async with front_stack() as stack:
        session = SessionClient(stack.stub)
        await session.generate(1, request("abc", 4000))
        again = pb.SessionRequest(tag=1, generate=request("abc", 10)) if misuse == "tag in use" else pb.SessionRequest()
        await session.call.write(again)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asyncio.wait_for(session.reading, 5)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        async with asyncio.timeout(5):
            while stack.worker.num_requests or not stack.engine.commands_of("disconnect"):
                await asyncio.sleep(0.005)


async def test_refusals_are_events_and_neighbours_stream_on() -> None:
    async with front_stack() as stack:
        session = SessionClient(stack.stub)
        await session.generate(0, request("neighbour", 300))
        bad = {
            1: (pb.GenerateRequest(), "prompt"),
            2: (request("abc", 10, n=65), "n"),
            3: (request("abc", 10, sampling=pb.SamplingParameters(temperature=float("nan"))), "sampling.temperature"),
            4: (request("x" * 20_000, 10), "prompt.text"),  # big enough for a thread
        }
        for tag, (asked, _) in bad.items():
            await session.generate(tag, asked)
        await session.until(*bad)
        for tag, (_, field) in bad.items():
            refused = session.tags[tag].refused
            assert refused is not None and refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
            details = error_details_pb2.BadRequest()
            assert status_pb2.Status.FromString(refused.details).details[0].Unpack(details)
            assert details.field_violations[0].field == field
        assert not session.tags[0].over
        await session.until(0)
        assert session.tags[0].tokens[0] == echo("neighbour", 300)
        session.call.cancel()


async def test_cancel_attach_and_prompt() -> None:
    async with front_stack() as stack:
        session = SessionClient(stack.stub)
        output = pb.OutputOptions(prompt_logprobs=0)
        await session.generate(9, request("abcdef", 4000, request_id="nine", output=output))
        await session.generate(8, request("y" * 3000, 4000, request_id="eight"))
        await session.generate(7, request("z" * 9000, 10, request_id="seven"))
        await session.call.write(pb.SessionRequest(tag=9, cancel=pb.SessionCancel()))
        await session.call.write(pb.SessionRequest(tag=12345, cancel=pb.SessionCancel()))
        await session.until(9, 7)
        assert session.tags[9].finishes[0].reason == pb.FINISH_REASON_CANCELLED
        assert session.tags[7].refused is not None
        await session.attach(2, pb.AttachRequest(request_id="nine", received=[0]))
        await session.attach(3, pb.AttachRequest(request_id="unknown"))
        await session.attach(4, pb.AttachRequest(request_id="eight"))
        await session.until(2, 3, 8)
        count = session.tags[2].finishes[0].num_tokens
        assert session.tags[2].tokens.get(0, []) == echo("abcdef", count)
        refused = session.tags[3].refused
        assert refused is not None and refused.code == grpc.StatusCode.NOT_FOUND.value[0]
        handed_over = session.tags[8].refused
        assert handed_over is not None and handed_over.code == grpc.StatusCode.ABORTED.value[0]
        session.call.cancel()
        async with asyncio.timeout(5):
            while stack.worker.num_requests:
                await asyncio.sleep(0.005)
