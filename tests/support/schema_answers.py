"""Checks answers against their schema."""

from __future__ import annotations

import json

import jsonschema

from roster_client.client.events import Completion, FinishReason
from tests.support.json_schemas import Schema


def assert_valid(schema: Schema, completion: Completion) -> None:
    """Checks that every choice has stopped by itself with an instance of the schema."""
    for choice in completion.choices:
        assert choice.finish is not None and choice.finish.reason is FinishReason.STOP, (schema, choice)
        jsonschema.Draft202012Validator(schema).validate(json.loads(choice.text))
