"""Checks of a request's constraint that need no compilation, which other processes do for the engine."""

from __future__ import annotations

from roster_protos import inference_pb2
from scheduler_svc.constrained.schema.schema_literals import check_literals
from scheduler_svc.constrained.source import UnusableGrammar, check_size
from scheduler_svc.front.base.refusal import invalid


def constraint_source(request: inference_pb2.GenerateRequest) -> tuple[str, str]:
    """Returns (kind, text) of the request's constraint as the client wrote it; ("", "") without one.

    Raises Refusal for a constraint that is unusable with any model.
    """
    if not request.HasField("constraint"):
        return "", ""
    kind = request.constraint.WhichOneof("kind")
    if kind is None:
        raise invalid("constraint", "set one of `json_schema`, `regex` and `grammar`, or omit the constraint")
    if request.stop.ignore_eos:
        raise invalid(
            "stop.ignore_eos",
            "can't be combined with a constraint, whose output ends when it is complete: omit ignore_eos",
        )
    text: str = getattr(request.constraint, kind)
    try:
        check_size(text)
        check_literals(kind, text)
    except UnusableGrammar as error:
        raise invalid(f"constraint.{kind}", str(error)) from error
    return kind, text
