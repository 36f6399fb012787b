"""Rules of docs/determinism.md, each broken on purpose in a way that looks right, and what notices it.

A rule is broken by replacing a part of the source of the function that follows it. If the source changes, its entry
here has to: `source` fails if it does not find the part.
"""

from __future__ import annotations
import __future__

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from pytest import MonkeyPatch

from runner_svc.arithmetic import check, functions

Break = Callable[[MonkeyPatch], None]
_REGISTRIES: tuple[dict[str, Any], ...] = (functions.ACTIVATIONS, check.ELEMENTWISE, check.BY_ROW)


@dataclass(frozen=True, slots=True)
class Rule:
    """A way to break a rule, and the name of what finds it."""

    what: str
    finder: str
    broken: Break

    def __str__(self) -> str:
        return self.what


def _found(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *owners, name = path.split(".")
    for part in owners:
        owner = getattr(owner, part)
    return owner, name


def _importers() -> Iterable[dict[str, Any]]:
    return [vars(module) for name, module in sys.modules.items() if name.startswith("runner_svc.")]


def source(target: str, old: str, new: str) -> Break:
    """Returns what replaces `old` in the source of the function "module:path" by `new`."""

    def broken(patch: MonkeyPatch) -> None:
        owner, name = _found(target)
        function = getattr(owner, name)
        assert isinstance(function, FunctionType)
        text = textwrap.dedent(inspect.getsource(function))
        assert text.count(old) == 1, f"{target} has {text.count(old)} of {old!r}, not one: break its rule another way"
        code = compile(text.replace(old, new), f"broken {target}", "exec", __future__.annotations.compiler_flag)
        made: dict[str, Any] = {}
        exec(code, function.__globals__, made)
        patch.setattr(owner, name, made[name])
        for names in (*_importers(), *_REGISTRIES):
            for key in [key for key, value in names.items() if value is function]:
                patch.setitem(names, key, made[name])

    return broken


def value(new: object, *targets: str) -> Break:
    """Returns what sets each of the names "module:path" to `new`."""

    def broken(patch: MonkeyPatch) -> None:
        for target in targets:
            patch.setattr(*_found(target), new)

    return broken


def both(*breaks: Break) -> Break:
    """Returns what breaks all of these."""

    def broken(patch: MonkeyPatch) -> None:
        for one in breaks:
            one(patch)

    return broken
