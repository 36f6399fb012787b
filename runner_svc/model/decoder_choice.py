"""Which decoder computes a model: Roster's own where it covers the configuration, else transformers'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from runner_svc.interface.ranks import Shard
from runner_svc.model.config import ARCHITECTURES, ModelConfig
from runner_svc.model.errors import BrokenModel, UnsupportedModel

DecoderSetting = Literal["auto", "roster", "transformers"]


def not_by_transformers(raw: Mapping[str, Any]) -> str | None:
    """Returns why transformers' decoder serves no model with these contents of a config.json, whatever its class."""
    if raw.get("auto_map"):
        return (
            "Its config.json has an 'auto_map': the model is code of its own, which is never run (trust_remote_code)."
        )
    said = raw.get("quantization_config")
    if isinstance(said, Mapping) and said.get("quant_method") == "gguf-blocks":
        return "It is a large GGUF model, whose blocks only Roster's own decoder reads: set decoder to 'auto'."
    if said:
        return (
            "It is quantized, which only Roster's own decoder serves: use a checkpoint in float32, float16 or "
            "bfloat16, or a GGUF file."
        )
    return None


@dataclass(frozen=True, slots=True)
class DecoderChoice:
    """`config` is that of Roster's decoder; None leaves the model to transformers, and `why_not_own` says why."""

    config: ModelConfig | None
    why_not_own: str = ""
    has_own_class: bool = False
    """Roster's decoder has the class, though not this configuration of it."""


def choose_decoder(raw: Mapping[str, Any], asked: DecoderSetting) -> DecoderChoice:
    """Chooses for the contents of a config.json.

    Raises UnsupportedModel if Roster's own decoder is asked for and lacks the model, BrokenModel for a value that no
    decoder can use.
    """
    if asked == "transformers":
        return DecoderChoice(None, "decoder is 'transformers'")
    try:
        return DecoderChoice(ModelConfig.from_hugging_face(raw))
    except BrokenModel:
        raise
    except UnsupportedModel as error:
        if is_only_own(raw):
            raise
        if asked == "roster":
            raise UnsupportedModel(f"{error} (decoder is 'roster'; with 'auto', transformers may serve it)") from error
        return DecoderChoice(None, str(error), _has_own_class(raw))


def is_only_own(raw: Mapping[str, Any]) -> bool:
    """Returns whether no other decoder than Roster's may serve the model: a quantized one of its classes."""
    return bool(raw.get("quantization_config")) and _has_own_class(raw)


def _has_own_class(raw: Mapping[str, Any]) -> bool:
    names = raw.get("architectures")
    return isinstance(names, list) and any(isinstance(name, str) and name in ARCHITECTURES for name in names)


def not_quantized(why_not_own: str) -> str:
    """Returns why a model that transformers computes can't be quantized while it is loaded."""
    return (
        "Weights are quantized for Roster's own decoder only, which does not compute this model: set quantization to "
        f"'none' and quantize_head to false. {why_not_own}"
    )


def refuse_ranks(shard: Shard, why_not_own: str) -> None:
    """Raises UnsupportedModel for a model that transformers would compute on one of several ranks."""
    if shard.size > 1:
        raise UnsupportedModel(
            f"Only Roster's own decoder is divided among {shard.size} ranks, and it does not compute this model: set "
            f"tensor_parallel to 1. {why_not_own}"
        )
