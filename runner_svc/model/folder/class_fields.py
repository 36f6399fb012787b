"""What transformers' configuration classes declare: type and default of each key, read from `class_rows`.

They are kept there because importing transformers costs seconds at each start.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from runner_svc.model.folder.class_rows import DECLARED


@dataclass(frozen=True, slots=True)
class Field:
    """A key that a class declares."""

    kinds: tuple[str, ...]
    """Types that a value may have: int, float, bool, str, null, dict, list[int], list[str]; an int is not a float."""
    default: Any


@dataclass(frozen=True, slots=True)
class ClassFields:
    """One configuration class."""

    model_type: str
    default_theta: float
    """RoPE's base for a configuration that has none; 10,000 for a class that declares none."""
    fields: dict[str, Field]
    """By key; other names of a key have its type."""
    other_names: dict[str, str]
    """The key that each other name stands for."""


BASE_FIELDS = {
    "architectures": Field(("list[str]", "null"), None),
    "chunk_size_feed_forward": Field(("int",), 0),
    "dtype": Field(("str", "null"), None),
    "id2label": Field(("dict", "null"), None),
    "is_encoder_decoder": Field(("bool",), False),
    "label2id": Field(("dict", "null"), None),
    "output_hidden_states": Field(("bool", "null"), False),
    "problem_type": Field(("str", "null"), None),
    "return_dict": Field(("bool", "null"), True),
    "transformers_version": Field(("str", "null"), None),
}
"""What all classes declare."""


@cache
def class_fields(architecture: str) -> ClassFields:
    """Returns the class of an architecture of `DECLARED`."""
    lines = DECLARED[architecture].strip().splitlines()
    other_names = dict(line.split(" -> ") for line in lines if " -> " in line)
    rows = dict(line.split(": ", 1) for line in lines if " -> " not in line)
    model_type, theta = rows.pop("model_type"), float(rows.pop("default_theta", 10_000))
    fields = {}
    for key, row in rows.items():
        kinds, default = row.split(" = ", 1)
        fields[key] = Field(tuple(kinds.split(" | ")), json.loads(default))
    for name, key in other_names.items():
        if key in fields:
            fields[name] = fields[key]
        elif name in fields:  # declared under its other name alone, as Qwen's mixtures declare `num_experts`
            fields[key] = fields[name]
    return ClassFields(model_type, theta, fields, other_names)
