"""Names of drafters, as the setting `draft` has them."""

from __future__ import annotations

NGRAM = "ngram"
_LATER = {"model": "a draft model", "eagle": "EAGLE's draft layer", "medusa": "Medusa's heads"}
"""Kinds with a path, which this version does not have yet."""


def check_draft(value: str) -> str:
    """Returns the name of a drafter, or "" for none. Raises ValueError, saying what to write instead."""
    if value in ("", NGRAM):
        return value
    kind, colon, _ = value.partition(":")
    if kind in _LATER and (colon or kind == value):
        raise ValueError(
            f"{value!r} is {_LATER[kind]}, which this version of Roster can't run yet: set it to {NGRAM!r}, or to '' "
            "for no drafts"
        )
    raise ValueError(f"there is no drafter {value!r}: set it to {NGRAM!r}, or to '' for no drafts")
