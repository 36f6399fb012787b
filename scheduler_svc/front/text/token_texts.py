"""The text of each token id: a tokenizer's decoder, evaluated token by token.

`tokenizers` decodes a whole list of ids. The decoders of language models concatenate the texts of single tokens, except
at the start of the text and for characters that span several tokens. A table from id to text or bytes, filled on
demand, therefore replaces them: a stream costs one look-up per token and knows exactly which characters are decided.

| decoder of the tokenizer                                      | a token adds                                       |
|---------------------------------------------------------------|----------------------------------------------------|
| ByteLevel (alone or in a sequence with Fuse)                  | its bytes                                          |
| sequence of Replace, Metaspace, ByteFallback, Fuse, Strip     | its text, or one byte if its name is <0xNN>        |
| Metaspace                                                     | its text, with ▁ as a space (no space at the start)|
| WordPiece                                                     | its text without ##, or after a space (not at the  |
|                                                               | start), without spaces before punctuation          |
| none                                                          | its text after a space (no space at the start)     |

Other decoders (CTC, BPE suffixes) are not used by any supported model and are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class UnsupportedTokenizer(ValueError):
    """The tokenizer's decoder can't be streamed. The message names it and lists the supported ones."""


TokenText = str | bytes
"""`str`: whole characters. `bytes`: not valid UTF-8 by themselves, so a part of a character or invalid."""


def _byte_level_alphabet() -> dict[str, int]:
    """Maps the characters of ByteLevel vocabularies to bytes (GPT-2's table); printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _as_text(data: bytes) -> TokenText:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _byte_level(token: str) -> TokenText:
    try:
        return _as_text(bytes(_ALPHABET[character] for character in token))
    except KeyError:  # an added token, whose name is its text
        return token


class _Rule:
    """Conversion of a token's name into the text that it adds, at the start of the text and elsewhere."""

    def __init__(self, decoder: Mapping[str, Any] | None) -> None:
        self.strip = 0
        """Maximum number of spaces to strip from the start of the whole text."""
        self.start_differs = decoder is None
        """Whether the first token of the text is converted differently."""
        self._stages: list[Callable[[str, bool], TokenText]] = []
        if decoder is None:
            self._stages.append(lambda token, at_start: token if at_start else " " + token)
            return
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        fused = False
        for step in steps:
            self._add(step, fused)
            fused = fused or step["type"] in ("Fuse", "ByteLevel")

    def _add(self, step: Mapping[str, Any], fused: bool) -> None:
        kind = step["type"]
        if kind == "ByteLevel" and not fused:
            self._stages.append(lambda token, _: _byte_level(token))
        elif kind == "Replace" and not fused and "String" in step["pattern"]:
            old, new = step["pattern"]["String"], step["content"]
            self._stages.append(lambda token, _: token.replace(old, new))
        elif kind == "ByteFallback" and not fused:
            self._stages.append(lambda token, _: _byte_fallback(token))
        elif kind == "Metaspace" and not fused:
            mark, keeps = step["replacement"], step.get("prepend_scheme", "always") == "never"
            self.start_differs = not keeps
            self._stages.append(lambda token, start: token.replace(mark, "" if start and not keeps else " "))
        elif kind == "WordPiece" and not fused:
            self.start_differs = True
            self._stages.append(_word_piece(step["prefix"], step["cleanup"]))
        elif kind == "Strip" and fused and step["content"] == " " and not step["stop"]:
            self.strip = step["start"]
        elif kind != "Fuse":
            raise UnsupportedTokenizer(
                f"the tokenizer's decoder has a {kind} step, which cannot be streamed; supported are ByteLevel, "
                "Metaspace, WordPiece, and sequences of Replace (of a string), Metaspace, ByteFallback, Fuse and then "
                "Strip (of leading spaces)"
            )

    def apply(self, token: str, at_start: bool) -> TokenText:
        """Returns the text that a token adds."""
        text: TokenText = token
        for stage in self._stages:
            if isinstance(text, bytes):
                break
            text = stage(text, at_start)
        return text


# In this order, as the library's decoder removes spaces within what one token adds.
_CLEANED = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def _word_piece(prefix: str, cleanup: bool) -> Callable[[str, bool], TokenText]:
    """Returns the stage of a WordPiece decoder. `prefix`: of tokens that continue a word. `cleanup`: see `_CLEANED`."""

    def stage(token: str, at_start: bool) -> TokenText:
        if not at_start:
            token = token.removeprefix(prefix) if token.startswith(prefix) else " " + token
        for spaced, clean in _CLEANED if cleanup else ():
            token = token.replace(spaced, clean)
        return token

    return stage


def _byte_fallback(token: str) -> TokenText:
    found = _BYTE_TOKEN.fullmatch(token)
    return _as_text(bytes([int(found[1], 16)])) if found else token


class TokenTexts(dict[int, TokenText]):
    """Maps a token id to the text that it adds anywhere except at the start; filled on demand.

    `tokenizer` resolves ids. `special` maps the ids of special tokens to their texts, whatever their names in
    `tokenizer`; with `skip_special_tokens`, they add "". `renamed` maps the ids of others that have other names there.
    Ids outside the vocabulary add "", as in `Tokenizer.decode`. Raises UnsupportedTokenizer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        special: Mapping[int, str],
        skip_special_tokens: bool,
        renamed: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._special = special
        self._renamed = renamed or {}
        self._skip = skip_special_tokens
        self._rule = _Rule(json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None)
        self.strip = self._rule.strip
        """Maximum number of spaces to strip from the start of the whole text."""
        self.start_differs = self._rule.start_differs
        """Whether the first token that is not skipped adds `at_start` instead."""

    def __missing__(self, token: int) -> TokenText:
        written = self._written(token)
        text = self[token] = "" if written is None else self._rule.apply(written, at_start=False)
        return text

    def at_start(self, token: int) -> TokenText | None:
        """Returns the text that the first token adds; None if it is skipped, so that the next token is the first."""
        written = self._written(token)
        return None if written is None else self._rule.apply(written, at_start=True)

    def _written(self, token: int) -> str | None:
        if token in self._special:
            return None if self._skip else self._special[token]
        return self._renamed.get(token) or self._tokenizer.id_to_token(token)
