"""A request's constraint at the door: what can be said of it without compiling it, which the engine has others do."""

from __future__ import annotations

from roster_protos import inference_pb2
from scheduler_svc.constrained.schema.schema_literals import check_literals
from scheduler_svc.constrained.source import UnusableGrammar, check_size
from scheduler_svc.front.base.refusal import invalid


def constraint_source(request: inference_pb2.GenerateRequest) -> tuple[str, str]:
    """(kind, text) of what the request's output must match, as its client wrote it; ("", "") for anything.

    Raises Refusal for a constraint that can't be used whatever the model.
    """
    if not request.HasField("constraint"):
        return "", ""
    kind = request.constraint.WhichOneof("kind")
    if kind is None:
        raise invalid("constraint", "set one of `json_schema`, `regex` and `grammar`, or leave it out")
    if request.stop.ignore_eos:
        raise invalid("stop.ignore_eos", "a constrained text ends where it is complete; leave it out")
    text: str = getattr(request.constraint, kind)
    try:
        check_size(text)
        check_literals(kind, text)
    except UnusableGrammar as error:
        raise invalid(f"constraint.{kind}", str(error)) from error
    return kind, text
