"""A model whose own cache forgets positions that its attention would see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner_svc.model.errors import UnsupportedModel
from runner_svc.transformers_decoder.attention_trace import TracedCall


def refuse_narrower_cache(model: Any, calls: Sequence[TracedCall]) -> None:
    """Raises UnsupportedModel where the cache of `generate` has a window that the layer's mask does not have.

    The configuration makes the cache, the class's forward makes the mask, and the two may disagree. Beyond the window
    `generate` would then draw other tokens than the forward pass over the whole text does.
    """
    from transformers import DynamicCache

    layers = DynamicCache(config=model.config).layers
    for call in calls:
        if call.index is None or call.index >= len(layers):
            continue
        kept = getattr(layers[call.index], "sliding_window", None)
        if (
            kept is not None
            and call.layer.window is None
            and kept < model.config.get_text_config().max_position_embeddings
        ):
            raise UnsupportedModel(
                f"its configuration gives layer {call.index} a cache of the last {kept} positions, but its attention "
                "sees all: remove 'sliding_window' from config.json if the model has none."
            )
