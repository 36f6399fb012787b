"""A choice's deltas compared with slow implementations: whole texts, all batches, all cursors, all stop strings."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roster_protos import inference_pb2
from runner_svc.backends.byte_tokenizer import byte_alphabet
from scheduler_svc.front.text.text_stream import ChoiceText, Piece, TextOptions
from scheduler_svc.front.text.tokenizer import ModelText
from tests.support import small_tokenizers

KINDS = sorted(small_tokenizers.ALL)
FAMILY = "hé 👩‍👩‍👧‍👦中文ab"


@cache
def model_text(kind: str) -> ModelText:
    return ModelText(small_tokenizers.model_of(small_tokenizers.ALL[kind]()))


def stream(kind: str, options: TextOptions, received: Sequence[int] = ()) -> ChoiceText:
    request = inference_pb2.GenerateRequest()
    request.stop.strings.extend(options.stop_strings)
    request.stop.min_tokens = options.min_tokens
    request.stop.include_stop_string = options.include_stop_string
    request.output.skip_special_tokens = options.skip_special_tokens
    assert TextOptions.of(request) == options
    return model_text(kind).choice(request, received)


def batches(tokens: Sequence[int], seed: int) -> Iterator[Sequence[int]]:
    """Splits the tokens into runs of 1 to 8."""
    draw = random.Random(seed)
    start = 0
    while start < len(tokens):
        end = start + draw.randint(1, 8)
        yield tokens[start:end]
        start = end


def run(choice: ChoiceText, tokens: Sequence[int], seed: int = 0) -> list[Piece]:
    """Returns all deltas of a choice that ends after these tokens."""
    pieces = []
    for batch in batches(tokens, seed):
        choice.push(batch)
        if (piece := choice.take_piece()) is not None:
            pieces.append(piece)
    choice.finish()
    if (piece := choice.take_piece()) is not None:
        pieces.append(piece)
    assert choice.take_piece() is None
    return pieces


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def slow_ends(kind: str, tokens: Sequence[int], skip_special_tokens: bool = True) -> list[int]:
    """Returns where the text of each token ends: the characters that all tokens up to it decide.

    It decodes prefixes.
    """
    whole = model_text(kind).decode(tokens, skip_special_tokens)
    ends = []
    for count in range(1, len(tokens) + 1):
        text = model_text(kind).decode(tokens[:count], skip_special_tokens)
        # U+FFFD at the end can be an incomplete character, which any following character decides.
        open_end = text.endswith("\ufffd") and not _is_settled(kind, tokens[:count], text, skip_special_tokens)
        ends.append(len(text) - open_end)
    if ends:
        ends[-1] = len(whole)
    return ends


def _is_settled(kind: str, tokens: Sequence[int], text: str, skip_special_tokens: bool) -> bool:
    """Returns whether no continuation byte changes the last character."""
    byte_tokens = [model_text(kind)._tokenizer.token_to_id(name) for name in _byte_names(kind)]
    return all(
        model_text(kind).decode([*tokens, token], skip_special_tokens) == text + "\ufffd"
        for token in byte_tokens
        if token is not None
    )


def _byte_names(kind: str) -> list[str]:
    """Returns the vocabulary's names of UTF-8 continuation bytes."""
    if kind in small_tokenizers.BYTE_FALLBACK:
        return [f"<0x{byte:02X}>" for byte in range(0x80, 0xC0)]
    return byte_alphabet()[0x80:0xC0]


def slow_stop(
    text: str, ends: Sequence[int], options: TextOptions, num_received: int = 0
) -> tuple[str | None, int, str]:
    """Returns (stop string, tokens kept, text), found by checking every position where a string ends, in order."""
    first_token = max(options.min_tokens, num_received - 1)
    for token in range(first_token, len(ends)):
        begin = ends[token - 1] if token else 0
        for end in range(begin + 1, ends[token] + 1):
            ending = [string for string in options.stop_strings if text[:end].endswith(string)]
            if ending:
                stop = max(ending, key=len)
                return stop, token + 1, text[: end if options.include_stop_string else end - len(stop)]
    return None, len(ends), text


