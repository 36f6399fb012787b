"""The class of transformers that a config.json asks for, or the reason why it is not served; weights are not needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from runner_svc.model.decoder_choice import not_by_transformers
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.folder.harmless_keys import HARMLESS
from runner_svc.model.folder.key_values import MOST_LAYERS, shortened

SERVED_LAYERS = {"full_attention", "sliding_attention", "attention"}
"""Values of `layer_types` whose state is the KV cache, read through a causal mask or a sliding window."""
_OTHER_LAYERS = {
    "chunked_attention": "its mask is neither causal nor a sliding window",
    "indexed_attention": "it chooses which positions it attends to",
}
"""Why others are not served; the rest keep state other than keys and values."""
_NUMBERS_OF_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


def served_class(raw: Mapping[str, Any]) -> Any:
    """Returns the causal class of transformers for the contents of a config.json.

    Raises UnsupportedModel for what can be seen from the configuration alone: remote code, quantization, another kind
    of model, state other than a KV cache.
    """
    if (why := not_by_transformers(raw)) is not None:
        raise UnsupportedModel(why)
    _check_layers(raw)
    config = _config(raw)
    name = _class_name(raw, config)
    import transformers

    model_class = getattr(transformers, name)
    reason = next(_reasons(model_class, config), None)
    if reason is not None:
        raise UnsupportedModel(f"{name} is not served: {reason}.")
    return model_class


def _check_layers(raw: Mapping[str, Any]) -> None:
    """Refuses a number of layers that transformers would spend hours on, before it sees that there are no weights."""
    for values in (raw, raw.get("text_config")):
        if not isinstance(values, Mapping):
            continue
        for key in _NUMBERS_OF_LAYERS:
            value = values.get(key)
            if isinstance(value, int) and value > MOST_LAYERS:
                raise UnsupportedModel(
                    f"The model's config.json needs {key!r} of at most {MOST_LAYERS}, it has {shortened(value)}."
                )


def undeclared_keys(raw: Mapping[str, Any], config: Any) -> list[str]:
    """Returns the keys of a config.json that `config`, transformers' class of it, keeps and does not know.

    They may have no effect. Left out are those that are known to have none.
    """
    found: list[str] = []
    for values, own in ((raw, config), (raw.get("text_config"), config.get_text_config())):
        if isinstance(values, Mapping):
            known = _known(own) | own.attribute_map.keys() | HARMLESS.keys() | {"model_type"}
            found += [key for key in values if key in vars(own) and key not in known and not key.startswith("_")]
    return found


def _known(config: Any) -> Set[str]:
    """Returns the keys that a configuration's class declares or derives; all for one that has no defaults."""
    try:
        return vars(type(config)()).keys()
    except Exception:  # of any type: its own checks of the values
        return vars(config).keys()


def _config(raw: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    kind = raw.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"The installed transformers has no model_type {kind!r}: upgrade it, or check config.json."
        )
    try:
        return CONFIG_MAPPING[kind].from_dict(PreTrainedConfig._decode_special_floats(dict(raw)))
    except Exception as error:  # its own checks of the values
        raise UnsupportedModel(f"transformers refuses its config.json: {' '.join(str(error).split())[:300]}") from error


def _class_name(raw: Mapping[str, Any], config: Any) -> str:
    """Returns the first of `architectures` that is a causal class of the model type, else the type's own."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    listed = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, ())
    known = (listed,) if isinstance(listed, str) else tuple(listed)
    if not known:
        raise UnsupportedModel(f"Models of the type {config.model_type!r} are no causal language models.")
    asked = tuple(raw.get("architectures") or known)
    for name in asked:
        if name in known:
            return str(name)
    raise UnsupportedModel(
        f"Architecture {', '.join(asked)} is no causal language model; its type has {', '.join(known)}."
    )


def _reasons(model_class: Any, config: Any) -> Iterator[str]:
    """Yields why models of the class and configuration are not served."""
    if not getattr(model_class, "_supports_attention_backend", False):
        yield "transformers does not let its attention be replaced"
    if getattr(model_class, "_is_stateful", False):
        yield "its layers keep state other than keys and values"
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder and a decoder"
    text = config.get_text_config()
    if getattr(text, "is_decoder", True) is False and "is_decoder" in config.to_dict():
        yield "its config.json says is_decoder false: its positions see later ones"
    if getattr(text, "add_cross_attention", False):
        yield "it attends to another model's output (add_cross_attention)"
    if getattr(text, "cross_attention_layers", None):
        yield "layers of it attend to an image (cross_attention_layers)"
    for kind in sorted(set(getattr(text, "layer_types", None) or ()) - SERVED_LAYERS):
        why = _OTHER_LAYERS.get(kind, "it keeps state other than keys and values")
        yield f"it has layers of the kind {kind!r}: {why}"
