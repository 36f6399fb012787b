"""Which modules a configuration quantizes.

Each kind of checkpoint names them in its own way. A module that is chosen here and is not quantized in the checkpoint,
or the other way round, is refused by the names of its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from runner_svc.model.folder.errors import BrokenModel
from runner_svc.model.quantization.stored_format import StoredFormat


class Names(Protocol):
    """A set of modules."""

    def __contains__(self, module: str, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class Targets:
    """compressed-tensors': exact names, "re:" and a pattern that a name begins with, and the class "Linear"."""

    names: tuple[str, ...]

    def __contains__(self, module: str, /) -> bool:
        return any(self._matches(name, module) for name in self.names)

    def _matches(self, name: str, module: str) -> bool:
        if name.startswith("re:"):
            return _pattern(name[3:]).match(module) is not None
        return name in (module, "Linear")


@dataclass(frozen=True, slots=True)
class Left:
    """transformers' `modules_to_not_convert`: parts of names from either end, or patterns, up to a dot."""

    names: tuple[str, ...]

    def __contains__(self, module: str, /) -> bool:
        boundary = r"(?:(?<=\.)|(?=\.|$))"
        return any(_pattern(f"(?:{name}){boundary}").match(module) or module.endswith(name) for name in self.names)


@dataclass(frozen=True, slots=True)
class Globs:
    """modelopt's: names with * and ?."""

    names: tuple[str, ...]

    def __contains__(self, module: str, /) -> bool:
        return any(fnmatchcase(module, name) for name in self.names)


@dataclass(frozen=True, slots=True)
class Rule:
    """A format, and the modules that have it."""

    modules: Names
    format: StoredFormat


@dataclass(frozen=True, slots=True)
class Quantization:
    """The formats of a checkpoint's matrices."""

    method: str
    """`quant_method` of the configuration."""
    rules: tuple[Rule, ...]
    """The first that has a module counts."""
    left: tuple[Names, ...]
    """Modules that are not quantized, whatever the rules say."""
    notes: tuple[str, ...] = ()
    """What is computed otherwise than the checkpoint asks, for the log."""

    def format_of(self, module: str) -> StoredFormat | None:
        """Returns the format of a module's matrix by the module's name; None if it is not quantized."""
        if any(module in names for names in self.left):
            return None
        return next((rule.format for rule in self.rules if module in rule.modules), None)


EVERY = Targets(("Linear",))


def head(names: Sequence[str] = ("lm_head",)) -> Targets:
    """Returns the head alone."""
    return Targets(tuple(names))


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise BrokenModel(
            f"The model's config.json has a broken pattern {text!r} in its 'quantization_config': {error}."
        ) from error
