"""Special tokens can be written by the chat template, not by users: `<|im_end|>` inside a message stays text.

`tokenizers` finds special tokens by their text, regardless of its origin. The front's tokenizer therefore knows each
special token only by an *alias*, an unguessable name generated at startup. Text from users is encoded unchanged
and can't contain an alias. While a template renders, special tokens in the users' parts are replaced by *shields*,
which are unguessable too. In the rendered text, the remaining special tokens are the template's own: they become
aliases, and the shields become text again. This works whatever the template does with the parts (trims, joins, dumps as
JSON). A template that searches a message for a special token doesn't find it.

Templates may build a special token around a role (`'<|' + message.role + '|>'`). That is meant for the roles that chats
have and for those that the template names. Any other role that is a part of a special token is shielded as a whole.

One call then encodes the whole prompt. So every rule of the tokenizer about text next to special tokens (prefix spaces,
`rstrip`, merges) applies, and a prompt without special tokens in its messages is encoded exactly as by the original.

Added tokens that are not special (`<think>` of some models) are ordinary words of the vocabulary and match anywhere. So
are special tokens of a single character, since text needs that character (some models pad with `!`). One kind of them
is a *mark*: it has the form `<|...|>` and the template writes it (`<|User|>` of some models, not marked special). In
chats users can't write marks. They remain words elsewhere: in a text prompt, and in answers, where they are shown.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Set
from typing import Any

_WORD = re.compile(r"\w")
_MARK = re.compile(r"<[|｜].+[|｜]>")

ROLES = frozenset(
    {"assistant", "developer", "function", "ipython", "model", "observation", "system", "tool", "user"},
)
"""Roles of chats, around which a template may build a special token."""


class SpecialTokens:
    """The special tokens of one tokenizer, their aliases and shields.

    `tokenizer`: the tokenizer as the `tokenizers` library serializes it (JSON). `template`: the chat template's source.
    `text_of` maps ids of special tokens to texts, and `mark_of` those of marks. `renamed` is the serialized tokenizer
    with aliases in place of both. Raises ValueError if the JSON isn't valid.
    """

    def __init__(self, tokenizer: bytes, template: str = "") -> None:
        description = json.loads(tokenizer)
        nonce = secrets.token_hex(8)
        added = description.get("added_tokens") or []
        self.text_of: dict[int, str] = {token["id"]: token["content"] for token in added if token["special"]}
        self.mark_of = _marks(description, template)
        names = dict.fromkeys(text for text in (*self.text_of.values(), *self.mark_of.values()) if len(text) > 1)
        # Private-use characters: tokenizers' normalizers don't change them, and templates don't trim them.
        self._alias = {text: f"\ue000{nonce}a{number}\ue001" for number, text in enumerate(names)}
        self._shield = {text: f"\ue000{nonce}s{number}\ue001" for number, text in enumerate(names)}
        self._alone = {token["content"] for token in added if token.get("single_word")}
        self._hidden = {shield: text for text, shield in self._shield.items()}
        # Words too, since a longer one that begins earlier takes the text of a special token.
        self._tokens = _any_of(token["content"] for token in added if token["content"])
        self._marks = _any_of(self.mark_of.values())
        self._role = f"\ue000{nonce}r"
        self._shielded = re.compile(f"\ue000{nonce}(?:s[0-9]+|r[0-9a-f]*)\ue001")
        self.renamed = _rename(description, self._alias)

    def shield(self, text: str) -> str:
        """Returns a user's text with its special tokens replaced by shields."""
        if not self._alias:
            return text
        return self._tokens.sub(lambda found: self._shield.get(found.group(), found.group()), text)

    def with_marks(self, text: str) -> str:
        """Returns a text prompt for the renamed tokenizer: marks in it are words."""
        return self._marks.sub(self._aliased, text) if self.mark_of else text

    def shield_role(self, role: str, template: str) -> str:
        """Returns a message's role for the template with this source, as a shield if it could make a special token."""
        named = role in ROLES or f"'{role}'" in template or f'"{role}"' in template
        if named or not any(role in text for text in self._alias):
            return self.shield(role)
        return f"{self._role}{role.encode().hex()}\ue001"

    def seal(self, rendered: str) -> str:
        """Returns a rendered template for the renamed tokenizer: its own special tokens as aliases, shields as text."""
        if not self._alias:
            return rendered
        aliased = self._tokens.sub(self._aliased, rendered)
        return self._shielded.sub(lambda found: self._shown(found.group()), aliased)

    def _shown(self, shield: str) -> str:
        """Returns the text that a shield replaces."""
        if shield.startswith(self._role):
            return bytes.fromhex(shield[len(self._role) : -1]).decode()
        return self._hidden[shield]

    def _aliased(self, found: re.Match[str]) -> str:
        """Returns the alias of a special token, unless it only counts as a word of its own and is part of another."""
        text = found.group()
        if text in self._alone:
            start, end = found.span()
            if _WORD.match(found.string[max(0, start - 1) : start]) or _WORD.match(found.string[end : end + 1]):
                return text
        return self._alias.get(text, text)


def _marks(description: dict[str, Any], template: str) -> dict[int, str]:
    """Returns the added tokens that aren't special, have the form `<|...|>`, and occur in the template, by id."""
    normalizer = description.get("normalizer") or {}
    changes = bool(normalizer.get("normalizers", normalizer))  # then only other tokens are found by their exact text
    return {
        token["id"]: token["content"]
        for token in description.get("added_tokens") or []
        if not token["special"] and _MARK.fullmatch(token["content"]) and token["content"] in template
        if not (changes and token.get("normalized"))
    }


def _rename(description: dict[str, Any], alias: dict[str, str]) -> bytes:
    """Returns the tokenizer with its special tokens renamed in the added tokens and the vocabulary.

    Merges that lead to a special token, or on from one, are left out: text has other tokens for its letters.
    """
    for token in description.get("added_tokens") or []:
        token["content"] = alias.get(token["content"], token["content"])
    model = description["model"]
    if model.get("merges") and (pieces := alias.keys() & model["vocab"].keys()):
        prefix = model.get("continuing_subword_prefix") or ""
        model["merges"] = [merge for merge in model["merges"] if not _touches(merge, prefix, pieces)]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {alias.get(text, text): number for text, number in model["vocab"].items()}
    else:  # Unigram: pairs of text and score, ids by position
        model["vocab"] = [[alias.get(text, text), score] for text, score in model["vocab"]]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = alias.get(model["unk_token"], model["unk_token"])
    return json.dumps(description, ensure_ascii=False).encode()


def _touches(merge: str | list[str], prefix: str, pieces: Set[str]) -> bool:
    """Returns whether a merge joins or makes one of the pieces. `prefix`: of pieces that continue a word."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in pieces or right in pieces or left + right.removeprefix(prefix) in pieces


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern for the longest of these texts at each position.

    The time to match does not depend on their number (up to 6,000).
    """
    trie: dict[str, Any] = {}
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_trie_pattern(trie))


def _trie_pattern(node: dict[str, Any]) -> str:
    """Returns a regular expression for the words below a trie node; the key "" marks the end of a word."""
    chain = ""
    while len(node) == 1 and "" not in node:
        character, node = next(iter(node.items()))
        chain += re.escape(character)
    branches = [re.escape(character) + _trie_pattern(child) for character, child in node.items() if character]
    if not branches:
        return chain
    return f"{chain}(?:{'|'.join(branches)}){'?' if '' in node else ''}"
