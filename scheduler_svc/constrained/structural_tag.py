"""Structural tags: free text in which a trigger starts a tag whose inside is constrained (calls of tools).

The form is that of vLLM: `{"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}`, each `begin` beginning
with one of the triggers.
"""

from __future__ import annotations

import json
from typing import Any

from llguidance import StructTag

from scheduler_svc.constrained.grammar_text import UnusableGrammar


def tagged_text(text: str) -> str:
    """A Lark grammar for text with such tags. Raises UnusableGrammar."""
    try:
        described = json.loads(text)
        triggers = [str(trigger) for trigger in described["triggers"]]
        tags = [_tag(structure, triggers) for structure in described["structures"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UnusableGrammar(f"it needs `structures` (of begin, schema and end) and `triggers`: {error!r}") from error
    if not tags:
        raise UnusableGrammar("it has no structures; leave it out to constrain nothing")
    return StructTag.to_grammar(tags, assume_special=False)


def _tag(structure: dict[str, Any], triggers: list[str]) -> StructTag:
    begin = structure["begin"]
    trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
    if trigger is None:
        raise ValueError(f"no trigger begins {begin!r}")
    return StructTag(trigger=trigger, begin=begin, grammar=structure["schema"], end=structure["end"])
