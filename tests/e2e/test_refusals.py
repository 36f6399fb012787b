"""Every refusal comes at once and names its field, while a concurrent stream is undisturbed."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from roster_client.client import RosterClient
from roster_client.client.errors import AlreadyExistsError, InvalidRequestError, NotSupportedError, OverloadedError
from roster_client.client.events import Delta
from roster_client.client.requests import Message, build_request
from roster_protos import inference_pb2 as pb
from runner_svc.backends.hash_backend import expected_tokens
from tests.support.processes import RosterProcesses, roster_processes

VOCABULARY = 259
CONTEXT = 512
POOL_TOKENS = 384
WAITING = 3
AT_ONCE_S = 2.0
NEIGHBOUR_PROMPT = [9, 8, 7]
NEIGHBOUR_TOKENS = 300


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    runner = {
        "device": "hash", "slots": 2, "kv_tokens": POOL_TOKENS, "context_length": CONTEXT,
        "test_backend": {"step_ms": 10},
    }  # fmt: skip
    scheduler = {"max_waiting_requests": WAITING, "max_waiting_tokens": 200, "check": True}
    with roster_processes(tmp_path_factory.mktemp("refusals"), scheduler=scheduler, runner=runner) as processes:
        yield processes


def changed(**fields: Any) -> pb.GenerateRequest:
    """Returns a valid request with top-level fields changed."""
    return pb.GenerateRequest(**{"prompt": pb.Prompt(text="hello"), **fields})


def sampling(**fields: Any) -> pb.GenerateRequest:
    return changed(sampling=pb.SamplingParameters(**fields))


def stop(**fields: Any) -> pb.GenerateRequest:
    return changed(stop=pb.StopConditions(**fields))


def ids(*token_ids: int) -> pb.Prompt:
    return pb.Prompt(token_ids=pb.TokenIds(ids=token_ids))


NAN, INFINITY = math.nan, math.inf
REFUSED = [
    ("prompt", changed(prompt=pb.Prompt())),
    ("prompt", pb.GenerateRequest()),
    ("prompt.text", changed(prompt=pb.Prompt(text=""))),
    ("prompt.token_ids.ids", changed(prompt=ids())),
    ("prompt.token_ids.ids[1]", changed(prompt=ids(1, VOCABULARY))),
    ("prompt.token_ids.ids", changed(prompt=ids(*[1] * CONTEXT))),
    ("prompt.text", changed(prompt=pb.Prompt(text="long " * CONTEXT))),
    ("prompt.text", changed(prompt=pb.Prompt(text="long " * 100_000))),
    ("prompt.chat.messages", changed(prompt=pb.Prompt(chat=pb.Chat()))),
    ("prompt.chat.messages[0].role", build_request([Message("", "hi")], {})),
    ("prompt", changed(prompt=ids(*[1] * (POOL_TOKENS + 100)))),
    ("stop.max_tokens", stop(max_tokens=POOL_TOKENS + 50)),
    ("stop.max_tokens", stop(max_tokens=0)),
    ("stop.max_tokens", stop(max_tokens=2**32 - 1)),
    ("stop.min_tokens", stop(max_tokens=3, min_tokens=4)),
    ("stop.strings[1]", stop(strings=["a", ""])),
    ("stop.strings[0]", stop(strings=["a" * 257])),
    ("stop.strings", stop(strings=[str(i) for i in range(65)])),
    ("stop.token_ids[0]", stop(token_ids=[VOCABULARY])),
    ("stop.token_ids", stop(token_ids=range(65))),
    ("n", changed(n=0)),
    ("n", changed(n=65)),
    ("output.logprobs", changed(output=pb.OutputOptions(logprobs=21))),
    ("output.prompt_logprobs", changed(output=pb.OutputOptions(prompt_logprobs=21))),
    ("priority", changed(priority=101)),
    ("priority", changed(priority=-101)),
    ("timeout_ms", changed(timeout_ms=0)),
    ("timeout_ms", changed(timeout_ms=2**32 - 1)),
    ("ttft_target_ms", changed(ttft_target_ms=0)),
    ("itl_target_ms", changed(itl_target_ms=0)),
    ("keep_ms", changed(keep_ms=3_600_001)),
    ("on_disconnect", changed(on_disconnect=7)),
    ("request_id", changed(request_id="x" * 129)),
    ("received_token_ids[0]", changed(received_token_ids=[VOCABULARY])),
    ("n", changed(received_token_ids=[1], n=2)),
    *[
        (f"sampling.{name}", sampling(**{name: value}))
        for name, values in {
            "temperature": (NAN, INFINITY, -0.5, 100.5),
            "top_p": (NAN, INFINITY, 0.0, 1.5),
            "min_p": (NAN, -INFINITY, -0.1, 1.1),
            "repetition_penalty": (NAN, INFINITY, 0.0, 10.5),
            "presence_penalty": (NAN, INFINITY, -10.5, 10.5),
            "frequency_penalty": (NAN, -INFINITY, -10.5, 10.5),
        }.items()
        for value in values
    ],
    (f"sampling.logit_bias[{VOCABULARY}]", sampling(logit_bias={VOCABULARY: 1.0})),
    ("sampling.logit_bias[5]", sampling(logit_bias={5: 101.0})),
    ("sampling.logit_bias[5]", sampling(logit_bias={5: NAN})),
    ("constraint.json_schema", changed(constraint=pb.Constraint(json_schema='{"type": "objct"}'))),
    ("constraint.regex", changed(constraint=pb.Constraint(regex="(a"))),
    ("constraint.grammar", changed(constraint=pb.Constraint(grammar="start: missing"))),
]
NOT_SUPPORTED = [
    ("adapter", changed(adapter="some-lora")),
]


@asynccontextmanager
async def undisturbed_neighbour(client: RosterClient) -> Any:
    """Runs a stream beside the block; checks that its tokens are right and that it never pauses for long."""

    async def stream() -> float:
        tokens: list[int] = []
        longest, last = 0.0, time.monotonic()
        options: Any = {"max_tokens": NEIGHBOUR_TOKENS, "ignore_eos": True, "temperature": 0.0}
        async for event in client.generate(NEIGHBOUR_PROMPT, **options):
            if isinstance(event, Delta):
                longest, last = max(longest, time.monotonic() - last), time.monotonic()
                tokens += event.token_ids
        assert tokens == expected_tokens(NEIGHBOUR_PROMPT, NEIGHBOUR_TOKENS)
        return longest

    task = asyncio.create_task(stream())
    await asyncio.sleep(0.2)
    try:
        yield
    finally:
        assert not task.done(), "the concurrent stream ended before the block"
        # Steps take 10 ms: only the refused requests could cause a pause of a second.
        assert await asyncio.wait_for(task, 60) < 1.0


async def refuse_all(client: RosterClient, cases: list[tuple[str, pb.GenerateRequest]], kind: type[Exception]) -> None:
    for field, request in cases:
        started = time.monotonic()
        with pytest.raises(kind) as caught:
            await client.send(request).completion()
        error: Any = caught.value
        assert [violation.field for violation in error.violations] == [field], (field, error)
        assert len(error.message) > 20 and field in error.message, error
        assert time.monotonic() - started < AT_ONCE_S, (field, "was not refused at once")


async def test_invalid_requests(roster: RosterProcesses, wait_idle: Any) -> None:
    before = await wait_idle(roster.admin_address)
    async with RosterClient(roster.address) as client, undisturbed_neighbour(client):
        await refuse_all(client, REFUSED, InvalidRequestError)
        await refuse_all(client, NOT_SUPPORTED, NotSupportedError)
    after = await wait_idle(roster.admin_address)
    # Refused requests cost no prefill: only the neighbour's prompt was computed.
    assert after.totals.prefill_tokens - before.totals.prefill_tokens <= len(NEIGHBOUR_PROMPT)
    assert after.totals.finished - before.totals.finished == 1


async def test_an_id_in_use_with_another_body(roster: RosterProcesses, wait_idle: Any) -> None:
    await wait_idle(roster.admin_address)
    async with RosterClient(roster.address) as client, undisturbed_neighbour(client):
        first = client.generate("one", raw=True, request_id="same", max_tokens=50, ignore_eos=True)
        await anext(aiter(first))
        with pytest.raises(AlreadyExistsError, match="same"):
            await client.generate("two", raw=True, request_id="same", max_tokens=50, ignore_eos=True).completion()
        # Request ids are separate for each tenant.
        async with RosterClient(roster.address, tenant="other") as other:
            completion = await other.generate(
                "two", raw=True, request_id="same", max_tokens=2, ignore_eos=True
            ).completion()
            assert len(completion.choices[0].token_ids) == 2
        assert len((await first.completion()).choices[0].token_ids) == 50


async def test_a_full_queue_returns_a_retry_time(roster: RosterProcesses, wait_idle: Any) -> None:
    async with RosterClient(roster.address) as client:
        await wait_idle(roster.admin_address)
        async with undisturbed_neighbour(client):
            # One takes the free slot before the others start to wait.
            streams = [client.generate([1], max_tokens=100, ignore_eos=True)]
            await anext(event async for event in streams[0] if isinstance(event, Delta))
            streams += [client.generate([2], max_tokens=100, ignore_eos=True) for _ in range(WAITING)]
            await asyncio.gather(*[anext(aiter(stream)) for stream in streams[1:]])
            for request in (changed(), changed(n=2)):
                with pytest.raises(OverloadedError) as caught:
                    await client.send(request).completion()
                assert caught.value.retry_after_s is not None and 0 < caught.value.retry_after_s <= 60
            for stream in streams:
                stream.cancel()
        await wait_idle(roster.admin_address)


async def test_too_many_waiting_prompt_tokens(roster: RosterProcesses, wait_idle: Any) -> None:
    async with RosterClient(roster.address) as client:
        await wait_idle(roster.admin_address)
        async with undisturbed_neighbour(client):
            busy = client.generate([1], max_tokens=100, ignore_eos=True)
            await anext(event async for event in busy if isinstance(event, Delta))
            waiting = client.generate([2] * 150, max_tokens=10, request_id="big")
            await anext(aiter(waiting))
            with pytest.raises(OverloadedError, match=r"\d+ tokens are waiting") as caught:
                await client.generate([3] * 60, max_tokens=10).completion()
            assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            busy.cancel()
            waiting.cancel()
        await wait_idle(roster.admin_address)
