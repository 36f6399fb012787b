"""A session whose client sends but does not read: its open requests are bounded."""

from __future__ import annotations

import asyncio

import pytest

from roster_protos import inference_pb2 as pb
from scheduler_svc.front.rpc import session as session_module
from tests.support.front_stack import front_stack
from tests.support.session_client import SessionClient


def request(text: str, max_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=pb.Prompt(text=text), stop=pb.StopConditions(max_tokens=max_tokens))


async def test_no_more_is_read_of_a_client_than_it_may_have_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MOST_OPEN_TAGS", 4)
    async with front_stack(step_s=0.001) as stack:
        stack.engine.stepping.clear()
        client = SessionClient(stack.stub)
        for tag in range(20):
            await client.generate(tag, request(f"number {tag}", 5))
        while len(stack.engine.commands_of("submit")) < 4:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert len(stack.engine.commands_of("submit")) == 4 and stack.worker.num_requests == 4
        stack.engine.stepping.set()
        await client.until(*range(20))
        assert all(state.usage is not None for state in client.tags.values())


async def test_a_client_that_never_reads_holds_what_its_requests_may_say_and_no_more() -> None:
    """Its tokens merge into fewer and bigger messages; other streams of the worker are not affected."""
    async with front_stack(step_s=0.001, flush_ms=0) as stack:
        call = stack.stub.Session()
        for tag in range(50):
            await call.write(pb.SessionRequest(tag=tag, generate=request("never read", 2000)))
        while stack.engine.commands_of("submit")[49:] == []:
            await asyncio.sleep(0.01)
        other = [message async for message in stack.stub.Generate(request("a neighbour", 300))]
        assert sum(len(delta.token_ids) for message in other for delta in message.deltas) == 300
        deadline = asyncio.get_running_loop().time() + 60
        while any(sequence.end is None for r in stack.engine.requests.values() for sequence in r.sequences):
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.05)
        messages, tokens, ended = 0, 0, 0
        while ended < 50:
            response = await asyncio.wait_for(call.read(), 30)
            messages += 1
            tokens += len(response.token_ids)
            ended += sum(event.HasField("usage") for event in response.events)
        assert tokens == 50 * 2000 and messages < 2000
        call.cancel()
