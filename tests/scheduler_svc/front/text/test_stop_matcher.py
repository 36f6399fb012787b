"""The automaton compared with a slow implementation that searches with `endswith`."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.front.text.stop_matcher import ROOT, Match, StopSet, stop_set

letters = st.text(alphabet="abc", min_size=0, max_size=30)
stop_strings = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=6)


def slow_match(strings: list[str], text: str) -> Match | None:
    """Returns the first position where a string ends, and the longest string that ends there."""
    for end in range(1, len(text) + 1):
        ending = [string for string in strings if text[:end].endswith(string)]
        if ending:
            return Match(max(ending, key=len), end)
    return None


def slow_hold(strings: list[str], text: str) -> int:
    """Returns the length of the longest suffix of the text that is a proper prefix of a stop string."""
    return max(
        length
        for length in range(len(text) + 1)
        if length == 0 or any(len(s) > length and s.startswith(text[-length:]) for s in strings)
    )


@given(stop_strings, letters)
def test_the_first_match_to_complete_wins(strings: list[str], text: str) -> None:
    assert StopSet(strings).scan(ROOT, text)[1] == slow_match(strings, text)


@given(stop_strings, letters)
def test_hold_back_is_the_longest_beginning_of_a_stop_string(strings: list[str], text: str) -> None:
    stops = StopSet(strings)
    assert stops.hold[stops.advance(ROOT, text)] == slow_hold(strings, text)


@given(stop_strings, st.lists(letters, max_size=8))
def test_the_cut_into_pieces_changes_nothing(strings: list[str], pieces: list[str]) -> None:
    stops = StopSet(strings)
    state, before, found = ROOT, 0, None
    for piece in pieces:
        state, match = stops.scan(state, piece)
        if match is not None:
            found = Match(match.string, before + match.end)
            break
        before += len(piece)
    assert found == slow_match(strings, "".join(pieces))


def test_a_shorter_string_inside_a_longer_one_completes_first() -> None:
    assert StopSet(["abcd", "bc"]).scan(ROOT, "xabcd")[1] == Match("bc", 4)


def test_of_two_that_complete_together_the_longer_wins() -> None:
    assert StopSet(["c", "abc", "bc"]).scan(ROOT, "xabc")[1] == Match("abc", 4)


def test_an_empty_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopSet(["a", ""])


def test_equal_sets_share_an_automaton_and_big_ones_are_not_kept() -> None:
    assert stop_set(["ab", "c"]) is stop_set(["ab", "c"])
    big = ["x" * 256] * 5
    assert stop_set(big) is not stop_set(big)


def test_the_cost_of_a_character_does_not_grow_with_the_strings() -> None:
    """64 strings of 256 bytes that almost match everywhere cost about as much as one; a naive search, 16,000 times."""
    text = "a" * 20_000

    def seconds(strings: list[str]) -> float:
        stops = StopSet(strings)
        begin = time.process_time()
        assert stops.scan(ROOT, text)[1] is None
        return time.process_time() - begin

    few = seconds(["a" * 8 + "b"])
    many = seconds(["a" * (192 + index) + "b" for index in range(64)])
    assert many < 20 * few + 0.01
