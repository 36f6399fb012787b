"""Makes model output safe to show: a terminal obeys control characters, whoever sent them."""

from __future__ import annotations

_REPLACEMENT = "\ufffd"
_CONTROLS = dict.fromkeys((*range(32), *range(127, 160)), _REPLACEMENT) | {ord("\n"): "\n", ord("\t"): "\t"}


def without_controls(text: str) -> str:
    """The text with each control character but newline and tab as U+FFFD."""
    return text.translate(_CONTROLS)


def one_line(text: str) -> str:
    """The text on one line: white space as single spaces, control characters as U+FFFD."""
    return without_controls(" ".join(text.split()))
