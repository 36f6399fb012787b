"""What the value of a config.json's key has to be: its type, as transformers checks it, and its range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from runner_svc.model.folder.errors import BrokenModel

MOST = 2**31 - 1
"""The largest size; numbers of tokens and positions have 32 bits."""

MOST_LAYERS = 4096
"""The largest number of layers, since each takes memory before any weight is read."""

SIZES = frozenset(
    {
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "no_rope_layer_interval",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "original_max_position_embeddings",
        "sliding_window",
        "vocab_size",
    }
)
"""Keys whose value is 1 to `MOST` where it is a number."""

DTYPES = ("float32", "float16", "bfloat16", "float64")

_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float,),
    "bool": (bool,),
    "str": (str,),
    "dict": (dict,),
    "null": (type(None),),
    "list": (list,),
}
_NAMES = {
    "int": "an integer",
    "float": "a number with a decimal point",
    "bool": "true or false",
    "str": "a string",
    "dict": "an object",
    "null": "null",
    "list": "a list",
    "list[int]": "a list of integers",
    "list[str]": "a list of strings",
}


def check_type(key: str, value: Any, kinds: Sequence[str]) -> None:
    """Raises BrokenModel for a value of none of the kinds (see `class_fields.Field`)."""
    if not any(_is(value, kind) for kind in kinds):
        wanted = " or ".join(_NAMES[kind] for kind in kinds)
        raise BrokenModel(f"The model's config.json needs {key!r} to be {wanted}, it has {shortened(value)}.")


def check_range(key: str, value: Any) -> None:
    """Raises BrokenModel for a number outside of the range of the key."""
    most = MOST_LAYERS if key == "num_hidden_layers" else MOST
    if key in SIZES and value is not None and not 1 <= value <= most:
        raise BrokenModel(
            f"The model's config.json needs a positive integer {key!r} of at most {most}, it has {shortened(value)}."
        )
    if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
        raise BrokenModel(f"The model's config.json needs a number {key!r} of at least 0, it has {value}.")


def number(key: str, value: Any, least: float = 0.0, *, above: bool = True) -> float:
    """Returns a finite number above `least`, or of at least `least`; raises BrokenModel for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not _is_finite(value) or value < least or (above and value == least):
        bound = f"above {least:g}" if above else f"of at least {least:g}"
        raise BrokenModel(f"The model's config.json needs a number {key!r} {bound}, it has {shortened(value)}.")
    return float(value)


def shortened(value: Any) -> str:
    """Returns the value for a sentence."""
    if isinstance(value, int) and abs(value) > 10**30:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the floats
        return False


def _is(value: Any, kind: str) -> bool:
    if kind.startswith("list["):
        return isinstance(value, list) and all(_is(item, kind[len("list[") : -1]) for item in value)
    if isinstance(value, bool):
        return kind == "bool"
    return isinstance(value, _TYPES[kind])