def any_tokens(kind: str) -> st.SearchStrategy[list[int]]:
    size = small_tokenizers.ALL[kind]().get_vocab_size()
    encoded = st.sampled_from(small_tokenizers.ALL[kind]().encode(FAMILY).ids or [0])
    return st.lists(st.integers(0, size - 1) | encoded, max_size=30)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 1000), skip=st.booleans())
def test_deltas_join_to_the_whole_text(kind: str, data: st.DataObject, seed: int, skip: bool) -> None:
    tokens = data.draw(any_tokens(kind))
    choice = stream(kind, TextOptions(skip_special_tokens=skip))
    pieces = run(choice, tokens, seed)
    assert text_of(pieces) == model_text(kind).decode(tokens, skip)
    assert [token for piece in pieces for token in piece.tokens] == tokens
    assert [piece.first_index for piece in pieces] == [
        sum(len(piece.tokens) for piece in pieces[:number]) for number in range(len(pieces))
    ]
    assert choice.stop is None and choice.num_tokens == len(tokens)


@pytest.mark.parametrize("kind", KINDS)
@given(
    data=st.data(), seed=st.integers(0, 1000), strings=st.lists(st.sampled_from(["a", "th", "é ", "\ufffd", "he a"]))
)
def test_the_text_of_a_delta_depends_on_its_tokens_only(
    kind: str, data: st.DataObject, seed: int, strings: list[str]
) -> None:
    """Each delta carries exactly the text between its two cursors, whatever the batches and stop strings."""
    tokens = data.draw(any_tokens(kind))
    options = TextOptions(stop_strings=tuple(strings), min_tokens=len(tokens))  # they cause hold-back but never match
    ends = [0, *slow_ends(kind, tokens)]
    whole = model_text(kind).decode(tokens)
    for piece in run(stream(kind, options), tokens, seed):
        last = piece.first_index + len(piece.tokens)
        assert piece.text == whole[ends[piece.first_index] : ends[last]]
        assert whole.startswith(model_text(kind).decode(tokens[:last]))  # no delta ends within a character


def test_no_delta_ends_within_a_character_that_a_stop_string_holds_back() -> None:
    tokens = model_text("byte_level")._tokenizer.encode("éa").ids
    assert len(tokens) == 3
    choice = stream("byte_level", TextOptions(stop_strings=("é ",)))
    choice.push(tokens[:2])
    assert choice.take_piece() is None, (
        "the first of its two tokens would be a delta without text, cut within the character"
    )
    choice.push(tokens[2:])
    assert choice.take_piece() == Piece(0, tokens, "éa")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strings", [(), ("th", "中文"), ("👩‍👧",), ("\u200d👦", "b")])
def test_a_stream_resumes_at_every_cursor(kind: str, strings: tuple[str, ...]) -> None:
    tokens = small_tokenizers.ALL[kind]().encode(FAMILY + "the the").ids
    options = TextOptions(stop_strings=strings)
    whole = model_text(kind).decode(tokens)
    ends = [0, *slow_ends(kind, tokens)]
    stop, kept, text = slow_stop(whole, ends[1:], options)
    for known in range(len(tokens) + 1):  # tokens that exist when the stream is resumed
        for cursor in range(known + 1):
            if cursor > kept:  # more than the choice has
                continue
            choice = stream(kind, options)
            choice.resume(tokens[:known], cursor)
            pieces = [piece] if (piece := choice.take_piece()) is not None else []
            pieces += run(choice, tokens[known:], seed=cursor)
            assert text[: min(ends[cursor], len(text))] + text_of(pieces) == text
            assert [token for piece in pieces for token in piece.tokens] == tokens[cursor:kept]
            assert not pieces or pieces[0].first_index == cursor
            assert (choice.stop, choice.num_tokens) == (stop, kept)


