"""Tokens that a folder's files state with an id: the loaded tokenizer must have each of them at that id.

transformers gives an added token the next free id, whatever its file says. A model was trained with the ids of the
file, so a tokenizer that has other ones is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

from runner_svc.model.tokenizer.errors import UnusableTokenizer

Stated = tuple[str, str, int]
"""The file and key, the token's text, its id."""


def check_statements(tokenizer_config: Mapping[str, Any], added_tokens: Mapping[str, Any]) -> None:
    """Raises UnusableTokenizer for the first token of the two files that has no id or no text."""
    for _ in (*_of_tokenizer_config(tokenizer_config), *_of_added_tokens(added_tokens)):
        pass


def check_stated_ids(
    tokenizer: Tokenizer,
    serialized: Mapping[str, Any],
    tokenizer_config: Mapping[str, Any],
    added_tokens: Mapping[str, Any],
) -> None:
    """Raises UnusableTokenizer for the first token of the files that the tokenizer lacks or has at another id.

    `serialized`, `tokenizer_config`, `added_tokens`: the contents of tokenizer.json, tokenizer_config.json and
    added_tokens.json.
    """
    for where, text, stated in (
        *_of_tokenizer_json(serialized),
        *_of_tokenizer_config(tokenizer_config),
        *_of_added_tokens(added_tokens),
    ):
        found = tokenizer.token_to_id(text)
        if found == stated or not text:  # a token without text is never found, and adds none
            continue
        has = "doesn't have it" if found is None else f"has it at {found}"
        raise UnusableTokenizer(
            f"{where} has the token {text!r} at {stated}, but the tokenizer as transformers builds it {has}; correct "
            "the id or remove the token."
        )
    ids = [token["id"] for token in serialized.get("added_tokens") or []]
    if len(ids) != len(set(ids)):
        repeated = next(token for token in ids if ids.count(token) > 1)
        raise UnusableTokenizer(f"tokenizer.json's `added_tokens` has two tokens at {repeated}; remove one of them.")


def _of_tokenizer_json(serialized: Mapping[str, Any]) -> Iterator[Stated]:
    for token in serialized.get("added_tokens") or []:
        yield "tokenizer.json's `added_tokens`", token["content"], token["id"]
    vocabulary = (serialized.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict):
        for text, token in vocabulary.items():
            yield "tokenizer.json's `model.vocab`", text, token


def _of_tokenizer_config(tokenizer_config: Mapping[str, Any]) -> Iterator[Stated]:
    where = "tokenizer_config.json's `added_tokens_decoder`"
    for token, stated in (tokenizer_config.get("added_tokens_decoder") or {}).items():
        if not str(token).isdecimal():
            raise UnusableTokenizer(f"{where} has the key {token!r}; its keys are token ids.")
        text = stated.get("content") if isinstance(stated, Mapping) else None
        if not isinstance(text, str):
            raise UnusableTokenizer(f"{where} has {stated!r} at {token}; it must be an object with a string `content`.")
        yield where, text, int(token)


def _of_added_tokens(added_tokens: Mapping[str, Any]) -> Iterator[Stated]:
    for text, token in added_tokens.items():
        if type(token) is not int:
            raise UnusableTokenizer(f"added_tokens.json has {token!r} as the id of {text!r}; ids are integers.")
        yield "added_tokens.json", text, token
