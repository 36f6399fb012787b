"""Pydantic's validation errors as one line for operators."""

from __future__ import annotations

from pydantic import ValidationError
from pydantic_core import ErrorDetails


def wrong_values(error: ValidationError, kind: str = "") -> str:
    """Returns all validation errors in one line; `kind` is put before each value's name."""
    return "; ".join(_problem(each, kind) for each in error.errors())


def _problem(error: ErrorDetails, kind: str) -> str:
    """Returns one error. An error of several values together has no location, and its message names them."""
    message = error["msg"].removeprefix("Value error, ")
    return f"{kind}{'.'.join(map(str, error['loc']))}: {message}" if error["loc"] else message
