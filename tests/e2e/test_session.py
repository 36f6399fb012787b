"""Many requests over one bidirectional stream, some refused, some cancelled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from roster_client.client import RosterClient
from roster_client.client.errors import InvalidRequestError, RequestCancelledError
from roster_client.client.events import FinishReason, Started
from roster_client.client.requests import build_request
from roster_client.client.session import Session, SessionStream
from roster_protos import inference_pb2 as pb
from roster_protos import inference_pb2_grpc
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.hash_backend import expected_tokens
from tests.support.processes import RosterProcesses, roster_processes
from tests.support.session_client import SessionClient, TagState

REQUESTS = 200


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    runner = {"device": "hash", "slots": 16, "kv_tokens": 1024, "max_step_tokens": 64}
    scheduler = {"check": True, "front_workers": 2}
    with roster_processes(tmp_path_factory.mktemp("session"), scheduler=scheduler, runner=runner) as processes:
        yield processes


@asynccontextmanager
async def open_session(address: str) -> AsyncIterator[SessionClient]:
    """Opens a session and cuts it on exit."""
    async with grpc.aio.insecure_channel(address) as channel:
        session = SessionClient(inference_pb2_grpc.InferenceServiceStub(channel))
        try:
            yield session
        finally:
            session.call.cancel()
            await asyncio.wait({session.reading})


async def test_many_requests_get_exactly_their_tokens(roster: RosterProcesses, wait_idle: Any) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    jobs: dict[int, tuple[list[int], Any]] = {}
    for tag in rng.sample(range(1 << 32), REQUESTS):
        prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 80))]
        jobs[tag] = prompt, {
            "max_tokens": rng.randrange(1, 60), "n": rng.choice([1, 1, 2]), "seed": rng.randrange(1 << 64),
            "temperature": rng.choice([0.0, 1.0]),
        }  # fmt: skip
    bad = set(rng.sample(sorted(jobs), 20))
    cancelled = set(rng.sample(sorted(set(jobs) - bad), 20))
    async with open_session(roster.address) as session:
        for tag, (prompt, options) in jobs.items():
            await session.generate(tag, build_request([] if tag in bad else prompt, options))
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.02)
            if tag in cancelled:
                await session.call.write(pb.SessionRequest(tag=tag, cancel=pb.SessionCancel()))
        await session.until(*jobs)
    for tag, (prompt, options) in jobs.items():
        state = session.tags[tag]
        if tag in bad:
            assert state.refused is not None and state.refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
            continue
        for index in range(options["n"]):
            check_choice(state, index, prompt, options, may_be_cancelled=tag in cancelled)
    rows = sum(len(tokens) for state in session.tags.values() for tokens in state.tokens.values())
    print(f"{session.messages} messages, {rows} tokens")
    assert session.messages < rows, "the tokens of one step should share a message"
    await wait_idle(roster.admin_address)


def check_choice(state: TagState, index: int, prompt: list[int], options: Any, may_be_cancelled: bool) -> None:
    """Checks that a choice has all its tokens and their text, or a prefix of the tokens if it was cancelled."""
    expected = expected_tokens(
        prompt, options["max_tokens"], temperature=options["temperature"], seed=options["seed"], sample_index=index,
        stop_ids=[IM_END_ID],
    )  # fmt: skip
    got, finish = state.tokens.get(index, []), state.finishes[index]
    assert finish.num_tokens == len(got)
    if finish.reason == pb.FINISH_REASON_CANCELLED:
        assert may_be_cancelled and got == expected[: len(got)]
        return
    assert got == expected
    text = bytes(token for token in got if token < 256).decode("utf-8", "replace")
    assert state.texts[index].decode() == text


async def test_a_session_that_is_cut_frees_everything(roster: RosterProcesses, wait_idle: Any) -> None:
    async with open_session(roster.address) as session:
        for tag in range(40):
            await session.generate(tag, build_request([tag], {"max_tokens": 500, "ignore_eos": True}))
        await asyncio.sleep(1)
    await wait_idle(roster.admin_address)


async def test_a_tag_in_use_ends_the_session(roster: RosterProcesses, wait_idle: Any) -> None:
    async with open_session(roster.address) as session:
        for _ in range(2):
            await session.generate(7, build_request([1], {"max_tokens": 500, "ignore_eos": True}))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await session.until(7)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await wait_idle(roster.admin_address)


async def _started_and_cancelled(session: Session) -> SessionStream:
    """Cancels a long answer that has begun. On a busy machine it may still end first."""
    stream = session.generate([1], max_tokens=1000, ignore_eos=True)
    assert isinstance(await anext(aiter(stream)), Started)
    stream.cancel()
    return stream


async def _is_cancelled(stream: SessionStream) -> bool:
    finish = (await stream.completion()).choices[0].finish
    assert finish is not None and finish.reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
    return finish.reason is FinishReason.CANCELLED


async def test_the_typed_session(roster: RosterProcesses, wait_idle: Any) -> None:
    async with RosterClient(roster.address, tenant="acme") as client, client.session() as session:
        prompts = [[number] * 5 for number in range(50)]
        options: Any = {"max_tokens": 30, "temperature": 0.0, "logprobs": 1, "prompt_logprobs": 1}
        streams = [session.generate(prompt, **options) for prompt in prompts]
        refused = session.generate([])
        endless = await _started_and_cancelled(session)
        for prompt, stream in zip(prompts, streams, strict=True):
            completion = await stream.completion()
            expected = expected_tokens(prompt, 30, stop_ids=[IM_END_ID])
            (choice,) = completion.choices
            assert choice.token_ids == expected and stream.received == [len(expected)]
            assert len(choice.logprobs) == len(expected) and completion.usage is not None
            assert completion.started is not None and len(completion.started.prompt_logprobs) == len(prompt) - 1
        with pytest.raises(InvalidRequestError, match=r"prompt\.token_ids\.ids"):
            await refused.completion()
        assert await _is_cancelled(endless) or any(
            [await _is_cancelled(await _started_and_cancelled(session)) for _ in range(10)]
        )
        again = await session.attach(streams[9].request_id, [2]).completion()
        assert again.choices[0].token_ids == expected_tokens(prompts[9], 30, stop_ids=[IM_END_ID])[2:]
        cut = session.generate([2], max_tokens=1000, ignore_eos=True)
        await anext(aiter(cut))
    with pytest.raises(RequestCancelledError):
        await cut.completion()
    await wait_idle(roster.admin_address)
