"""Finds stop strings in a stream of text with an Aho-Corasick automaton, compiled once per set of strings.

The match that completes first wins; of the strings that end at the same character, the longest (the one that starts
first) is the match. This rule needs no look-ahead, so the result doesn't depend on how the text is split into tokens. A
string that starts earlier but would complete later does not match.

The automaton works on characters. Its state also gives the length of text to hold back: the longest suffix of the text
that is a proper prefix of a stop string. A character costs amortized O(1) for any set of strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

ROOT = 0
"""State before any character has matched."""
_CACHED_CHARACTERS = 1024
"""Stop strings of up to this many characters in all are cached, which bounds the cache's memory."""


@dataclass(frozen=True, slots=True)
class Match:
    """A matched stop string, and the offset of its end in the scanned text, in characters (at least 1)."""

    string: str
    end: int


class StopSet:
    """The compiled automaton of a set of stop strings. Immutable, so that choices can share it.

    `strings`: any number of non-empty strings. Memory and build time are linear in their total length.
    """

    __slots__ = ("_children", "_fail", "_match", "first_characters", "hold")

    def __init__(self, strings: Sequence[str]) -> None:
        if not all(strings):
            raise ValueError("a stop string is empty; use non-empty strings")
        self._children: list[dict[str, int]] = [{}]
        self._fail: list[int] = [ROOT]
        self._match: list[str | None] = [None]
        self.hold: list[int] = [0]
        """By state: number of characters at the end of the text that may become part of a stop string."""
        self.first_characters = frozenset(string[0] for string in strings)
        """The characters that lead out of the root state."""
        for string in strings:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        state = ROOT
        for depth, character in enumerate(string, 1):
            following = self._children[state].get(character)
            if following is None:
                following = len(self._children)
                self._children[state][character] = following
                self._children.append({})
                self._fail.append(ROOT)
                self._match.append(None)
                self.hold.append(depth)
            state = following
        self._match[state] = string

    def _link(self) -> None:
        """Computes the failure links, longest matches and hold-back lengths, breadth first."""
        queue = deque(self._children[ROOT].values())
        while queue:
            state = queue.popleft()
            fail = self._fail[state]
            if self._match[state] is None:
                self._match[state] = self._match[fail]
            if not self._children[state]:  # a complete string that is not a prefix of a longer one
                self.hold[state] = self.hold[fail]
            for character, child in self._children[state].items():
                if state != ROOT:
                    self._fail[child] = self._step(fail, character)
                queue.append(child)

    def _step(self, state: int, character: str) -> int:
        children, fail = self._children, self._fail
        while (following := children[state].get(character)) is None:
            if state == ROOT:
                return ROOT
            state = fail[state]
        return following

    def scan(self, state: int, text: str) -> tuple[int, Match | None]:
        """Reads `text` from a state up to the first match. Returns the new state and the match."""
        if state == ROOT and self.first_characters.isdisjoint(text):
            return ROOT, None
        step, match = self._step, self._match
        for end, character in enumerate(text, 1):
            state = step(state, character)
            if (string := match[state]) is not None:
                return state, Match(string, end)
        return state, None

    def advance(self, state: int, text: str) -> int:
        """Reads `text` from a state, ignoring matches. Returns the new state."""
        for character in text:
            state = self._step(state, character)
        return state


_cached_stop_set = lru_cache(maxsize=128)(StopSet)


def stop_set(strings: Sequence[str]) -> StopSet:
    """Returns the automaton of these strings. Small ones are cached, as backends repeat the same stop strings."""
    strings = tuple(strings)
    if sum(map(len, strings)) > _CACHED_CHARACTERS:
        return StopSet(strings)
    return _cached_stop_set(strings)
