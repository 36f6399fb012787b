"""Reads what transformers' configuration classes declare, as `runner_svc.model.folder.class_fields` writes it.

`python -m tests.support.class_fields LlamaForCausalLM ...` prints the rows of architectures, for a new family.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_BASE_FIELDS = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}


def config_class(architecture: str) -> Any:
    """Returns the configuration class of an architecture."""
    kinds = [CONFIG_MAPPING[name] for name, model in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if model == architecture]
    own = [kind for kind in kinds if kind.__name__ == f"{architecture.removesuffix('ForCausalLM')}Config"]
    return (own or kinds)[0]  # other classes of configurations share Llama's model


def declared(architecture: str) -> str:
    """Returns a line of each field that the class adds to those of all classes."""
    kind = config_class(architecture)
    hints = typing.get_type_hints(kind, localns={"torch": torch})
    head = [f"model_type: {kind.model_type}"]
    if "rope_parameters" in hints and isinstance(kind.default_theta, float):
        head.append(f"default_theta: {kind.default_theta}")
    head += [f"{alias} -> {key}" for alias, key in sorted(kind.attribute_map.items())]
    rows = [
        f"{field.name}: {' | '.join(sorted(_kinds(hints[field.name])))} = {json.dumps(_default(field))}"
        for field in dataclasses.fields(kind)
        if field.name not in _BASE_FIELDS
    ]
    return "\n".join([*head, *sorted(rows)])


def base_fields() -> dict[str, tuple[set[str], Any]]:
    """Returns the types and the default of each field of all classes; types that are not JSON's are strings."""
    hints = typing.get_type_hints(transformers.PreTrainedConfig, localns={"torch": torch})
    return {
        field.name: ({_json_kind(kind) for kind in _kinds(hints[field.name])}, _default(field))
        for field in dataclasses.fields(transformers.PreTrainedConfig)
    }


def _json_kind(kind: str) -> str:
    return kind if kind in ("bool", "dict", "int", "list[str]", "null", "str") else "str"


def _default(field: Any) -> Any:
    return None if field.default is dataclasses.MISSING else field.default


def _kinds(hint: Any) -> set[str]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return {kind for argument in arguments for kind in _kinds(argument)}
    if hint is type(None):
        return {"null"}
    if origin is list:
        return {f"list[{kind}]" for kind in _kinds(arguments[0])}
    if origin is dict or hint is dict or (isinstance(hint, type) and issubclass(hint, dict)) or _is_typed_dict(hint):
        return {"dict"}
    return {getattr(hint, "__name__", str(hint))}


def _is_typed_dict(hint: Any) -> bool:
    return hasattr(hint, "__total__")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f'    "{name}": """\n{declared(name)}\n""",')
