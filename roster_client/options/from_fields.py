"""Commands whose options are the fields of a dataclass: the function takes one object, and typer sees the fields."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def takes(options: type, own_after: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a command (`options`, *, own options) to take the fields of `options`, own options after `own_after`.

    Typer makes options from a function's signature, which is set here instead of being repeated in every command.
    """

    def with_fields(command: Callable[..., None]) -> Callable[..., None]:
        shared = inspect.signature(options, eval_str=True).parameters
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        place = list(shared).index(own_after) + 1 if own_after else len(shared)

        @functools.wraps(command)
        def from_command_line(**given: Any) -> None:
            told = options(**{name: given.pop(name) for name in shared})
            command(told, **given)

        parameters = list(shared.values())
        parameters[place:place] = own
        from_command_line.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return from_command_line

    return with_fields
