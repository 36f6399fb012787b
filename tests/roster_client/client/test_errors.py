from __future__ import annotations

import random

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from roster_client.client import errors
from roster_client.client.errors import FieldViolation, RosterError, from_rpc_error, from_status
from roster_client.client.resumption import is_broken


class Call(grpc.RpcError):
    """A failed call with this status and trailing metadata."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, bytes], ...]) -> None:
        self._answers = code, details, trailing

    def code(self) -> grpc.StatusCode:
        return self._answers[0]

    def details(self) -> str:
        return self._answers[1]

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._answers[2]


def details_of(code: grpc.StatusCode, message: str, delay_ns: int) -> bytes:
    status = status_pb2.Status(code=code.value[0], message=message)
    violation = error_details_pb2.BadRequest.FieldViolation(field="stop.max_tokens", description="must be at least 1")
    status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromNanoseconds(delay_ns)
    status.details.add().Pack(retry)
    return status.SerializeToString()


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_details_are_parsed_for_every_code_in_calls_and_sessions(code: grpc.StatusCode) -> None:
    delay_ns = random.randrange(1, 10**11)
    print(f"delay {delay_ns} ns")
    details = details_of(code, "no", delay_ns)
    call = Call(code, "no", (("other", b"x"), (errors.STATUS_DETAILS_KEY, details)))
    for error in (from_rpc_error(call), from_status(code.value[0], "no", details)):
        assert error.code is code and error.message == "no"
        assert error.violations == (FieldViolation("stop.max_tokens", "must be at least 1"),)
        assert error.retry_after_s == pytest.approx(delay_ns / 1e9)
        assert "stop.max_tokens: must be at least 1" in str(error) and "try again in" in str(error)


def test_classes() -> None:
    expected = {
        "INVALID_ARGUMENT": errors.InvalidRequestError,
        "NOT_FOUND": errors.NotFoundError,
        "ALREADY_EXISTS": errors.AlreadyExistsError,
        "RESOURCE_EXHAUSTED": errors.OverloadedError,
        "DEADLINE_EXCEEDED": errors.DeadlineError,
        "CANCELLED": errors.RequestCancelledError,
        "UNAVAILABLE": errors.UnavailableError,
        "UNIMPLEMENTED": errors.NotSupportedError,
        "INTERNAL": RosterError,
    }
    for name, kind in expected.items():
        assert type(from_rpc_error(Call(grpc.StatusCode[name], "x", ()))) is kind


@pytest.mark.parametrize("details", [b"", b"\xff\xff garbage"])
def test_broken_details_do_not_hide_the_status(details: bytes) -> None:
    trailing = ((errors.STATUS_DETAILS_KEY, details),)
    error = from_rpc_error(Call(grpc.StatusCode.NOT_FOUND, "no such request", trailing))
    assert isinstance(error, errors.NotFoundError)
    assert (str(error), error.violations, error.retry_after_s) == ("no such request", (), None)
    assert str(from_rpc_error(Call(grpc.StatusCode.INTERNAL, "", ()))) == "the call failed with INTERNAL"


def test_a_message_that_could_not_be_written_is_a_broken_connection() -> None:
    """grpc.aio's error (`set_internal_error`) when a session's connection breaks during a write."""
    error = from_rpc_error(Call(grpc.StatusCode.INTERNAL, "Internal error from Core", ()))
    assert isinstance(error, errors.UnavailableError) and is_broken(error)
    assert "connection broke" in str(error)


def test_a_call_that_a_server_cut_off_as_it_shut_down_may_be_sent_again() -> None:
    """Also one that had not begun, which the caller sends again only if no server was there."""
    error = from_rpc_error(Call(grpc.StatusCode.CANCELLED, "CANCELLED", ()))
    assert isinstance(error, errors.UnavailableError) and is_broken(error) and "shut down" in str(error)
    own = from_rpc_error(Call(grpc.StatusCode.CANCELLED, "Locally cancelled by application!", ()))
    assert isinstance(own, errors.RequestCancelledError)


def test_grpcs_words_for_a_passed_deadline_are_ours_and_the_servers_are_kept() -> None:
    for details in ("Deadline Exceeded", "Stream removed (Deadline Exceeded)"):
        error = from_rpc_error(Call(grpc.StatusCode.DEADLINE_EXCEEDED, details, ()))
        assert isinstance(error, errors.DeadlineError) and str(error).startswith("the call's deadline passed")
    assert str(from_rpc_error(Call(grpc.StatusCode.DEADLINE_EXCEEDED, "it was too late", ()))) == "it was too late"


def test_another_protocols_server_is_named_as_such() -> None:
    words = "last error: UNAVAILABLE: ipv4:127.0.0.1:1: Failed parsing HTTP/2 (Expected SETTINGS frame)"
    error = from_rpc_error(Call(grpc.StatusCode.UNAVAILABLE, words, ()))
    assert isinstance(error, errors.UnavailableError) and "does not speak gRPC" in str(error)
    words = "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: WRONG_VERSION_NUMBER: Invalid certificate"
    assert "does not use TLS" in str(from_rpc_error(Call(grpc.StatusCode.UNAVAILABLE, words, ())))
