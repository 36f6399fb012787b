"""Most positions of a sequence of a transformers model."""

from __future__ import annotations

from typing import Any

import structlog

from runner_svc.model.errors import UnsupportedModel

log = structlog.get_logger()


def context_length(model: Any) -> int:
    """Returns `max_position_embeddings`, stretched where that names the unscaled context, as for the own decoder.

    A class whose `generate` computes the cache again, once a text outgrows the positions of pretraining (longrope of
    Phi-3), is served up to these: a cache that was computed with the short factors would give other tokens.
    Raises UnsupportedModel for a configuration without it.
    """
    config = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1:
        raise UnsupportedModel(f"The config.json of {type(model).__name__} has no 'max_position_embeddings'.")
    parameters = getattr(config, "rope_parameters", None) or {}
    kind, factor = parameters.get("rope_type"), parameters.get("factor")
    original = parameters.get("original_max_position_embeddings")
    if kind in ("linear", "dynamic") and factor:
        return int(most * factor)
    if kind == "yarn" and factor and original:
        return max(most, int(original * factor))
    if kind == "longrope" and original and "prepare_inputs_for_generation" in vars(type(model)):
        log.warning(
            "the context is shorter than the model's: beyond it, all of a sequence's cache would change (longrope)",
            context_length=original,
            model=most,
        )
        return int(original)
    return most
