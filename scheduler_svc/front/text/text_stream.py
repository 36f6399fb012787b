"""The text of one choice, from sampled tokens to deltas: detokenization, stop strings and hold-back.

A token is delivered when its text is decided: it doesn't end within a character, and no part of its text can become
part of a stop string. Every character belongs to the token that decides it: a character that spans three tokens to the
third, U+FFFD for an incomplete character to the token that reveals it or to the last one. So a token cursor alone
determines the text cursor, and any worker can resume a stream at any token from the log of tokens:

    text delivered with tokens [0, k)  +  text of a stream resumed at k  =  text of all tokens

A stop string matches where it first completes (see stop_matcher). The token in which it completes is the last of the
choice. The choice's text ends before the stop string, or after it if the request includes stop strings. A match must
complete after the first `min_tokens` tokens, but may begin within them. A match that completes in the last received
token ends the choice, as its finish was lost in transit; matches in earlier received tokens are ignored. Delivered text
is never revoked. Characters that only `finish` decides don't match, as the choice has ended.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from roster_protos import inference_pb2
from scheduler_svc.front.text.detokenizer import Detokenizer
from scheduler_svc.front.text.stop_matcher import ROOT, Match, StopSet, stop_set
from scheduler_svc.front.text.token_texts import TokenTexts


class Piece(NamedTuple):
    """A delta: `tokens` with their `text` (which can be ""), after the first `first_index` tokens of the choice."""

    first_index: int
    tokens: list[int]
    text: str


@dataclass(frozen=True, slots=True)
class TextOptions:
    """A request's options for its text; defaults and ranges are those of the public API."""

    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    include_stop_string: bool = False
    skip_special_tokens: bool = True

    @classmethod
    def of(cls, request: inference_pb2.GenerateRequest) -> TextOptions:
        """Returns the options of a validated request."""
        stop, output = request.stop, request.output
        return cls(
            stop_strings=tuple(stop.strings),
            min_tokens=stop.min_tokens,
            include_stop_string=stop.include_stop_string,
            skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        )


