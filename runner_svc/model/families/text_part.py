"""The text part of a model that takes images, too: its configuration as that of a model of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner_svc.model.folder.errors import UnsupportedModel

TEXT_PARTS = {"gemma3": ("gemma3_text", "Gemma3ForCausalLM")}
"""By `model_type`, those of the text part: its `model_type` and its architecture."""

_OF_IMAGES = {
    "text_config",
    "vision_config",
    "mm_tokens_per_image",
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "boi_token_id",
    "eoi_token_id",
    "image_token_id",
}
# Which of both objects decides, where both have the key.
_OF_THE_WHOLE = ("eos_token_id", "dtype", "torch_dtype", "quantization_config")


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration of the text part, or a copy of the configuration of a model of text.

    Keys that are not about images stay, so that the text model's rules apply to them. The whole model says whether the
    head is tied, by default that it is. Raises UnsupportedModel where both say how the model is quantized, and differ.
    """
    found = TEXT_PARTS.get(str(config.get("model_type")))
    text = config.get("text_config")
    if found is None or not isinstance(text, Mapping):
        return dict(config)
    model_type, architecture = found
    whole = {key: value for key, value in config.items() if key not in _OF_IMAGES}
    quantized = [part["quantization_config"] for part in (whole, text) if part.get("quantization_config") is not None]
    if len(quantized) == 2 and quantized[0] != quantized[1]:
        raise UnsupportedModel(
            "The model's config.json has a 'quantization_config' and another one in its 'text_config': delete the one "
            "that is not the checkpoint's."
        )
    decided = {key: whole[key] for key in _OF_THE_WHOLE if whole.get(key) is not None}
    tied = whole.get("tie_word_embeddings")
    return {
        **whole,
        **text,
        **decided,
        "tie_word_embeddings": True if tied is None else tied,
        "model_type": model_type,
        "architectures": [architecture],
    }
