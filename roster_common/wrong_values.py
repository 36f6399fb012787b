"""What pydantic found wrong with values that an operator gave, told in one line."""

from __future__ import annotations

from pydantic import ValidationError
from pydantic_core import ErrorDetails


def wrong_values(error: ValidationError, kind: str = "") -> str:
    """All that is wrong, in one line; `kind` goes before each value's name."""
    return "; ".join(_problem(each, kind) for each in error.errors())


def _problem(error: ErrorDetails, kind: str) -> str:
    """What is wrong with several values together has no place: its sentence names them."""
    message = error["msg"].removeprefix("Value error, ")
    return f"{kind}{'.'.join(map(str, error['loc']))}: {message}" if error["loc"] else message
