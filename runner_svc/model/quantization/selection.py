"""Which modules a configuration quantizes.

Each kind of checkpoint names them in its own way. A module that is chosen here and is not quantized in the checkpoint,
or the other way round, is refused by the names of its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Protocol

from runner_svc.model.folder.errors import BrokenModel, UnsupportedModel
from runner_svc.model.quantization.stored_format import StoredFormat


class Names(Protocol):
    """A set of modules."""

    def __contains__(self, module: str, /) -> bool: ...


class Ranked(Names, Protocol):
    """A set of modules, some of which it names more exactly than others."""

    def rank(self, module: str, /) -> int:
        """Returns how loosely it names one of its modules: a smaller number comes first."""


@dataclass(frozen=True, slots=True)
class Targets:
    """compressed-tensors': exact names, "re:" and a pattern that a name begins with, and the class "Linear"."""

    names: tuple[str, ...]

    def __contains__(self, module: str, /) -> bool:
        exact, patterns = _targets(self.names)
        return module in exact or "Linear" in exact or any(each.match(module) for each in patterns)

    def rank(self, module: str, /) -> int:
        """As in the package, exact names come before patterns, and these before classes."""
        exact, patterns = _targets(self.names)
        if module in exact:
            return 0
        return 1 if any(each.match(module) for each in patterns) else 2


@dataclass(frozen=True, slots=True)
class Left:
    """transformers' `modules_to_not_convert`: parts of names from either end, or patterns, up to a dot."""

    names: tuple[str, ...]

    def __contains__(self, module: str, /) -> bool:
        return module.endswith(self.names) or any(each.match(module) for each in _beginnings(self.names))


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of names from anywhere, as AutoAWQ and vLLM read them."""

    names: tuple[str, ...]

    def __contains__(self, module: str, /) -> bool:
        return any(name in module for name in self.names)


@dataclass(frozen=True, slots=True)
class Globs:
    """modelopt's: names with * and ?."""

    names: tuple[str, ...]

    def __contains__(self, module: str, /) -> bool:
        return any(fnmatchcase(module, name) for name in self.names)

    def rank(self, module: str, /) -> int:
        """All are patterns."""
        return 1


@dataclass(frozen=True, slots=True)
class Rule:
    """A format, and the modules that have it."""

    modules: Ranked
    format: StoredFormat


@dataclass(frozen=True, slots=True)
class Quantization:
    """The formats of a checkpoint's matrices."""

    method: str
    """`quant_method` of the configuration."""
    rules: tuple[Rule, ...]
    """The one that names a module most exactly counts."""
    left: tuple[Names, ...]
    """Modules that are not quantized, whatever the rules say."""
    notes: tuple[str, ...] = ()
    """What is computed otherwise than the checkpoint asks, for the log."""
    has_kv_scales: bool = False
    """Whether each layer has a scale of its keys and one of its values, for a KV cache in FP8."""
    perhaps_left: Names = ()
    """Modules that some programs take to be left, and others not: those stay plain that are stored so."""

    def format_of(self, module: str) -> StoredFormat | None:
        """Returns the format of a module's matrix by the module's name; None if it is not quantized.

        Raises UnsupportedModel where two rules name it as exactly, with unlike formats: programs differ in the order.
        """
        if any(module in names for names in self.left):
            return None
        found = [(rule.modules.rank(module), rule.format) for rule in self.rules if module in rule.modules]
        best = min((rank for rank, _ in found), default=0)
        formats = list(dict.fromkeys(stored for rank, stored in found if rank == best))
        if len(formats) > 1:
            raise UnsupportedModel(
                f"By the model's 'quantization_config', {module!r} has several formats, which are named as exactly: "
                f"{' and '.join(each.name for each in formats)}. Leave it to one of them."
            )
        return formats[0] if formats else None


EVERY = Targets(("Linear",))


def head(names: Sequence[str] = ("lm_head",)) -> Targets:
    """Returns the head alone."""
    return Targets(tuple(names))


@cache
def _targets(names: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """Returns the exact names and the patterns; compiled once, as a model may have tens of thousands of matrices."""
    patterns = tuple(_pattern(name[3:]) for name in names if name.startswith("re:"))
    return frozenset(name for name in names if not name.startswith("re:")), patterns


@cache
def _beginnings(names: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return tuple(_pattern(f"(?:{name}){boundary}") for name in names)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise BrokenModel(
            f"The model's config.json has a broken pattern {text!r} in its 'quantization_config': {error}."
        ) from error
