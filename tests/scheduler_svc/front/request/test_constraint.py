"""Checks of a request's constraint that need no compilation."""

from __future__ import annotations

import grpc
import pytest

from roster_protos import inference_pb2 as pb
from runner_svc.backends.byte_tokenizer import NUM_TOKENS, byte_model
from scheduler_svc.constrained.source import MAX_BYTES
from scheduler_svc.front.base.refusal import Refusal
from scheduler_svc.front.request.preparation import Preparer
from scheduler_svc.front.request.validation import validate
from scheduler_svc.front.text.tokenizer import ModelText


@pytest.fixture(scope="module")
def text() -> ModelText:
    return ModelText(byte_model("hash", "HashModel", NUM_TOKENS, 2048))


def request(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=pb.Prompt(text="hi"), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "source"), [("regex", "[ab]+"), ("json_schema", '{"type": "null"}'), ("grammar", 'start: "a"')]
)
def test_it_goes_to_the_engine_as_it_is(text: ModelText, kind: str, source: str) -> None:
    submit = validate(request(constraint=pb.Constraint(**{kind: source})), text, 4096).to_submit(1, "")
    assert (submit.grammar_kind, submit.grammar) == (kind, source)
    free = validate(request(), text, 4096).to_submit(1, "")
    assert (free.grammar_kind, free.grammar) == ("", "")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"constraint": pb.Constraint()}, "constraint"),
        ({"constraint": pb.Constraint(regex="")}, "constraint.regex"),
        ({"constraint": pb.Constraint(grammar="a" * (MAX_BYTES + 1))}, "constraint.grammar"),
        ({"constraint": pb.Constraint(json_schema='{"type": "integer", "const": -1e300}')}, "constraint.json_schema"),
        ({"constraint": pb.Constraint(grammar='start: %json {"const": 9007199254740993}')}, "constraint.grammar"),
        ({"constraint": pb.Constraint(regex="a"), "stop": pb.StopConditions(ignore_eos=True)}, "stop.ignore_eos"),
    ],
)
def test_an_unusable_constraint_is_refused_by_its_field(text: ModelText, fields: dict[str, object], field: str) -> None:
    with pytest.raises(Refusal) as refused:
        validate(request(**fields), text, 4096)
    assert (refused.value.code, refused.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


def test_a_large_one_does_not_hold_up_the_event_loop() -> None:
    small, large = (request(constraint=pb.Constraint(regex="a" * count)) for count in (10, 60_000))
    assert Preparer.is_quick(small, small.prompt) and not Preparer.is_quick(large, large.prompt)
