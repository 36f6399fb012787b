"""What the scheduler needs of a tokenizer, as read from a folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A tokenizer, the text around it, and what its files state about the end of an answer; immutable."""

    tokenizer: str
    """As the `tokenizers` library serializes it (JSON), without truncation and padding."""
    chat_template: str
    """Jinja; "" if there is none."""
    special_tokens: dict[str, str]
    """By the name that a chat template uses ("eos_token")."""
    eos_token_id: int | None
    """Id of the tokenizer's own `eos_token`."""
    special_ids: tuple[int, ...]
    """Ids of the added tokens that are special."""
    notes: tuple[str, ...]
    """Sentences for the log: what the files state and is not used."""

    def to_json(self) -> str:
        """Returns the parts as JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> TokenizerParts:
        """Reads what `to_json` wrote. Raises ValueError, TypeError or KeyError for anything else."""
        content: dict[str, Any] = json.loads(text)
        return cls(
            tokenizer=str(content["tokenizer"]),
            chat_template=str(content["chat_template"]),
            special_tokens={str(name): str(text) for name, text in content["special_tokens"].items()},
            eos_token_id=content["eos_token_id"],
            special_ids=tuple(int(token) for token in content["special_ids"]),
            notes=tuple(str(note) for note in content["notes"]),
        )


def with_special(tokenizer: str, ids: set[int]) -> str:
    """Returns the serialized tokenizer with these of its added tokens marked as special.

    Ids of ordinary tokens change nothing, nor do those of single characters: they are words, and their text stays text.
    """
    description = json.loads(tokenizer)
    changed = False
    for token in description.get("added_tokens") or []:
        if token["id"] in ids and not token["special"] and len(token["content"]) > 1:
            token["special"] = changed = True
    return json.dumps(description, ensure_ascii=False) if changed else tokenizer


def special_ids_of(tokenizer: Tokenizer) -> list[int]:
    """Returns the ids of the added tokens that are special."""
    return [token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special]
