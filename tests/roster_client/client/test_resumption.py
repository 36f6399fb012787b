"""The next call after an error, chosen from the error and the tokens received so far."""

from __future__ import annotations

import grpc
import pytest

from roster_client.client.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    NotFoundError,
    RequestCancelledError,
    RosterError,
    UnavailableError,
)
from roster_client.client.events import Assembler
from roster_client.client.resumption import LONGEST_PAUSE_S, NextCall, Resumption, repeatable
from roster_protos import inference_pb2 as pb

UNAVAILABLE = UnavailableError(grpc.StatusCode.UNAVAILABLE, "gone")
NOT_FOUND = NotFoundError(grpc.StatusCode.NOT_FOUND, "unknown")


def begun(n: int = 1, received: tuple[int, ...] = (), **options: float) -> tuple[Resumption, Assembler]:
    """Returns a stream that has received three tokens of choice 0."""
    request = pb.GenerateRequest(request_id="r", n=n, received_token_ids=received)
    assembler = Assembler((len(received),))
    delta = pb.Delta(index=0, first_index=len(received), token_ids=[7, 8, 9], text="abc")
    list(assembler.events(pb.GenerateResponse(request_id="r", deltas=[delta])))
    return Resumption(assembler, repeatable(request), **{"patience_s": 60.0, **options}), assembler


def test_a_broken_stream_is_attached_to_with_its_cursors_after_growing_pauses() -> None:
    resumption, _ = begun(received=(1, 2))
    retries = [resumption.after(UNAVAILABLE) for _ in range(8)]
    assert all(retry.call is NextCall.ATTACH for retry in retries)
    pauses = [retry.pause_s for retry in retries]
    assert pauses == sorted(pauses) and pauses[0] < 0.1 and pauses[-1] == LONGEST_PAUSE_S
    assert resumption.attach_request() == pb.AttachRequest(request_id="r", received=[5])
    resumption.progress()
    assert resumption.after(UNAVAILABLE).pause_s == pauses[0]


def test_an_unknown_request_is_sent_again_after_the_received_tokens() -> None:
    resumption, _ = begun(received=(1, 2))
    resumption.after(UNAVAILABLE)
    assert resumption.after(NOT_FOUND).call is NextCall.GENERATE
    again = resumption.generate_request()
    assert list(again.received_token_ids) == [1, 2, 7, 8, 9] and again.request_id == "r"
    assert again.sampling.HasField("seed") and not resumption.attach_when_accepted
    exists = AlreadyExistsError(grpc.StatusCode.ALREADY_EXISTS, "known after all")
    assert resumption.after(exists).call is NextCall.ATTACH


def test_several_choices_begin_again_and_are_attached_to_when_accepted() -> None:
    resumption, _ = begun(n=2)
    resumption.after(UNAVAILABLE)
    resumption.after(NOT_FOUND)
    assert not resumption.generate_request().received_token_ids
    assert resumption.attach_when_accepted
    assert resumption.accepted().call is NextCall.ATTACH and not resumption.attach_when_accepted


def test_a_call_that_the_server_cancelled_is_a_broken_one() -> None:
    resumption, _ = begun()
    assert resumption.after(RequestCancelledError(grpc.StatusCode.CANCELLED, "shut down")).call is NextCall.ATTACH


@pytest.mark.parametrize("error", [NOT_FOUND, InvalidRequestError(grpc.StatusCode.INVALID_ARGUMENT, "no")])
def test_other_errors_are_raised(error: RosterError) -> None:
    resumption, _ = begun()
    with pytest.raises(type(error)):
        resumption.after(error)


def test_a_stream_that_never_began_is_not_resumed() -> None:
    resumption = Resumption(Assembler(), repeatable(pb.GenerateRequest()), patience_s=60)
    with pytest.raises(UnavailableError):
        resumption.after(UNAVAILABLE)


def test_patience_and_deadline_end() -> None:
    for options in ({"patience_s": 0.0}, {"deadline_s": 0.0}):
        resumption, _ = begun(**options)
        with pytest.raises(UnavailableError):
            resumption.after(UNAVAILABLE)


def test_repetitions_of_an_attached_stream_are_omitted() -> None:
    """It repeats its id and earlier finishes."""
    _, assembler = begun(n=2)
    finish = pb.Finish(index=1, reason=pb.FINISH_REASON_STOP, num_tokens=0)
    assert len(list(assembler.events(pb.GenerateResponse(finishes=[finish])))) == 1
    assert list(assembler.events(pb.GenerateResponse(request_id="r", finishes=[finish]))) == []


def test_the_same_call_is_the_same_body() -> None:
    one, other = (repeatable(pb.GenerateRequest(request_id="mine")) for _ in range(2))
    assert one == other
    greedy = pb.GenerateRequest(request_id="mine", sampling=pb.SamplingParameters(temperature=0))
    assert repeatable(greedy) == greedy
    drawn = [repeatable(pb.GenerateRequest()) for _ in range(2)]
    assert drawn[0].request_id != drawn[1].request_id and drawn[0].sampling.seed != drawn[1].sampling.seed
