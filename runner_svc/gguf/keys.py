"""Keeps account of a model's keys: each is used, known to be harmless, or refused.

All code reads keys through `Keys`. At the end, a key that has not been read is refused by name, unless it is in
`HARMLESS` or has a value without effect.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from runner_svc.gguf.errors import GgufError

HARMLESS = {
    r"general\..+": "a description of the file; the few keys with an effect are read",
    r"split\.(no|count|tensors\.count)": "used in finding the parts",
    r"\{arch\}\.tensor_data_layout": "the origin of the order of rows, which the architecture fixes",
    r"\{arch\}\.rope\.scaling\.finetuned": "how it was trained",
    r"tokenizer\.ggml\.(fim_(pre|suf|mid|pad|rep|sep)|prefix|suffix|middle)_token_id": "tokens of infilling",
    r"\{arch\}\.rope\.dimension_sections": "axes of positions, which are the same for a text",
    r"tokenizer\.ggml\.token_type_count": "a size of encoders",
}
"""Keys that change no answer, as patterns (`{arch}` is the model's architecture), with the reason.

So are keys in namespaces of publishers, such as `mradermacher.quantize_version` and `quantize.imatrix.file`: all
keys with an effect start with "general", "tokenizer", or the architecture.
"""

# Namespaces of files that are not models by themselves.
_RESERVED = {"general", "tokenizer", "split", "adapter", "clip", "imatrix", "diffusion", "xielu"}

# Values without effect of keys of the architecture. Any other value is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    "attention.scale": (0,),
    "attention.output_scale": (0, 1),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "use_parallel_residual": (False,),
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
}
_NEUTRAL_TOKENIZER: dict[str, tuple[Any, ...]] = {
    "tokenizer.ggml.add_sep_token": (False,),
    "tokenizer.ggml.remove_extra_whitespaces": (False,),
    "tokenizer.ggml.precompiled_charsmap": ([],),
}


class Keys:
    """The keys of a model, and which of them have been read."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        self._keys = keys
        self._taken: set[str] = set()
        kind = self.text("general.type", "model")
        if kind != "model":
            raise GgufError(f"Its general.type is {kind!r}; only a whole 'model' can be served.")
        self.architecture = self.text("general.architecture")
        version = self.integer("general.quantization_version", 2, least=0)
        if version != 2:
            raise GgufError(f"Its general.quantization_version is {version}; only 2 is read.")

    def __contains__(self, key: str) -> bool:
        return self._full(key) in self._keys

    def text(self, key: str, default: str | None = None) -> str:
        """Returns a string. Here and below, a key that starts with a dot is one of the architecture.

        Raises GgufError if it has another type, or if it is absent and there is no default.
        """
        return str(self._take(key, default, lambda value: isinstance(value, str), "a string"))

    def flag(self, key: str, default: bool) -> bool:
        """Returns a boolean."""
        return bool(self._take(key, default, lambda value: isinstance(value, bool), "true or false"))

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Returns an integer of at least `least`. An array of equal elements counts as its element."""

        def fits(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value >= least

        value = self._same(key)
        return int(self._checked(key, value, default, fits, f"an integer of at least {least}"))

    def number(self, key: str, default: float | None = None, positive: bool = True) -> float:
        """Returns a finite number, which must be positive by default."""

        def fits(value: Any) -> bool:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return is_number and math.isfinite(value) and (value > 0 or not positive)

        return float(self._take(key, default, fits, "a positive number" if positive else "a number"))

    def texts(self, key: str) -> list[str]:
        """Returns an array of strings, empty if absent."""
        return list(self._take(key, [], lambda value: _is_array(value, str), "an array of strings"))

    def integers(self, key: str) -> list[int]:
        """Returns an array of integers, empty if absent."""
        return list(self._take(key, [], lambda value: _is_array(value, int), "an array of integers"))

    def numbers(self, key: str) -> list[float]:
        """Returns an array of numbers, empty if absent."""
        return list(self._take(key, [], lambda value: _is_array(value, int, float), "an array of numbers"))

    def ignore(self, key: str) -> None:
        """Counts a key as read, whether present or not."""
        self._taken.add(self._full(key))

    def matching(self, pattern: str) -> list[str]:
        """Returns the keys that match the whole pattern."""
        return [key for key in self._keys if re.fullmatch(pattern, key)]

    def refuse(self, key: str, why: str) -> GgufError:
        """Returns the error that refuses the value of a key."""
        return GgufError(f"Its {self._full(key)} is {_shown(self._keys.get(self._full(key)))}, {why}.")

    def refuse_rest(self) -> None:
        """Raises GgufError for a key that has not been read, unless it is harmless or has a value without effect."""
        for key, value in self._keys.items():
            if key in self._taken:
                continue
            own = key.removeprefix(f"{self.architecture}.") if key.startswith(f"{self.architecture}.") else None
            spelled = key if own is None else f"{{arch}}.{own}"
            if any(re.fullmatch(pattern, spelled) for pattern in HARMLESS):
                continue
            if own is None and _is_foreign(key):
                continue
            neutral = _NEUTRAL.get(own, ()) if own is not None else _NEUTRAL_TOKENIZER.get(key, ())
            if value not in neutral:
                raise GgufError(
                    f"Its key {key!r} ({_shown(value)}) is unknown for the architecture {self.architecture!r}, or has "
                    "an effect that is not supported."
                )

    def _full(self, key: str) -> str:
        return f"{self.architecture}{key}" if key.startswith(".") else key

    def _take(self, key: str, default: Any, fits: Any, wanted: str) -> Any:
        return self._checked(key, self._keys.get(self._full(key)), default, fits, wanted)

    def _checked(self, key: str, value: Any, default: Any, fits: Any, wanted: str) -> Any:
        key = self._full(key)
        self._taken.add(key)
        if value is None:
            if default is None:
                raise GgufError(f"It has no key {key!r}, which must be there.")
            return default
        if not fits(value):
            raise GgufError(f"Its {key} is {_shown(value)}, where {wanted} is needed.")
        return value

    def _same(self, key: str) -> Any:
        value = self._keys.get(self._full(key))
        if isinstance(value, list) and value:
            if any(one != value[0] for one in value):
                raise self.refuse(key, "which differs between layers; all must have the same")
            return value[0]
        return value


def _is_foreign(key: str) -> bool:
    from gguf.constants import MODEL_ARCH_NAMES

    namespace = key.split(".")[0]
    return "." in key and namespace not in _RESERVED and namespace not in MODEL_ARCH_NAMES.values()


def _is_array(value: Any, *kinds: type) -> bool:
    return isinstance(value, list) and all(isinstance(one, kinds) and not isinstance(one, bool) for one in value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
