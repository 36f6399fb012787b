"""Incremental detokenization compared with `Tokenizer.decode`, for every kind of tokenizer and any tokens."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from roster_protos import inference_pb2
from scheduler_svc.front.text.detokenizer import Detokenizer
from scheduler_svc.front.text.token_texts import TokenTexts, UnsupportedTokenizer
from scheduler_svc.front.text.tokenizer import ModelText
from tests.support import small_tokenizers

TEXTS = [
    "the thing in a the  the",
    " leading and   inner  spaces ",
    "naïve café 中文字符 日本語 한국어",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb, e\u0301 accent",
    "mixed: the 😀x é中\n\ttabs <unk>",
    "",
]
BYTE_PIECES = st.sampled_from([bytes([byte]) for byte in range(256)] + ["é".encode(), "中".encode(), "😀".encode()])


@cache
def original(kind: str) -> Tokenizer:
    return small_tokenizers.ALL[kind]()


@cache
def model_text(kind: str) -> ModelText:
    return ModelText(small_tokenizers.model_of(original(kind)))


def incremental(kind: str, ids: list[int], skip_special_tokens: bool) -> list[str]:
    texts = TokenTexts(original(kind), specials(kind), skip_special_tokens)
    detokenizer = Detokenizer(texts)
    return [detokenizer.push(token) for token in ids] + [detokenizer.finish()]


def specials(kind: str) -> dict[int, str]:
    added = original(kind).get_added_tokens_decoder()
    return {index: token.content for index, token in added.items() if token.special}


@pytest.mark.parametrize("kind", small_tokenizers.BYTE_LEVEL)
@given(data=st.data(), skip=st.booleans())
def test_any_tokens_of_a_byte_level_vocabulary_decode_as_the_library_does(
    kind: str, data: st.DataObject, skip: bool
) -> None:
    size = original(kind).get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 3) | st.integers(0x80, 0xFF), max_size=40))
    assert "".join(incremental(kind, ids, skip)) == original(kind).decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", [*small_tokenizers.BYTE_FALLBACK, *small_tokenizers.OTHERS])
@given(data=st.data(), skip=st.booleans())
def test_any_tokens_but_bytes_of_the_other_vocabularies_decode_as_the_library_does(
    kind: str, data: st.DataObject, skip: bool
) -> None:
    vocabulary = original(kind).get_vocab()
    allowed = sorted(index for token, index in vocabulary.items() if not token.startswith("<0x"))
    ids = data.draw(st.lists(st.sampled_from(allowed), max_size=40))
    assert "".join(incremental(kind, ids, skip)) == original(kind).decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", [*small_tokenizers.BYTE_LEVEL, *small_tokenizers.BYTE_FALLBACK])
@pytest.mark.parametrize("text", TEXTS)
def test_encoded_text_comes_back_as_the_library_decodes_it(kind: str, text: str) -> None:
    ids = original(kind).encode(text).ids
    assert "".join(incremental(kind, ids, True)) == original(kind).decode(ids)


@pytest.mark.parametrize("kind", small_tokenizers.BYTE_FALLBACK)
@given(runs=st.lists(st.lists(BYTE_PIECES, max_size=6), max_size=6))
def test_fallback_bytes_decode_as_utf8_whatever_they_are(kind: str, runs: list[list[bytes]]) -> None:
    """Each run of byte tokens between letters reads as Python decodes it, with U+FFFD for ill-formed parts."""
    vocabulary = original(kind).get_vocab()
    ids: list[int] = [vocabulary["a"]]
    expected = "a"
    for run in runs:
        data = b"".join(run)
        ids += [vocabulary[f"<0x{byte:02X}>"] for byte in data] + [vocabulary["b"]]
        expected += data.decode(errors="replace") + "b"
    assert "".join(incremental(kind, ids, True)) == expected
    if all(_is_utf8(b"".join(run)) for run in runs):
        assert original(kind).decode(ids) == expected


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(data=st.binary(max_size=40))
@example(data=b"\xed\xa0\xed\xa0\x80a")
def test_bytes_are_decided_as_soon_as_they_can_be(data: bytes) -> None:
    """After every byte, all text is out except final bytes that can still become one character."""
    texts = TokenTexts(original("byte_level"), specials("byte_level"), True)
    detokenizer = Detokenizer(texts)
    out = ""
    for count, byte in enumerate(data, 1):
        out += detokenizer.push(byte)
        held = next(n for n in range(4) if not _may_continue(data[:count], n + 1))
        assert detokenizer.pending == held
        assert out == data[: count - held].decode(errors="replace")


def _may_continue(data: bytes, length: int) -> bool:
    """Returns whether some suffix of `length` to 3 bytes begins an incomplete character."""
    return any(
        _is_utf8(data[len(data) - size :] + rest) and len((data[len(data) - size :] + rest).decode()) == 1
        for size in range(length, min(3, len(data)) + 1)
        for rest in _CONTINUATIONS
    )


_CONTINUATIONS = [bytes([first, *[0x80] * more]) for first in (0x80, 0x90, 0xA0, 0x8F, 0x9F, 0xBF) for more in range(3)]


@pytest.mark.parametrize("kind", small_tokenizers.BYTE_LEVEL)
@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_holds_half_a_character(kind: str, text: str) -> None:
    pieces = incremental(kind, original(kind).encode(text).ids, True)
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""


def test_a_skipped_token_inside_a_character_does_not_break_it() -> None:
    ids = [0xE2, 257, 0x82, 258, 0xAC]
    assert incremental("byte_level", ids, True) == ["", "", "", "", "€", ""]
    assert "".join(incremental("byte_level", ids, False)) == "\ufffd<|im_end|>\ufffd<|endoftext|>\ufffd"


@pytest.mark.parametrize("kind", small_tokenizers.ALL)
@given(data=st.data(), skip=st.booleans())
def test_the_model_decodes_with_its_own_special_tokens(kind: str, data: st.DataObject, skip: bool) -> None:
    """The model's tokenizer has aliases for special tokens, which must not appear in the text."""
    shown = sorted(specials(kind)) + [original(kind).token_to_id(text) for text in ("a", "the", "one")]
    ids = data.draw(st.lists(st.sampled_from([index for index in shown if index is not None]), max_size=10))
    assert model_text(kind).decode(ids, skip) == original(kind).decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("spaces", range(5))
def test_a_decoder_may_strip_several_spaces_over_several_tokens(spaces: int) -> None:
    tokenizer = small_tokenizers.gemma_like()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 3, 0)])
    ids = [tokenizer.token_to_id(token) for token in ["▁"] * spaces + ["a", "▁", "▁", "b"]]
    text = ModelText(small_tokenizers.model_of(tokenizer))
    assert text.decode(ids) == tokenizer.decode(ids) == " " * max(0, spaces - 3) + "a  b"
    choice = text.choice(inference_pb2.GenerateRequest())
    for token in ids:
        choice.push([token])
    piece = choice.take_piece()
    assert piece is not None and piece.text == tokenizer.decode(ids)


def test_a_decoder_that_can_not_be_streamed_is_refused_by_name() -> None:
    tokenizer = Tokenizer(models.BPE({"a</w>": 0}, []))
    tokenizer.decoder = decoders.BPEDecoder()
    with pytest.raises(UnsupportedTokenizer, match="BPEDecoder"):
        TokenTexts(tokenizer, {}, True)