def test_a_cursor_past_the_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="cursor 3"):
        stream("byte_level", TextOptions()).resume([97, 98], 3)


@pytest.mark.parametrize("kind", ["byte_level", "merged_byte_level", "llama_like", "metaspace_first"])
@pytest.mark.parametrize("include", [False, True])
def test_every_substring_of_an_output_stops_it_there(kind: str, include: bool) -> None:
    tokens = small_tokenizers.ALL[kind]().encode("abab the 👍🏽 thé中文").ids
    whole = model_text(kind).decode(tokens)
    ends = slow_ends(kind, tokens)
    for begin in range(len(whole)):
        for end in range(begin + 1, len(whole) + 1):
            options = TextOptions(stop_strings=(whole[begin:end],), include_stop_string=include)
            choice = stream(kind, options)
            pieces = run(choice, tokens, seed=begin * 100 + end)
            stop, kept, text = slow_stop(whole, ends, options)
            assert stop == whole[begin:end]
            assert (choice.stop, choice.num_tokens, text_of(pieces)) == (stop, kept, text)
            assert [token for piece in pieces for token in piece.tokens] == tokens[:kept]


@given(
    data=st.text(alphabet="abé👍", max_size=25),
    strings=st.lists(st.text(alphabet="abé👍", min_size=1, max_size=4), min_size=1, max_size=5),
    min_tokens=st.integers(0, 12),
    num_received=st.integers(0, 12),
    include=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_stops_agree_with_the_slow_twin(
    data: str, strings: list[str], min_tokens: int, num_received: int, include: bool, seed: int
) -> None:
    tokens = list(data.encode())
    num_received = min(num_received, len(tokens))
    options = TextOptions(tuple(strings), min_tokens, include)
    choice = stream("byte_level", options, tokens[:num_received])
    pieces = run(choice, tokens[num_received:], seed)
    ends = slow_ends("byte_level", tokens)
    stop, kept, text = slow_stop(data, ends, options, num_received)
    assert (choice.stop, choice.num_tokens) == (stop, kept)
    delivered = len(data.encode()[:num_received].decode(errors="ignore"))  # never revoked by a match that spans it
    assert text_of(pieces) == text[delivered:]
    assert [token for piece in pieces for token in piece.tokens] == tokens[num_received:kept]


def test_a_stop_string_inside_one_token_cuts_its_text() -> None:
    tokenizer = small_tokenizers.byte_level()
    token = tokenizer.token_to_id("foo bar")
    choice = stream("byte_level", TextOptions(stop_strings=("o b",)))
    choice.push([97, token, 98])
    assert choice.take_piece() == Piece(0, [97, token], "afo")
    assert (choice.stop, choice.num_tokens) == ("o b", 2)
    choice.push([99])
    assert choice.take_piece() is None and choice.num_tokens == 2


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    choice = stream("byte_level", TextOptions(stop_strings=("abcd", "bx")))
    seen = []
    for byte in b"xabcabq":
        choice.push([byte])
        piece = choice.take_piece()
        seen.append(piece.text if piece else None)
    assert seen == ["x", None, None, None, "abc", None, "abq"]


def test_delivered_tokens_may_begin_a_stop_string_but_are_not_taken_back() -> None:
    for include, rest in ((False, ""), (True, "d")):
        choice = stream("byte_level", TextOptions(stop_strings=("abcd",), include_stop_string=include), list(b"xabc"))
        choice.push(list(b"de"))
        assert choice.take_piece() == Piece(4, [100], rest)
        assert (choice.stop, choice.num_tokens) == ("abcd", 5)


def test_a_stop_string_within_the_received_tokens_does_not_stop() -> None:
    choice = stream("byte_level", TextOptions(stop_strings=("b",)), list(b"abc"))
    choice.push(list(b"ad"))
    assert choice.take_piece() == Piece(3, [97, 100], "ad")
    assert choice.stop is None


def test_a_stop_string_that_the_last_received_token_completes_has_ended_the_choice() -> None:
    choice = stream("byte_level", TextOptions(stop_strings=("bc",)), list(b"abc"))
    assert (choice.stop, choice.num_tokens) == ("bc", 3)
    choice.push(list(b"ad"))
    assert choice.take_piece() is None
    patient = stream("byte_level", TextOptions(stop_strings=("bc",), min_tokens=3), list(b"abc"))
    assert patient.stop is None


def test_a_character_left_open_by_received_tokens_goes_on() -> None:
    data = "中".encode()
    choice = stream("byte_level", TextOptions(), list(data[:2]))
    choice.push([data[2]])
    assert choice.take_piece() == Piece(2, [data[2]], "中")
    unfinished = stream("byte_level", TextOptions(), list(data[:2]))
    unfinished.finish()  # the earlier attempt delivered U+FFFD when it ended
    assert unfinished.take_piece() is None


def test_min_tokens_allows_a_match_that_began_earlier() -> None:
    options = TextOptions(stop_strings=("bc",), min_tokens=2)
    choice = stream("byte_level", options)
    choice.push(list(b"abcd"))
    assert choice.take_piece() == Piece(0, [97, 98, 99], "a")
    choice = stream("byte_level", TextOptions(stop_strings=("bc",), min_tokens=3))
    choice.push(list(b"abcd"))
    assert choice.take_piece() == Piece(0, [97, 98, 99, 100], "abcd")


def test_a_stop_string_complete_exactly_at_min_tokens_does_not_count() -> None:
    """Nothing but max_tokens ends a choice with one of its first `min_tokens` tokens; the next one may complete it."""
    data = list(b"a..x.")
    for min_tokens, text in ((1, "a"), (2, "a."), (3, "a..x"), (4, "a..x"), (5, "a..x.")):
        choice = stream("byte_level", TextOptions(stop_strings=(".",), min_tokens=min_tokens))
        assert "".join(piece.text for piece in run(choice, data)) == text
        assert choice.num_tokens == len(text) + (choice.stop is not None) and choice.num_tokens > min(min_tokens, 4)


@pytest.mark.parametrize(
    ("strings", "stop", "text"),
    [
        (["abcd", "bc"], "bc", "a"),
        (["c", "bc", "abc"], "abc", ""),
        (["abcde", "d"], "d", "abc"),
        (["bcx", "cd"], "cd", "ab"),
    ],
)
def test_the_first_to_be_complete_cuts_and_of_equals_the_longest(strings: list[str], stop: str, text: str) -> None:
    for order in (strings, strings[::-1]):
        choice = stream("byte_level", TextOptions(stop_strings=tuple(order)))
        pieces = run(choice, list(b"abcdef"))
        assert (choice.stop, "".join(piece.text for piece in pieces)) == (stop, text)
        assert choice.num_tokens == b"abcdef".index(stop.encode()) + len(stop)


def test_a_cut_never_falls_within_a_character() -> None:
    data = list("x中文y".encode())
    choice = stream("byte_level", TextOptions(stop_strings=("文",)))
    assert "".join(piece.text for piece in run(choice, data)) == "x中"
    assert choice.num_tokens == 7  # with the token that completes the character
    unfinished = stream("byte_level", TextOptions(stop_strings=("文", "\ufffd")))
    assert "".join(piece.text for piece in run(unfinished, data[:6])) == "x中\ufffd"  # it ended without a stop string
    assert unfinished.stop is None and unfinished.num_tokens == 6


def test_many_empty_tokens_behind_held_text_stay_cheap() -> None:
    """Each special token that is skipped while text is held back costs a bisection, not a scan of all held tokens."""
    choice = stream("byte_level", TextOptions(stop_strings=("ab",)))
    choice.push([97, *[257] * 20_000])
    assert choice.take_piece() is None
    choice.push([99])
    assert choice.take_piece() == Piece(0, [97, *[257] * 20_000, 99], "ac")
