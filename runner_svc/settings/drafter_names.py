"""Names of drafters, as the setting `draft` has them."""

from __future__ import annotations

NGRAM, MODEL, MEDUSA, EAGLE = "ngram", "model", "medusa", "eagle"
_MISSING = {
    MODEL: "draft model: write 'model:' and its folder, .gguf file or hub id",
    MEDUSA: "heads: write 'medusa:' and the folder of Medusa heads",
    EAGLE: "draft layer: write 'eagle:' and the folder of EAGLE's draft layer",
}
"""Kinds with a path, and what to write where it is missing."""


def draft_parts(value: str) -> tuple[str, str]:
    """Returns the kind of a drafter, and its path, "" where it has none."""
    kind, _, path = value.partition(":")
    return kind, path


def check_draft(value: str) -> str:
    """Returns the name of a drafter, or "" for none. Raises ValueError, saying what to write instead."""
    kind, path = draft_parts(value)
    if value in ("", NGRAM) or (kind in _MISSING and path):
        return value
    if kind in _MISSING:
        raise ValueError(f"{value!r} names no {_MISSING[kind]}")
    raise ValueError(f"there is no drafter {value!r}: set it to {NGRAM!r}, or to '' for no drafts")
