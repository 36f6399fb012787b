"""Many requests over one bidirectional stream, with everything that can happen to them in between."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from roster_client.client import RosterClient
from roster_client.errors import InvalidRequestError, RequestCancelledError
from roster_client.events import FinishReason, Started
from roster_client.requests import build_request
from runner_svc.byte_tokenizer import IM_END_ID
from runner_svc.hash_model import expected_tokens
from tests.support.processes import RosterProcesses, roster_processes

REQUESTS = 200


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    runner = {"device": "hash", "slots": 16, "kv_tokens": 1024, "max_step_tokens": 64}
    scheduler = {"check": True, "front_workers": 2}
    with roster_processes(tmp_path_factory.mktemp("session"), scheduler=scheduler, runner=runner) as processes:
        yield processes


class Reader:
    """Takes a session's messages apart: tokens and bytes of text by (tag, choice), events by tag."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.texts: dict[tuple[int, int], bytes] = defaultdict(bytes)
        self.finishes: dict[tuple[int, int], pb.Finish] = {}
        self.usages: dict[int, pb.Usage] = {}
        self.refused: dict[int, pb.Status] = {}
        self.messages = 0
        self.rows = 0

    def take(self, message: pb.SessionResponse) -> None:
        """One message; checks that every column fits and that every row joins."""
        self.messages += 1
        rows = len(message.tags)
        self.rows += rows
        indexes = message.indexes or [0] * rows
        counts = message.token_counts or [1] * rows
        assert len(indexes) == len(counts) == len(message.first_indexes) == len(message.text_lengths) == rows
        assert sum(counts) == len(message.token_ids) and sum(message.text_lengths) == len(message.text)
        token = byte = 0
        for row, tag in enumerate(message.tags):
            key = (tag, indexes[row])
            assert message.first_indexes[row] == len(self.tokens[key]), "a row does not join"
            assert key not in self.finishes, "tokens after the finish"
            self.tokens[key] += message.token_ids[token : token + counts[row]]
            piece = message.text[byte : byte + message.text_lengths[row]]
            piece.decode()
            self.texts[key] += piece
            token += counts[row]
            byte += message.text_lengths[row]
        for event in message.events:
            self._event(event)

    def _event(self, event: pb.SessionEvent) -> None:
        assert event.tag not in self.usages and event.tag not in self.refused, "an event after the last one"
        match event.WhichOneof("event"):
            case "finish":
                assert (event.tag, event.finish.index) not in self.finishes, "two finishes"
                self.finishes[event.tag, event.finish.index] = event.finish
            case "usage":
                self.usages[event.tag] = event.usage
            case "refused":
                self.refused[event.tag] = event.refused


async def session(address: str, actions: AsyncIterator[pb.SessionRequest]) -> Reader:
    """Runs a whole session."""
    reader = Reader()
    async with grpc.aio.insecure_channel(address) as channel:
        async for message in inference_pb2_grpc.InferenceServiceStub(channel).Session(actions):
            reader.take(message)
    return reader


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

    async def actions() -> AsyncIterator[pb.SessionRequest]:
        for tag, (prompt, options) in jobs.items():
            yield pb.SessionRequest(tag=tag, generate=build_request([] if tag in bad else prompt, options))
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.02)
            if tag in cancelled:
                yield pb.SessionRequest(tag=tag, cancel=pb.SessionCancel())

    reader = await asyncio.wait_for(session(roster.address, actions()), 60)
    assert set(reader.refused) == bad and set(reader.usages) == set(jobs) - bad
    for tag in bad:
        assert reader.refused[tag].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    for tag in set(jobs) - bad:
        prompt, options = jobs[tag]
        for index in range(options["n"]):
            expected = expected_tokens(
                prompt, options["max_tokens"], temperature=options["temperature"], seed=options["seed"],
                sample_index=index, stop_ids=[IM_END_ID],
            )  # fmt: skip
            got, finish = reader.tokens[tag, index], reader.finishes[tag, index]
            assert finish.num_tokens == len(got)
            if finish.reason == pb.FINISH_REASON_CANCELLED:
                assert tag in cancelled and got == expected[: len(got)]
            else:
                assert got == expected, (tag, index)
                text = bytes(token for token in got if token < 256).decode("utf-8", "replace")
                assert reader.texts[tag, index].decode() == text
    print(f"{reader.messages} messages, {reader.rows} rows")
    assert reader.messages < reader.rows, "the rows of one step should share a message"
    await wait_idle(roster.admin_address)


async def test_a_session_that_is_cut_frees_everything(roster: RosterProcesses, wait_idle: Any) -> None:
    async def actions() -> AsyncIterator[pb.SessionRequest]:
        for tag in range(40):
            options: Any = {"max_tokens": 500, "ignore_eos": True}
            yield pb.SessionRequest(tag=tag, generate=build_request([tag], options))
        await asyncio.sleep(60)

    task = asyncio.create_task(session(roster.address, actions()))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_idle(roster.admin_address)


async def test_a_tag_in_use_ends_the_session(roster: RosterProcesses, wait_idle: Any) -> None:
    async def actions() -> AsyncIterator[pb.SessionRequest]:
        for _ in range(2):
            options: Any = {"max_tokens": 500, "ignore_eos": True}
            yield pb.SessionRequest(tag=7, generate=build_request([1], options))
        await asyncio.sleep(60)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(session(roster.address, actions()), 20)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await wait_idle(roster.admin_address)


async def test_the_typed_session(roster: RosterProcesses, wait_idle: Any) -> None:
    async with RosterClient(roster.address, tenant="acme") as client, client.session() as session:
        prompts = [[number] * 5 for number in range(50)]
        options: Any = {"max_tokens": 30, "temperature": 0.0, "logprobs": 1}
        streams = [session.generate(prompt, **options) for prompt in prompts]
        refused = session.generate([])
        endless = session.generate([1], max_tokens=1000, ignore_eos=True, request_id="endless")
        assert isinstance(await anext(aiter(endless)), Started)
        endless.cancel()
        for prompt, stream in zip(prompts, streams, strict=True):
            completion = await stream.completion()
            expected = expected_tokens(prompt, 30, stop_ids=[IM_END_ID])
            (choice,) = completion.choices
            assert choice.token_ids == expected and stream.received == [len(expected)]
            assert len(choice.logprobs) == len(expected) and completion.usage is not None
        with pytest.raises(InvalidRequestError, match=r"prompt\.token_ids\.ids"):
            await refused.completion()
        cancelled = await endless.completion()
        assert cancelled.choices[0].finish is not None
        assert cancelled.choices[0].finish.reason is FinishReason.CANCELLED
        again = await session.attach(streams[9].request_id, [2]).completion()
        assert again.choices[0].token_ids == expected_tokens(prompts[9], 30, stop_ids=[IM_END_ID])[2:]
        cut = session.generate([2], max_tokens=1000, ignore_eos=True)
        await anext(aiter(cut))
    with pytest.raises(RequestCancelledError):
        await cut.completion()
    await wait_idle(roster.admin_address)
