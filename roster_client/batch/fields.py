"""Fields of a request's body that both endpoints have: used, without effect on the answer, or refused by name.

A field that is null counts as absent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from roster_client.client.requests import Options

SEED_MASK = (1 << 64) - 1
"""Maps OpenAI's signed 64-bit seeds to Roster's unsigned ones."""
MOST_UINT32 = (1 << 32) - 1
ANY_OBJECT = '{"type": "object"}'

WITHOUT_EFFECT = {
    "metadata": "for the caller's records",
    "parallel_tool_calls": "there are no tools",
    "prediction": "makes the answer faster, not different",
    "prompt_cache_key": "a hint for caches",
    "prompt_cache_options": "hints for caches",
    "prompt_cache_retention": "a hint for caches",
    "safety_identifier": "names the user",
    "service_tier": "there is one tier",
    "store": "answers are in the output file",
    "user": "names the user",
}
"""Fields with any value that change nothing about the answer, with the reason."""

ONLY = {
    "audio": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "moderation": (),
    "reasoning_effort": ("none",),
    "stream": (False,),
    "stream_options": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
"""Fields whose value must be one of these, which are the defaults, or null: what else they ask for is not supported."""

Value = Callable[[str, Any], Any]


class BadField(Exception):
    """A field that can't be used; `param` is its name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def given(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that are not null."""
    return {name: value for name, value in body.items() if value is not None}


def check_names(fields: Mapping[str, Any], used: Collection[str]) -> None:
    """Raises BadField for a field that is neither used nor without effect."""
    for name, value in fields.items():
        if name in used or name in WITHOUT_EFFECT or value in ONLY.get(name, ()):
            continue
        if name not in ONLY:
            raise BadField(name, f"the field {name!r} is not supported: remove it")
        accepted = " or ".join(json.dumps(value) for value in (*ONLY[name], None))
        raise BadField(name, f"{name} is not supported other than {accepted}: remove it")


def sampling_options(fields: Mapping[str, Any]) -> Options:
    """Returns the options for the fields that both endpoints have. Raises BadField."""
    options: Any = {to: value(name, fields[name]) for name, (to, value) in SAMPLING.items() if name in fields}
    if "response_format" in fields:
        options["json_schema"] = _schema(fields["response_format"])
    return options


def number(name: str, value: Any) -> float:
    """Returns a number. Raises BadField."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadField(name, f"{name} must be a number, got {json.dumps(value)[:80]}")
    return float(value)


def whole_number(name: str, value: Any) -> int:
    """Returns a whole number that fits the field of the server's message. Raises BadField."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_UINT32:
        raise BadField(name, f"{name} must be a whole number that is not negative, got {json.dumps(value)[:80]}")
    return value


def yes_or_no(name: str, value: Any) -> bool:
    """Returns a bool. Raises BadField."""
    if not isinstance(value, bool):
        raise BadField(name, f"{name} must be true or false, got {json.dumps(value)[:80]}")
    return value


def text(name: str, value: Any) -> str:
    """Returns text that can be encoded. Raises BadField."""
    if not isinstance(value, str):
        raise BadField(name, f"{name} must be text, got {json.dumps(value)[:80]}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadField(name, f"{name} has half of a surrogate pair, which is no text") from None
    return value


def _top_k(name: str, value: Any) -> int:
    return 0 if value == -1 else whole_number(name, value)  # -1 means all to other servers


def _seed(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(1 << 63) <= value <= SEED_MASK:
        raise BadField(name, f"{name} must be a whole number of 64 bits, got {json.dumps(value)[:80]}")
    return value & SEED_MASK


def _priority(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -100 <= value <= 100:
        raise BadField(name, f"{name} must be a whole number from -100 to 100, got {json.dumps(value)[:80]}")
    return value


def _stop(name: str, value: Any) -> list[str]:
    return [text(name, value)] if isinstance(value, str) else [text(name, item) for item in _list(name, value)]


def _token_ids(name: str, value: Any) -> list[int]:
    return [whole_number(name, item) for item in _list(name, value)]


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise BadField(name, f"{name} must be a list, got {json.dumps(value)[:80]}")
    return value


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or not all(key.isascii() and key.isdigit() for key in value):
        raise BadField(name, f"{name} must be an object of token ids and numbers")
    return {whole_number(name, int(key)): number(name, bias) for key, bias in value.items()}


def _schema(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    form = value.get("json_schema") if kind == "json_schema" else None
    schema = form.get("schema") if isinstance(form, dict) else None
    if not isinstance(schema, dict):
        raise BadField(
            "response_format",
            'response_format must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
            '"json_schema": {"schema": ...}}',
        )
    return json.dumps(schema)


SAMPLING: dict[str, tuple[str, Value]] = {
    "cache_salt": ("cache_salt", text),
    "ebnf": ("grammar", text),
    "frequency_penalty": ("frequency_penalty", number),
    "ignore_eos": ("ignore_eos", yes_or_no),
    "include_stop_str_in_output": ("include_stop_string", yes_or_no),
    "logit_bias": ("logit_bias", _logit_bias),
    "min_p": ("min_p", number),
    "min_tokens": ("min_tokens", whole_number),
    "n": ("n", whole_number),
    "presence_penalty": ("presence_penalty", number),
    "priority": ("priority", _priority),
    "regex": ("regex", text),
    "repetition_penalty": ("repetition_penalty", number),
    "seed": ("seed", _seed),
    "skip_special_tokens": ("skip_special_tokens", yes_or_no),
    "speculate": ("speculate", yes_or_no),
    "stop": ("stop", _stop),
    "stop_token_ids": ("stop_token_ids", _token_ids),
    "temperature": ("temperature", number),
    "top_k": ("top_k", _top_k),
    "top_p": ("top_p", number),
}
"""Fields of both endpoints: the client's option, and what turns the value into the option's."""
