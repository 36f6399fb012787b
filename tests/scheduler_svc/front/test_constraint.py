"""A request's constraint at the door: compiled, or refused at its field."""

from __future__ import annotations

import grpc
import pytest

from protos import inference_pb2 as pb
from runner_svc.byte_tokenizer import NUM_TOKENS, byte_model
from scheduler_svc.front.constraint import constraint_grammar
from scheduler_svc.front.preparation import Preparer
from scheduler_svc.front.refusal import Refusal
from scheduler_svc.front.tokenizer import ModelText
from scheduler_svc.front.validation import validate


@pytest.fixture(scope="module")
def text() -> ModelText:
    return ModelText(byte_model("hash", "HashModel", NUM_TOKENS, 2048))


def request(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=pb.Prompt(text="hi"), **fields)  # type: ignore[arg-type]


def test_the_grammar_goes_to_the_engine(text: ModelText) -> None:
    asked = request(constraint=pb.Constraint(regex="[ab]+"))
    submit = validate(asked, text, 4096).to_submit(1, "")
    assert submit.grammar == constraint_grammar(asked, text) != ""
    assert validate(request(), text, 4096).to_submit(1, "").grammar == ""


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"constraint": pb.Constraint()}, "constraint"),
        ({"constraint": pb.Constraint(regex="")}, "constraint.regex"),
        ({"constraint": pb.Constraint(json_schema="[1]")}, "constraint.json_schema"),
        ({"constraint": pb.Constraint(regex="a"), "stop": pb.StopConditions(ignore_eos=True)}, "stop.ignore_eos"),
        ({"constraint": pb.Constraint(regex="ab"), "received_token_ids": [97, 97]}, "received_token_ids[1]"),
    ],
)
def test_what_can_not_be_used_is_refused_at_its_field(text: ModelText, fields: dict[str, object], field: str) -> None:
    with pytest.raises(Refusal) as refused:
        validate(request(**fields), text, 4096)
    assert (refused.value.code, refused.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


def test_received_tokens_begin_a_match(text: ModelText) -> None:
    assert constraint_grammar(request(constraint=pb.Constraint(regex="ab"), received_token_ids=[97]), text)


def test_compiling_does_not_hold_up_the_event_loop() -> None:
    asked = request(constraint=pb.Constraint(regex="a"))
    assert Preparer.is_quick(request(), request().prompt) and not Preparer.is_quick(asked, asked.prompt)
