"""Is an answer what its schema asks for?"""

from __future__ import annotations

import json

import jsonschema

from roster_client.client.events import Completion, FinishReason
from tests.support.json_schemas import Schema


def assert_valid(schema: Schema, completion: Completion) -> None:
    """Every choice has ended by itself with an instance of the schema."""
    for choice in completion.choices:
        assert choice.finish is not None and choice.finish.reason is FinishReason.STOP, (schema, choice)
        jsonschema.Draft202012Validator(schema).validate(json.loads(choice.text))
