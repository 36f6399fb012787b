"""A request's constraint, compiled once here so that what can't be used is refused before the engine hears of it."""

from __future__ import annotations

from protos import inference_pb2
from scheduler_svc.constrained.grammar_text import UnusableGrammar, grammar_text
from scheduler_svc.front.refusal import invalid
from scheduler_svc.front.tokenizer import ModelText


def constraint_grammar(request: inference_pb2.GenerateRequest, text: ModelText) -> str:
    """What the request's output must match, as llguidance takes it; "" for anything. Takes up to seconds.

    Raises Refusal for a constraint that can't be used, and for received tokens that do not begin a match.
    """
    if not request.HasField("constraint"):
        return ""
    kind = request.constraint.WhichOneof("kind")
    if kind is None:
        raise invalid("constraint", "set one of `json_schema`, `regex` and `grammar`, or leave it out")
    if request.stop.ignore_eos:
        raise invalid("stop.ignore_eos", "a constrained text ends where it is complete; leave it out")
    try:
        grammar = grammar_text(kind, getattr(request.constraint, kind))
        matcher = text.grammars.compile(grammar)
    except UnusableGrammar as error:
        raise invalid(f"constraint.{kind}", str(error)) from error
    taken = matcher.try_consume_tokens(list(request.received_token_ids))
    if taken < len(request.received_token_ids):
        raise invalid(
            f"received_token_ids[{taken}]",
            f"{request.received_token_ids[taken]} can't follow those before it under this constraint",
        )
    return grammar
