"""Makes model output safe to show: a terminal would execute its control characters."""

from __future__ import annotations

_REPLACEMENT = "\ufffd"
_HALVES = range(0xD800, 0xE000)
"""Surrogates: halves of characters, as in names of files that are no UTF-8. They can't be written."""
_CONTROLS = dict.fromkeys((*range(32), *range(127, 160), *_HALVES), _REPLACEMENT) | {ord("\n"): "\n", ord("\t"): "\t"}


def without_controls(text: str) -> str:
    """Returns the text with U+FFFD for each control character except newline and tab, and for each surrogate."""
    return text.translate(_CONTROLS)


def one_line(text: str) -> str:
    """Returns the text on one line, with single spaces for white space and U+FFFD for control characters."""
    return without_controls(" ".join(text.split()))
