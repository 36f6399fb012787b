"""Keys of a config.json that say what each layer is: windows, and whether the layer rotates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner_svc.model.folder.class_fields import class_fields
from runner_svc.model.folder.errors import UnsupportedModel
from runner_svc.model.folder.key_values import check_type, shortened

LAYER_KEYS = ("layer_types",)
"""Declared by some classes, and read of others by transformers' cache."""

# Their readers (`runner_svc.model.families`) complete the kinds of layers by a pattern.
_BY_PATTERN = (
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Cohere2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "GptOssForCausalLM",
)

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_values(name: str, raw: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `layer_types`, `sliding_window` and `no_rope_layers` as transformers completes them.

    `values` are those of the used keys, defaults included. Raises UnsupportedModel for lists of another length than the
    model's, kinds of layers that there are not, and windows that one key asks for and another one denies.
    """
    num_layers, fields = values["num_hidden_layers"], class_fields(name).fields
    found: dict[str, Any] = {}
    given = _given_types(raw, num_layers)
    if "layer_types" not in fields:
        if given is not None and SLIDING in given:
            raise UnsupportedModel(
                f"The model's config.json has 'layer_types' with {SLIDING}, which transformers' class for {name} does "
                "not read: delete it to serve the model without."
            )
        return found
    if name in _BY_PATTERN:
        return found
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else None
    if "no_rope_layers" in fields:
        found["no_rope_layers"] = _rotating(values, num_layers)
    if given is None:
        given = _default_types(values, found.get("no_rope_layers"), window, num_layers)
    elif SLIDING in given and window is None:
        raise UnsupportedModel(
            f"The model's config.json has 'layer_types' with {SLIDING}, but no window ('sliding_window', "
            "'use_sliding_window'): correct one of them."
        )
    return {**found, "layer_types": given, "sliding_window": window}


def _given_types(raw: Mapping[str, Any], num_layers: int) -> list[str] | None:
    given: list[str] | None = raw.get("layer_types")
    check_type("layer_types", given, ("list[str]", "null"))
    if given is None:
        return None
    for kind in given:
        if kind not in (FULL, SLIDING):
            raise UnsupportedModel(
                f"The model's config.json has 'layer_types' with {shortened(kind)}; supported: {FULL}, {SLIDING}."
            )
    _check_length("layer_types", len(given), num_layers, num_layers)
    return given


def _default_types(
    values: Mapping[str, Any], rotating: list[int] | None, window: int | None, num_layers: int
) -> list[str]:
    if window is None:
        return [FULL] * num_layers
    if rotating is not None:
        return [FULL if rotates else SLIDING for rotates in rotating]
    first = values.get("max_window_layers", 0)
    return [SLIDING if layer >= first else FULL for layer in range(num_layers)]


def _rotating(values: Mapping[str, Any], num_layers: int) -> list[int]:
    """1 for a layer that rotates, 0 for one that does not; the key is named after its zeros."""
    given: list[int] | None = values.get("no_rope_layers")
    if given is None:
        interval = values["no_rope_layer_interval"]
        return [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    _check_length("no_rope_layers", len(given), num_layers, None)
    return given[:num_layers]


def _check_length(key: str, length: int, least: int, most: int | None) -> None:
    if length < least or (most is not None and length > most):
        raise UnsupportedModel(
            f"The model's config.json has {length} {key!r} for 'num_hidden_layers' {least}: correct one of them."
        )
