"""A stream that is cut and attached again through any worker continues without a gap or a repetition."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from roster_client.client import EventStream, RosterClient
from roster_client.client.errors import InvalidRequestError, NotFoundError, RosterError
from roster_client.client.events import Delta, FinishReason, Started
from roster_client.client.requests import OnDisconnect, Options
from runner_svc.backends.hash_backend import expected_tokens
from tests.support.processes import RosterProcesses, roster_processes

TOKENS = 150


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    runner = {"device": "hash", "slots": 16, "test_backend": {"step_ms": 2}}
    scheduler = {"check": True, "front_workers": 2, "flush_ms": 0}
    with roster_processes(tmp_path_factory.mktemp("attach"), scheduler=scheduler, runner=runner) as processes:
        yield processes


def kept(request_id: str, n: int = 1) -> Options:
    return {
        "request_id": request_id, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0, "n": n,
        "on_disconnect": OnDisconnect.KEEP, "keep_ms": 20_000,
    }  # fmt: skip


async def read_some(stream: EventStream, tokens: dict[int, list[int]], texts: dict[int, str], deltas: int) -> bool:
    """Reads at most `deltas` deltas; returns True if the stream ended before that."""
    async for event in stream:
        if isinstance(event, Delta):
            got = tokens.setdefault(event.index, [])
            assert event.first_index == len(got)
            got += event.token_ids
            texts[event.index] = texts.get(event.index, "") + event.text
            deltas -= 1
        if deltas <= 0:
            return False
    return True


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_cut_many_times_is_whole(roster: RosterProcesses, wait_idle: Any, n: int) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)

    async def one(number: int) -> None:
        prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 30))]
        request_id = f"cut-{n}-{number}"
        tokens: dict[int, list[int]] = {}
        texts: dict[int, str] = {}
        # Each connection may reach another worker.
        async with RosterClient(roster.address) as client:
            done = await read_some(client.generate(prompt, **kept(request_id, n)), tokens, texts, rng.randrange(1, 30))
        while not done:
            cursors = [len(tokens.get(index, [])) for index in range(n)]
            async with RosterClient(roster.address) as client:
                done = await read_some(client.attach(request_id, cursors), tokens, texts, rng.randrange(1, 40))
        expected = expected_tokens(prompt, TOKENS)
        for index in range(n):
            assert tokens[index] == expected
            assert texts[index] == bytes(token for token in expected if token < 256).decode("utf-8", "replace")

    await asyncio.gather(*[one(number) for number in range(12)])
    await wait_idle(roster.admin_address)


async def test_a_finished_request_stays_attachable(roster: RosterProcesses) -> None:
    async with RosterClient(roster.address) as client:
        first = await client.generate([5], **kept("finished")).completion()
        cursor = random.randrange(TOKENS + 1)
        print(f"cursor {cursor}")
        again = await client.attach("finished", [cursor]).completion()
        assert (again.choices[0].token_ids if again.choices else []) == first.choices[0].token_ids[cursor:]
        finish = again.choices[0].finish
        assert finish is not None and (finish.reason, finish.num_tokens) == (FinishReason.LENGTH, TOKENS)
        assert again.usage == first.usage
        # A request with the same id and body attaches, too.
        same = await client.generate([5], **kept("finished")).completion()
        assert same.choices[0].token_ids == first.choices[0].token_ids


async def test_the_former_stream_is_aborted(roster: RosterProcesses) -> None:
    async with RosterClient(roster.address) as client, RosterClient(roster.address) as other:
        former = client.generate([6], **kept("taken"))
        assert isinstance(await anext(aiter(former)), Started)
        whole = await other.attach("taken").completion()
        assert whole.choices[0].token_ids == expected_tokens([6], TOKENS)
        with pytest.raises(RosterError) as caught:
            await former.completion()
        assert caught.value.code is grpc.StatusCode.ABORTED


async def test_attaches_that_are_refused(roster: RosterProcesses, wait_idle: Any) -> None:
    async with RosterClient(roster.address) as client, RosterClient(roster.address, tenant="other") as other:
        with pytest.raises(NotFoundError):
            await client.attach("never-sent").completion()
        await client.generate([7], **kept("mine")).completion()
        with pytest.raises(NotFoundError):
            await other.attach("mine").completion()
        with pytest.raises(InvalidRequestError):
            await client.attach("mine", [TOKENS + 1]).completion()
        # Without KEEP, cutting the stream ends the request.
        stream = client.generate([8], request_id="brief", max_tokens=4000, ignore_eos=True)
        await anext(aiter(stream))
        stream.cancel()
        await wait_idle(roster.admin_address)


async def test_received_tokens_continue_without_server_state(roster: RosterProcesses) -> None:
    expected = expected_tokens([1, 2, 3], TOKENS)
    received = random.randrange(1, TOKENS)
    print(f"received {received}")
    async with RosterClient(roster.address) as client:
        stream = client.generate(
            [1, 2, 3], received_token_ids=expected[:received], max_tokens=TOKENS, ignore_eos=True, temperature=0.0
        )
        completion = await stream.completion()
    assert completion.choices[0].token_ids == expected[received:]
    assert completion.choices[0].finish is not None and completion.choices[0].finish.num_tokens == TOKENS
