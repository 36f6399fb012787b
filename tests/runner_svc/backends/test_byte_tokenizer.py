"""The byte tokenizer round-trips any text and any bytes."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer

from runner_svc.backends.byte_tokenizer import IM_END_ID, IM_START_ID, build_byte_tokenizer, byte_alphabet, byte_model


@pytest.mark.parametrize("text", ["", "plain", "  two  spaces ", "日本語🙂\n\x00é", "\u00ad\u0100\u0143 ¡ÿ"])
def test_text_is_one_id_a_byte_and_comes_back(text: str) -> None:
    tokenizer = Tokenizer.from_buffer(byte_model("m", "M", 259, 64).tokenizer)
    ids = tokenizer.encode(text).ids
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text


def test_every_byte_string_decodes_to_its_characters() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    tokenizer = build_byte_tokenizer()
    dice = random.Random(seed)
    for _ in range(200):
        data = bytes(dice.randrange(256) for _ in range(dice.randint(0, 20)))
        assert tokenizer.decode(list(data)) == data.decode(errors="replace")
    assert len(set(byte_alphabet())) == 256


def test_special_tokens_have_ids_of_their_own() -> None:
    tokenizer = build_byte_tokenizer()
    ids = tokenizer.encode("<|im_start|>a<|im_end|>").ids
    assert ids == [IM_START_ID, ord("a"), IM_END_ID]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size is 258"):
        byte_model("m", "M", 258, 64)
