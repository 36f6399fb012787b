"""Names of drafters, as the setting `draft` has them."""

from __future__ import annotations

NGRAM, MODEL, MEDUSA = "ngram", "model", "medusa"
_LATER = {"eagle": "EAGLE's draft layer"}
"""Kinds with a path, which this version does not have yet."""


def draft_parts(value: str) -> tuple[str, str]:
    """Returns the kind of a drafter, and its path, "" where it has none."""
    kind, _, path = value.partition(":")
    return kind, path


def check_draft(value: str) -> str:
    """Returns the name of a drafter, or "" for none. Raises ValueError, saying what to write instead."""
    kind, path = draft_parts(value)
    if value in ("", NGRAM) or (kind in (MODEL, MEDUSA) and path):
        return value
    if kind == MODEL:
        raise ValueError(f"{value!r} names no draft model: write '{MODEL}:' and its folder, .gguf file or hub id")
    if kind == MEDUSA:
        raise ValueError(f"{value!r} names no heads: write '{MEDUSA}:' and the folder of Medusa heads")
    if kind in _LATER and (path or value == kind or value == f"{kind}:"):
        raise ValueError(
            f"{value!r} is {_LATER[kind]}, which this version of Roster can't run yet: set it to {NGRAM!r}, or to '' "
            "for no drafts"
        )
    raise ValueError(f"there is no drafter {value!r}: set it to {NGRAM!r}, or to '' for no drafts")
