"""Refusals of the front and of the engine as google.rpc.Status."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from roster_protos import engine_pb2
from scheduler_svc.front.base.refusal import Refusal, invalid, unimplemented


def details(
    status: status_pb2.Status,
) -> tuple[error_details_pb2.BadRequest | None, error_details_pb2.RetryInfo | None]:
    bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    has_bad = any(detail.Unpack(bad) for detail in status.details)
    has_retry = any(detail.Unpack(retry) for detail in status.details)
    return (bad if has_bad else None), (retry if has_retry else None)


def test_a_field_becomes_a_violation() -> None:
    refusal = invalid("sampling.top_p", "2 is too much; send at most 1")
    status = refusal.status()
    bad, retry = details(status)
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert status.message == "sampling.top_p: 2 is too much; send at most 1"
    assert bad is not None and [(v.field, v.description) for v in bad.field_violations] == [
        ("sampling.top_p", status.message)
    ]
    assert retry is None


def test_a_delay_becomes_retry_info() -> None:
    status = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", retry_after_ms=1500).status()
    bad, retry = details(status)
    assert bad is None
    assert retry is not None and retry.retry_delay.ToMilliseconds() == 1500


def test_unimplemented_names_the_field() -> None:
    refusal = unimplemented("adapter", "none here")
    assert (refusal.code, refusal.field) == (grpc.StatusCode.UNIMPLEMENTED, "adapter")


def test_metadata_and_session_carry_the_same_status() -> None:
    refusal = invalid("n", "100 is too many")
    ((key, value),) = refusal.trailing_metadata()
    session = refusal.session_status()
    assert key == "grpc-status-details-bin"
    assert value == session.details
    assert status_pb2.Status.FromString(value) == refusal.status()
    assert (session.code, session.message) == (3, refusal.message)


def test_the_engines_refusal_is_taken_over() -> None:
    refusal = Refusal.from_engine(engine_pb2.Refused(code=8, message="full", field="", retry_after_ms=40))
    assert (refusal.code, refusal.message, refusal.field, refusal.retry_after_ms) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "full",
        "",
        40,
    )


@pytest.mark.parametrize("code", [0, 17, -1, 999])
def test_a_code_that_refuses_nothing_is_unknown(code: int) -> None:
    assert Refusal.from_engine(engine_pb2.Refused(code=code)).code is grpc.StatusCode.UNKNOWN
