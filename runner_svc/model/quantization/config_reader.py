"""Takes the keys of an object of `quantization_config`: each is used, harmless, or refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner_svc.model.folder.errors import UnsupportedModel
from runner_svc.model.folder.key_values import shortened

REQUIRED = object()


class QuantizationKeys:
    """The keys that have not been taken yet."""

    def __init__(self, raw: Any, path: str = "quantization_config") -> None:
        """Raises UnsupportedModel if it is no object. `path` says where it stands in config.json."""
        if not isinstance(raw, Mapping):
            raise UnsupportedModel(f"The model's config.json needs {path!r} to be an object, it has {shortened(raw)}.")
        self._left = dict(raw)
        self._path = path

    def take(self, key: str, *kinds: type, default: Any = REQUIRED) -> Any:
        """Returns a key's value, of one of the kinds; null and an absent key are the default."""
        value = self._left.pop(key, None)
        if value is None:
            if default is REQUIRED:
                raise UnsupportedModel(f"The model is quantized, but its config.json lacks {self.path(key)!r}.")
            return default
        is_kind = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if not is_kind:
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise UnsupportedModel(
                f"The model's config.json needs {self.path(key)!r} to be of type {wanted}, it has {shortened(value)}."
            )
        return value

    def only(self, key: str, *allowed: Any, default: Any = REQUIRED) -> Any:
        """Returns a key's value, one of the allowed ones. An absent key is the default, null is too if not allowed."""
        value = self._left.pop(key, None)
        if value is None and default is not REQUIRED:
            return default
        if value is None and None not in allowed:
            raise UnsupportedModel(f"The model is quantized, but its config.json lacks {self.path(key)!r}.")
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            raise UnsupportedModel(
                f"The model's config.json has {self.path(key)!r} {shortened(value)}, which is not supported; "
                f"supported: {', '.join(map(str, allowed))}."
            )
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """Returns a list of strings; absent or null, none."""
        value = self.take(key, list, default=[])
        if not all(isinstance(one, str) for one in value):
            raise UnsupportedModel(f"The model's config.json needs {self.path(key)!r} to be a list of strings.")
        return tuple(value)

    def harmless(self, reasons: Mapping[str, str]) -> None:
        """Drops keys that change no answer, for the reasons given."""
        for key in reasons:
            self._left.pop(key, None)

    def absent(self, key: str, meaning: str) -> None:
        """Refuses a key unless it is null, false or empty; `meaning`: what it would mean."""
        value = self._left.pop(key, None)
        if value:
            raise UnsupportedModel(
                f"The model's config.json has {self.path(key)!r} {shortened(value)}, which is not supported: {meaning}."
            )

    def finish(self) -> None:
        """Raises UnsupportedModel for a key that is left."""
        for key in self._left:
            raise UnsupportedModel(
                f"The model's config.json has a key {self.path(key)!r}, which is not known for this kind of "
                "quantization: delete it if it changes nothing."
            )

    def path(self, key: str) -> str:
        """Returns where a key stands in config.json."""
        return f"{self._path}.{key}"
