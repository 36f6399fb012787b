"""Rotary embeddings in a config.json: three spellings, merged as transformers merges them, and checked.

Of `rope_scaling` and `rope_parameters` the first counts, if it is not empty. A `rope_theta` or `partial_rotary_factor`
beside them counts where the object has none. An `original_max_position_embeddings` beside them counts before the one in
the object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner_svc.model.folder.errors import BrokenModel, UnsupportedModel
from runner_svc.model.folder.key_values import MOST, check_range, check_type, number, shortened

ROPE_KEYS = (
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)

LAYERED_THETAS = {
    "full_attention": ("rope_theta", 1_000_000.0),
    "sliding_attention": ("rope_local_base_freq", 10_000.0),
}
"""Of Gemma 3's kinds of layers, the key of RoPE's base and its default."""

_OF_ALL = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_READ = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "longrope": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "short_factor",
        "long_factor",
    ),
}
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_LISTS = {"short_factor", "long_factor"}
# Read for other types only, in training, or for images: the positions of a text are the same on each axis.
_UNREAD = {
    "finetuned",
    "mrope_section",
    *(key for keys in _READ.values() for key in keys),
}
# These types have their original context beside the parameters, or in them.
_WITH_ORIGINAL = ("yarn", "llama3", "longrope")
# transformers turns these into longrope, for Phi-3 alone.
_PHI3_LONGROPE = ("su", "yarn")
_OF_PHI3 = ("default", "longrope")


def rope_parameters(
    raw: Mapping[str, Any],
    default_theta: float,
    max_positions: int,
    head_dim: int,
    *,
    share: float | None,
    is_phi3: bool,
) -> dict[str, Any]:
    """Returns the parameters that transformers computes with: `rope_type`, `rope_theta` and those of the type.

    `share`: how much of a head rotates by default; None for a class that rotates whole heads.
    Raises UnsupportedModel for a type that the decoders lack, a key that no type has, and a value out of range.
    """
    given = _object(raw)
    name = given.get("rope_type", given.get("type", "default"))
    if is_phi3 and name in _PHI3_LONGROPE:
        name = "longrope"
    allowed = _OF_PHI3 if is_phi3 else tuple(_READ)
    if not isinstance(name, str) or name not in allowed:
        supported = ", ".join(allowed)
        raise UnsupportedModel(f"RoPE type {shortened(name)} is not supported; supported: {supported}.")
    for key in given:
        if key not in _OF_ALL and key not in _UNREAD:
            raise UnsupportedModel(
                f"The RoPE parameters in the model's config.json have {key!r}, which is not supported: delete it if it "
                "changes nothing."
            )
    for key in _NEEDED.get(name, ()):
        if key not in given:
            raise UnsupportedModel(f"RoPE type {name!r} needs {key!r}, which the model's config.json lacks.")
    theta = given.get("rope_theta", raw.get("rope_theta", default_theta))
    return {
        "rope_type": name,
        "rope_theta": number("rope_theta", theta, 1.0 if name == "yarn" else 0.0),
        **_partial(raw, given, name, head_dim, share),
        **_of_type(raw, given, name, max_positions),
    }


def layered_rope_parameters(raw: Mapping[str, Any], max_positions: int, head_dim: int) -> dict[str, Any]:
    """Returns the parameters of each of `LAYERED_THETAS`' layer types, for Gemma 3. Raises what `rope_parameters` does.

    `rope_scaling` and `rope_theta` are of layers without a window, and `rope_local_base_freq` of those with one.
    `rope_parameters` that are of no layer type are harmless: transformers' class leaves them aside.
    """
    check_type("rope_parameters", raw.get("rope_parameters"), ("dict", "null"))
    check_type("rope_scaling", raw.get("rope_scaling"), ("dict", "null"))
    given, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if "type" in scaling and "rope_type" not in scaling:
        raise UnsupportedModel(
            "The model's config.json has 'type' in 'rope_scaling', which transformers' class leaves aside: write "
            "'rope_type', or delete it."
        )
    if not all(isinstance(given.get(kind), dict | None) for kind in LAYERED_THETAS):
        raise UnsupportedModel(
            "The model's config.json needs 'rope_parameters' to have an object for each of "
            f"{' and '.join(LAYERED_THETAS)}."
        )
    found = {}
    for kind, (key, theta) in LAYERED_THETAS.items():
        own = {**(given.get(kind) or {}), **(scaling if key == "rope_theta" else {})}
        for share in (own.get("partial_rotary_factor"), raw.get("partial_rotary_factor")):
            if share not in (None, 1):
                raise UnsupportedModel(
                    f"The model's config.json has 'partial_rotary_factor' {shortened(share)}, which is not supported "
                    "beside RoPE parameters by layer type: delete it."
                )
        if own.get("truncate") is False:
            raise UnsupportedModel(
                "The model's config.json has 'truncate' false in the RoPE parameters of a layer type, where "
                "transformers does not read it: delete it."
            )
        beside = {"rope_parameters": own, "rope_theta": raw.get(key, theta)}
        found[kind] = rope_parameters(beside, theta, max_positions, head_dim, share=None, is_phi3=False)
    return found


def _object(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("rope_scaling", "rope_parameters"):
        check_type(key, raw.get(key), ("dict", "null"))
    given: Mapping[str, Any] = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    for key, value in given.items():
        if isinstance(value, dict):
            raise UnsupportedModel(
                f"The RoPE parameters in the model's config.json differ by layer type ({key!r}), and its class has one "
                "set for all layers."
            )
    return given


def _partial(
    raw: Mapping[str, Any], given: Mapping[str, Any], name: str, head_dim: int, default: float | None
) -> dict[str, float]:
    """The share of a head that rotates. Classes without a default leave it aside, or fail in transformers."""
    beside = raw.get("partial_rotary_factor", default)
    share = given.get("partial_rotary_factor", 1.0 if beside is None else beside)
    share = number("partial_rotary_factor", share)
    rotary_dim = int(head_dim * share)
    if default is None and name == "default":
        rotary_dim = head_dim
    elif default is None and rotary_dim != head_dim:
        raise UnsupportedModel(
            f"The model's config.json has 'partial_rotary_factor' {share:g} with RoPE type {name!r}, which its class "
            "does not support: delete it."
        )
    least = 4 if name == "dynamic" else 2
    if rotary_dim % 2 or not least <= rotary_dim <= head_dim:
        raise UnsupportedModel(
            f"Heads of {head_dim} elements of which {rotary_dim} rotate are not supported: an even number of at least "
            f"{least} has to rotate."
        )
    return {} if default is None else {"partial_rotary_factor": share}


def _of_type(raw: Mapping[str, Any], given: Mapping[str, Any], name: str, max_positions: int) -> dict[str, Any]:
    read = {key: given[key] for key in _READ[name] if key in given}
    if name in _WITH_ORIGINAL:
        key = "original_max_position_embeddings"
        original = raw.get(key, given.get(key, max_positions))
        check_type(key, original, ("int",))
        check_range(key, original)
        read[key] = original
    if "factor" in read and not (name in ("yarn", "longrope") and read["factor"] is None):
        read["factor"] = number("factor", read["factor"], 1.0, above=False)
        if read["factor"] * max_positions > MOST:
            raise BrokenModel(
                f"The model's config.json has 'factor' {read['factor']:g} of {max_positions} positions, which is more "
                f"than {MOST} positions."
            )
    for key in ("beta_fast", "beta_slow"):
        if not read.get(key):
            read.pop(key, None)  # as transformers, which takes 0 and null for the defaults
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        if read.get(key) is None:
            read.pop(key, None)
    for key in _LISTS & read.keys():
        check_type(key, read[key], ("list",))
        read[key] = [number(key, factor) for factor in read[key]]
    for key in read.keys() - {"truncate", "factor", "original_max_position_embeddings"} - _LISTS:
        read[key] = number(key, read[key], above=key not in ("mscale", "mscale_all_dim"))
    if "truncate" in read:
        check_type("truncate", read["truncate"], ("bool",))
    if name == "llama3" and read["low_freq_factor"] >= read["high_freq_factor"]:
        raise UnsupportedModel("RoPE type 'llama3' needs a 'low_freq_factor' below its 'high_freq_factor'.")
    return read