class ChoiceText:
    """Converts one choice's tokens into deltas. It uses no clock and no I/O.

    `texts` must be the table for `options.skip_special_tokens`. `received`: tokens that an earlier attempt delivered;
    they count as pushed and delivered.
    """

    __slots__ = (
        "_delivered",
        "_detokenizer",
        "_first_match",
        "_held_cuts",
        "_held_ends",
        "_held_start",
        "_held_text",
        "_held_tokens",
        "_include",
        "_lookup",
        "_ready_text",
        "_ready_tokens",
        "_settled",
        "_state",
        "_stops",
        "num_tokens",
        "stop",
    )

    def __init__(self, texts: TokenTexts, options: TextOptions, received: Sequence[int] = ()) -> None:
        self._lookup = texts.__getitem__
        self._detokenizer = Detokenizer(texts)
        self._stops: StopSet | None = stop_set(options.stop_strings) if options.stop_strings else None
        self._include = options.include_stop_string
        self._state = ROOT
        # Number, from 1, of the first token in which a stop string can complete.
        self._first_match = max(options.min_tokens + 1, len(received))
        # Ready tokens are decided and wait for `take_piece`. Held tokens follow them; `_held_text` begins at character
        # `_held_start` of the choice's text. For each held token, `_held_ends` is the character of the choice's text at
        # which its text ends, and `_held_cuts` whether that is within a character. The first `_settled` held tokens
        # don't end within a character that is still incomplete.
        self._ready_tokens: list[int] = []
        self._ready_text = ""
        self._held_tokens: list[int] = []
        self._held_ends: list[int] = []
        self._held_cuts: list[bool] = []
        self._held_text = ""
        self._held_start = 0
        self._settled = 0
        self._delivered = 0
        self.num_tokens = 0
        """Number of tokens of the choice so far, received ones included; final once `stop` is set."""
        self.stop: str | None = None
        """The stop string that matched. Later tokens are ignored."""
        if received:
            self.push(received)
            self._skip()

    def push(self, tokens: Sequence[int]) -> None:
        """Reads sampled tokens, in order."""
        if self.stop is not None:
            return
        if self._detokenizer.plain and self._state == ROOT:  # no tokens are held
            try:
                text = "".join(map(self._lookup, tokens))  # type: ignore[arg-type]
            except TypeError:  # some texts are bytes
                text = None
            if text is not None and (self._stops is None or self._stops.first_characters.isdisjoint(text)):
                self.num_tokens += len(tokens)
                self._ready_tokens += tokens
                self._ready_text += text
                return
        for token in tokens:
            self._push_one(token)
            if self.stop is not None:
                return

    def take_piece(self) -> Piece | None:
        """Removes and returns the decided tokens that are not delivered yet, None if there are none."""
        tokens = self._ready_tokens
        if not tokens:
            return None
        piece = Piece(self._delivered, tokens, self._ready_text)
        self._delivered += len(tokens)
        self._ready_tokens = []
        self._ready_text = ""
        return piece

    def finish(self) -> None:
        """Ends a choice that has ended without a stop string: all its text is decided."""
        rest = self._detokenizer.finish()
        # If no tokens are held, an incomplete character belongs to tokens that an earlier attempt delivered as U+FFFD.
        if self._held_tokens:
            self._held_text += rest
            self._release(len(self._held_tokens))

    def resume(self, tokens: Sequence[int], cursor: int) -> None:
        """Reads all tokens of a choice so far, received ones excluded; the client has the first `cursor` of them.

        Call it on a new object, then `finish` if the choice has ended. Raises ValueError if the cursor is not in
        [0, len(tokens)].
        """
        if not 0 <= cursor <= len(tokens):
            raise ValueError(f"cursor {cursor} is outside the {len(tokens)} tokens of the choice")
        self.push(tokens[:cursor])
        self._skip()
        self.push(tokens[cursor:])

    def _push_one(self, token: int) -> None:
        detokenizer = self._detokenizer
        text = detokenizer.push(token)
        self.num_tokens += 1
        before = len(self._held_text)
        self._held_text += text
        self._held_tokens.append(token)
        self._held_ends.append(self._held_start + before + len(text))
        self._held_cuts.append(detokenizer.pending > 0)
        if not detokenizer.pending:
            self._settled = len(self._held_tokens)
        elif text:  # the previous character is decided, so the incomplete one begins in this token
            self._settled = len(self._held_tokens) - 1
        hold = 0
        if self._stops is not None:
            match = self._scan(self._stops, text)
            if match is not None:
                self._stop_at(match, before + match.end)
                return
            hold = self._stops.hold[self._state]
        # The last `hold` characters can still become part of a stop string.
        limit = self._held_start + len(self._held_text) - hold
        count = bisect_right(self._held_ends, limit, 0, self._settled)
        while count and self._held_cuts[count - 1]:  # it ends within a character that is not released yet
            count -= 1
        self._release(count)

    def _scan(self, stops: StopSet, text: str) -> Match | None:
        if self.num_tokens < self._first_match:
            self._state = stops.advance(self._state, text)
            return None
        self._state, match = stops.scan(self._state, text)
        return match

    def _stop_at(self, match: Match, end: int) -> None:
        """Ends the choice with a match that ends at offset `end` of the held text."""
        self.stop = match.string
        if not self._include:
            end = max(0, end - len(match.string))
        self._held_text = self._held_text[:end]
        self._release(len(self._held_tokens))

    def _release(self, count: int) -> None:
        """Makes the first `count` held tokens ready, with their text; if that is all tokens, with all held text."""
        if count == len(self._held_tokens):
            self._ready_tokens += self._held_tokens
            self._ready_text += self._held_text
            self._held_start += len(self._held_text)
            self._held_tokens, self._held_ends, self._held_cuts = [], [], []
            self._held_text, self._settled = "", 0
        elif count:
            length = self._held_ends[count - 1] - self._held_start
            self._ready_tokens += self._held_tokens[:count]
            self._ready_text += self._held_text[:length]
            self._held_start += length
            self._held_text = self._held_text[length:]
            del self._held_tokens[:count]
            del self._held_ends[:count], self._held_cuts[:count]
            self._settled -= count

    def _skip(self) -> None:
        """Marks all tokens pushed so far as delivered, with the text that they decide."""
        self._release(len(self._held_tokens))
        self._ready_tokens, self._ready_text = [], ""
        self._delivered = self.num_tokens
