"""Schemas of forced tool calls: objects where the gateway's schema names no type."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("smg_grpc_proto")

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from scheduler_svc.front.gateway.request_mapping import to_generate_request
from scheduler_svc.front.gateway.tool_schemas import NO_PARAMETERS, with_objects


def call(parameters: object) -> dict[str, object]:
    """Returns the gateway's schema of a call of one tool."""
    properties = {"name": {"type": "string", "enum": ["f"]}, "parameters": parameters}
    return {"properties": properties, "required": ["name", "parameters"]}


def calls(*parameters: object) -> dict[str, object]:
    """Returns the gateway's schema for `tool_choice: required`."""
    return {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": [call(one) for one in parameters]}}


TEXT = {"type": "string"}
UNTYPED = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({}, NO_PARAMETERS),
        (UNTYPED, {"type": "object", **UNTYPED}),
        (
            calls({}, UNTYPED, {"type": "string"}),
            calls(NO_PARAMETERS, {"type": "object", **UNTYPED}, {"type": "string"}),
        ),
    ],
)
def test_a_schema_without_a_type_gets_objects(schema: object, expected: object) -> None:
    assert json.loads(with_objects(json.dumps(schema))) == expected
    asked = vllm.GenerateRequest(sampling_params=vllm.SamplingParams(json_schema=json.dumps(schema)))
    assert json.loads(to_generate_request(asked).constraint.json_schema) == expected


@pytest.mark.parametrize(
    "schema",
    ['{"type": "null"}', '{"enum": ["a"]}', '{"anyOf": [{}]}', '{"$ref": "#/$defs/a"}', "true", "[1]", "{", "3", "",
     '{"type": "array", "items": {"anyOf": [{"properties": {"name": {}}}]}}', '{"type": "array", "items": []}',
     '{"type": "array", "items": {"anyOf": 3}}', "[" * 100_000],
)  # fmt: skip
def test_other_schemas_are_passed_on_unchanged(schema: str) -> None:
    assert with_objects(schema) == schema
