"""Special tokens are the template's to write, not the user's: `<|im_end|>` inside a message stays text.

`tokenizers` finds special tokens by their text, wherever it came from. So the tokenizer that the front uses knows each
special token only by an *alias*, an unguessable name that is drawn at start. Text from users is encoded as it is and
can hold no alias. A rendered chat template gets its special tokens replaced by their aliases first, and while the
template renders, special tokens inside the users' parts are hidden behind *shields*, unguessable too, so that the two
can be told apart whatever the template does with the parts (trims, joins, dumps as JSON). A template that searches a
message for a special token doesn't find it there.

One call then encodes the whole prompt, so every rule of the tokenizer about text beside special tokens (prefix spaces,
`rstrip`, merges) holds, and a prompt without special tokens in its messages encodes exactly as with the original.

Added tokens that are not special (`<think>` of some models) are ordinary words of the vocabulary and match anywhere.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any


class SpecialTokens:
    """The special tokens of one tokenizer, their aliases and shields.

    `tokenizer`: the tokenizer as the `tokenizers` library serializes it (JSON). `text_of` maps ids to texts; `renamed`
    is the serialized tokenizer that knows the aliases instead. Raises ValueError if the JSON isn't a tokenizer's.
    """

    def __init__(self, tokenizer: bytes) -> None:
        description = json.loads(tokenizer)
        nonce = secrets.token_hex(8)
        added = [token for token in description.get("added_tokens") or [] if token["special"]]
        self.text_of: dict[int, str] = {token["id"]: token["content"] for token in added}
        # Private-use characters: no tokenizer's normalizer changes them, and no template trims them.
        self._alias = {text: f"\ue000{nonce}a{number}\ue001" for number, text in self.text_of.items()}
        self._shield = {text: f"\ue000{nonce}s{number}\ue001" for number, text in self.text_of.items()}
        self._hidden = {shield: text for text, shield in self._shield.items()}
        self._special = _any_of(self._alias)
        self._shielded = re.compile(f"\ue000{nonce}s[0-9]+\ue001")
        self.renamed = _rename(description, self._alias)

    def shield(self, text: str) -> str:
        """A user's text with its special tokens hidden."""
        return self._special.sub(lambda found: self._shield[found.group()], text) if self._alias else text

    def seal(self, rendered: str) -> str:
        """A rendered template for the renamed tokenizer: its own special tokens as aliases, shields lifted."""
        if not self._alias:
            return rendered
        aliased = self._special.sub(lambda found: self._alias[found.group()], rendered)
        return self._shielded.sub(lambda found: self._hidden[found.group()], aliased)


def _rename(description: dict[str, Any], alias: dict[str, str]) -> bytes:
    """The tokenizer with its special tokens renamed where it looks them up by text: added tokens and vocabulary."""
    for token in description.get("added_tokens") or []:
        if token["special"]:
            token["content"] = alias[token["content"]]
    model = description["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {alias.get(text, text): number for text, number in model["vocab"].items()}
    else:  # Unigram: pairs of text and score, ids by position
        model["vocab"] = [[alias.get(text, text), score] for text, score in model["vocab"]]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = alias.get(model["unk_token"], model["unk_token"])
    return json.dumps(description, ensure_ascii=False).encode()


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of these texts at each place, in a time that doesn't grow with their number (up to 6,000)."""
    trie: dict[str, Any] = {}
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_trie_pattern(trie))


def _trie_pattern(node: dict[str, Any]) -> str:
    """A regular expression for the words below a trie's node; the key "" marks the end of one."""
    chain = ""
    while len(node) == 1 and "" not in node:
        character, node = next(iter(node.items()))
        chain += re.escape(character)
    branches = [re.escape(character) + _trie_pattern(child) for character, child in node.items() if character]
    if not branches:
        return chain
    return f"{chain}(?:{'|'.join(branches)}){'?' if '' in node else ''}"
