"""Attach to a request that has ended reports how it really ended, whatever the client has received."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import grpc
import pytest

from roster_client.client.events import FinishReason
from roster_protos import engine_pb2, plan_pb2
from roster_protos import inference_pb2 as pb
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.interface.step import StepBatch, StepOutput
from scheduler_svc.front.text.tokenizer import ModelText
from scheduler_svc.link.runner_events import Loss
from tests.support.virtual_client import VirtualService, VirtualStream

FAILS_AT = 30


class Imprecise(HashBackend):
    """Its logits are not finite for contexts of `FAILS_AT` tokens that begin with 9."""

    def __init__(self, eos_probability: float = 0.0) -> None:
        super().__init__(num_slots=4, block_size=4, num_blocks=64, context_length=256, eos_probability=eos_probability)

    def step(self, batch: StepBatch) -> StepOutput:
        output = super().step(batch)
        begins = [int(state.tokens[0]) == 9 for state in batch.states]
        failing = (batch.starts + batch.counts >= FAILS_AT) & begins
        output.fail(failing)
        output.statuses[failing] = plan_pb2.ROW_STATUS_NOT_FINITE
        return output


@cache
def _text() -> ModelText:
    return ModelText(Imprecise().model)


def service_with_runner(eos_probability: float = 0.0, **settings: Any) -> VirtualService:
    service = VirtualService(_text(), **{"retention_s": 60, "retention_requests": 8, "no_runner_s": 5, **settings})
    service.add_runner(Imprecise(eos_probability))
    service.step()
    return service


def request(prompt: list[int], max_tokens: int = 100, **fields: Any) -> pb.GenerateRequest:
    made = pb.GenerateRequest(request_id="the-request", **fields)
    made.prompt.token_ids.ids.extend(prompt)
    made.stop.max_tokens = max_tokens
    made.sampling.temperature = 0
    return made


def turns(service: VirtualService, count: int) -> None:
    for _ in range(count):
        service.whole_turn(*service.runners.runners, most_plans=1)
    service.step()


def no_event(service: VirtualService, stream: VirtualStream) -> None:
    turns(service, 110)


def cancelled(service: VirtualService, stream: VirtualStream) -> None:
    stream.cancel()
    turns(service, 2)


def cancelled_by_id(service: VirtualService, stream: VirtualStream) -> None:
    service.front.put(cancel_by_id=engine_pb2.CancelById(handle=1, request_id="the-request"))
    turns(service, 2)


def time_over(service: VirtualService, stream: VirtualStream) -> None:
    service.now_s += 20
    turns(service, 2)


def no_runner(service: VirtualService, stream: VirtualStream) -> None:
    service.runners.kill(max(service.runners.runners), Loss.SILENT)
    service.step()
    service.now_s += 6
    turns(service, 2)


EXPECTED: dict[str, tuple[pb.GenerateRequest, Callable[[VirtualService, VirtualStream], None], FinishReason, str]] = {
    "length": (request([1, 2], 20), no_event, FinishReason.LENGTH, ""),
    "stop token": (request([1, 3, 5]), no_event, FinishReason.STOP, ""),
    "cancel": (request([1, 2]), cancelled, FinishReason.CANCELLED, ""),
    "cancel by id": (request([1, 2]), cancelled_by_id, FinishReason.CANCELLED, ""),
    "deadline": (request([1, 2], timeout_ms=15_000), time_over, FinishReason.DEADLINE, ""),
    "error": (request([9, 2]), no_event, FinishReason.ERROR, "the model's logits were not finite"),
    "no runner": (request([1, 2]), no_runner, FinishReason.UNAVAILABLE, "no runner joined in time"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_finish_that_happened(name: str) -> None:
    asked, happens, reason, message = EXPECTED[name]
    service = service_with_runner(eos_probability=1 / 20 if name == "stop token" else 0.0)
    stream = service.generate(asked)
    turns(service, 10)
    happens(service, stream)
    (choice,) = stream.completion.choices
    finish, tokens = choice.finish, choice.token_ids
    assert finish is not None and (finish.reason, finish.message) == (reason, message)
    assert (finish.stop_token_id == IM_END_ID) == (name == "stop token")
    for cursor in (0, len(tokens) // 2, len(tokens)):
        again = service.attach_to("the-request", [cursor])
        turns(service, 2)
        assert again.error is None and again.over
        assert again.completion.choices[0].finish == finish
        assert again.completion.choices[0].token_ids == tokens[cursor:]
        assert again.completion.usage == stream.completion.usage
    beyond = service.attach_to("the-request", [len(tokens) + 1])
    turns(service, 2)
    if reason in (FinishReason.STOP, FinishReason.LENGTH):
        assert beyond.error is not None and beyond.error.code is grpc.StatusCode.INVALID_ARGUMENT
    else:  # a former scheduler may have sent it more
        assert beyond.completion.choices[0].finish is not None
        assert beyond.completion.choices[0].finish.reason is reason


@pytest.mark.parametrize("name", ["deadline", "error", "cancel by id", "no runner"])
@pytest.mark.parametrize("listens", [True, False])
def test_the_finish_that_happened_after_a_takeover_on_the_way_to_the_client(name: str, listens: bool) -> None:
    """It is recomputed for its log-probabilities and ends with fewer tokens than its client has."""
    asked, happens, reason, message = EXPECTED[name]
    scored = pb.GenerateRequest()
    scored.CopyFrom(asked)
    scored.output.logprobs = 1
    service = service_with_runner()
    stream = service.generate(scored)
    turns(service, 20)
    tokens = stream.completion.choices[0].token_ids
    assert len(tokens) > 15
    if not listens:
        service.clients.clear()
    service.restart_scheduler()
    if name == "error":
        happens(service, stream)
    else:
        turns(service, 4)
        happens(service, stream)
    clients = [service.attach_to("the-request", [len(tokens)])]
    turns(service, 2)
    if listens:
        clients.append(stream)
    for client in clients:
        assert client.error is None
        finish = client.completion.choices[0].finish
        assert finish is not None and (finish.reason, finish.message) == (reason, message)
        if name != "error":  # its tokens are sent again, up to the position where it fails
            assert finish.num_tokens == len(tokens)


def test_a_client_that_left_sends_its_request_again() -> None:
    """Neither a request cut off with its stream nor one without retention is found."""
    service = service_with_runner()
    stream = service.generate(request([1, 2]))
    turns(service, 5)
    stream.disconnect()
    turns(service, 2)
    kept = request([1, 2], on_disconnect=pb.ON_DISCONNECT_KEEP, keep_ms=1000)
    kept.request_id = "kept"
    stream = service.generate(kept)
    turns(service, 5)
    stream.disconnect()
    turns(service, 2)
    service.now_s += 2
    turns(service, 2)
    for request_id in ("the-request", "kept"):
        again = service.attach_to(request_id, [3])
        turns(service, 2)
        assert again.error is not None and again.error.code is grpc.StatusCode.NOT_FOUND


def test_the_id_of_a_cancelled_request_is_free() -> None:
    service = service_with_runner()
    cancelled(service, service.generate(request([1, 2])))
    same = service.generate(request([1, 2], 20))
    turns(service, 30)
    assert same.completion.choices[0].finish is not None
    assert same.completion.choices[0].finish.reason is FinishReason.LENGTH
    cancelled(service, service.generate(request([1, 2])))  # of a request that has already ended: nothing happens
    other = service.generate(request([4, 4], 5))
    turns(service, 8)
    assert other.error is not None and other.error.code is grpc.StatusCode.ALREADY_EXISTS
    found = service.attach_to("the-request", [0])
    turns(service, 2)
    assert found.completion.choices[0].token_ids == same.completion.choices[0].token_ids


def sessions_that_compute(service: VirtualService) -> list[int]:
    """Returns the sessions whose plans in flight have rows of the request."""
    return [
        session
        for session, scheduler in service.engine.pool.schedulers.items()
        for flight in scheduler.in_flight
        if any(sequence.request.request_id == "the-request" for sequence in flight.sequences)
    ]


def test_what_was_refused_as_poison_stays_refused() -> None:
    """It stays refused for a client that returns or sends the same request again: it would crash the next runner."""
    service = service_with_runner()
    stream = service.generate(request([1, 2]))
    turns(service, 2)
    for _ in range(100):
        if stream.over:
            break
        service.step()
        computing = sessions_that_compute(service)
        for session in set(computing):
            service.runners.kill(session, Loss.FAULT)
            service.add_runner(Imprecise())
        if not computing:  # it waits for its isolation, or for a runner that has passed its probe
            service.whole_turn(*service.runners.runners, most_plans=1)
    assert stream.error is not None and stream.error.code is grpc.StatusCode.INTERNAL
    for again in (service.attach_to("the-request", [1]), service.generate(request([1, 2]))):
        turns(service, 2)
        assert again.error is not None and again.error.code is grpc.StatusCode.INTERNAL
        assert str(again.error) == str(stream.error)
