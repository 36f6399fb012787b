"""Incremental detokenization: converts tokens into decided text.

Text is decided when no later token can change it. An incomplete UTF-8 character at the end, at most three bytes, is
held back. It becomes that character, or U+FFFD as soon as a byte shows that it is invalid. All pieces together equal
`Tokenizer.decode` of all ids, with one exception. In byte-fallback vocabularies, `decode` turns a run of byte tokens
that is not valid UTF-8 as a whole into one U+FFFD per byte, valid characters included; this can't be known before the
run ends. Here, valid characters of such a run stay, and each ill-formed part is one U+FFFD, as in ByteLevel
vocabularies.
"""

from __future__ import annotations

import codecs

from scheduler_svc.front.text.token_texts import TokenTexts

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The decided text of one sequence of tokens.

    While `plain`, a token adds exactly `texts[token]`. A caller may then join the texts of many tokens itself, as long
    as all of them are `str`.
    """

    __slots__ = ("_at_start", "_decoder", "_strip", "_texts", "pending", "plain")

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = _Utf8Decoder("replace")
        self._at_start = texts.start_differs
        self._strip = texts.strip
        self.pending = 0
        """Number of bytes of an incomplete character, 0 to 3."""
        self.plain = not (self._at_start or self._strip)
        """Whether no bytes are pending and the start of the text is past."""

    def push(self, token: int) -> str:
        """Reads a token and returns the text that it decides."""
        added = self._first(token) if self._at_start else self._texts[token]
        if not added:
            return ""
        if isinstance(added, bytes):
            text = self._decoder.decode(added)
            held = self._decoder.getstate()[0]
            self.pending = len(held)
            if held[:1] == b"\xed" and held[1:] >= b"\xa0":  # half a surrogate: the codec would wait for the rest
                text += self._flushed()
        else:
            text = self._flushed() + added if self.pending else added
        if self._strip:
            text = self._stripped(text)
        self.plain = not (self.pending or self._strip)
        return text

    def finish(self) -> str:
        """Ends the text and returns its rest: U+FFFD if bytes are pending, "" otherwise."""
        return self._flushed() if self.pending else ""

    def _first(self, token: int) -> str | bytes:
        added = self._texts.at_start(token)
        if added is None:
            return ""
        self._at_start = False
        self.plain = not (self.pending or self._strip)
        return added

    def _flushed(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self.pending = 0
        return text

    def _stripped(self, text: str) -> str:
        """Strips spaces from the start of the text, up to its first other character."""
        rest = text.lstrip(" ")
        spaces = min(len(text) - len(rest), self._strip)
        self._strip = 0 if rest else self._strip - spaces
        return text[spaces:]
