"""Refusals with google.rpc details while another request streams undisturbed."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from roster_protos import engine_pb2
from roster_protos import inference_pb2 as pb
from tests.support.front_stack import CONTEXT_LENGTH, VOCAB_SIZE, front_stack
from tests.support.gathered import echo, gather, request

INVALID = grpc.StatusCode.INVALID_ARGUMENT

BAD = [
    (request("", 10), INVALID, "prompt.text"),
    (pb.GenerateRequest(), INVALID, "prompt"),
    (request("x" * CONTEXT_LENGTH, 10), INVALID, "prompt.text"),
    (pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[VOCAB_SIZE]))), INVALID, "prompt.token_ids.ids[0]"),
    (request("a", 10, sampling=pb.SamplingParameters(temperature=float("inf"))), INVALID, "sampling.temperature"),
    (request("a", 10, sampling=pb.SamplingParameters(top_p=0)), INVALID, "sampling.top_p"),
    (request("a", 10, output=pb.OutputOptions(logprobs=21)), INVALID, "output.logprobs"),
    (request("a", 10, n=0), INVALID, "n"),
    (request("a", 10, adapter="x"), grpc.StatusCode.UNIMPLEMENTED, "adapter"),
    (request("a", 10, request_id="x" * 129), INVALID, "request_id"),
]


def _violated_field(error: grpc.aio.AioRpcError) -> str:
    status = rpc_status.from_call(error)
    details = error_details_pb2.BadRequest()
    assert status is not None and status.details[0].Unpack(details)
    assert status.code == error.code().value[0]
    return details.field_violations[0].field


async def test_each_refusal_names_its_field_and_never_reaches_the_engine() -> None:
    async with front_stack() as stack:
        neighbour = asyncio.create_task(gather(stack.stub.Generate(request("neighbour 🎉", 600))))
        for asked, code, field in BAD:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await gather(stack.stub.Generate(asked))
            assert (refused.value.code(), _violated_field(refused.value)) == (code, field)
        assert not neighbour.done()
        assert (await neighbour).tokens[0] == echo("neighbour 🎉", 600)
        assert len(stack.engine.commands_of("submit")) == 1
        assert stack.worker.num_requests == 0


async def test_a_full_queue_says_when_to_come_back() -> None:
    async with front_stack() as stack:
        stack.engine.refuse = lambda submit: engine_pb2.Refused(
            code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="the queue is full", retry_after_ms=1500
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await gather(stack.stub.Generate(request("a", 10)))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = rpc_status.from_call(refused.value)
        retry = error_details_pb2.RetryInfo()
        assert status is not None and status.details[0].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() == 1500
        assert stack.worker.num_requests == 0
