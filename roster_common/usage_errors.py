"""A command line that can't be understood, as one sentence."""

from __future__ import annotations

import re

from typer import TyperException


def sentence(error: TyperException, program: str) -> str:
    """Returns typer's error in one line, with the command whose `--help` to read."""
    text = re.sub(r"\s+", " ", error.format_message()).strip().rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{text}; see `{context.command_path if context is not None else program} --help`"
