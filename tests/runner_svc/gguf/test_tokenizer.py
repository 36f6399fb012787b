"""The tokenizer that a GGUF file's keys become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from tokenizers import Tokenizer

from runner_svc.backends.byte_tokenizer import CHAT_TEMPLATE, END_OF_TEXT_ID, IM_END_ID, IM_START_ID, byte_alphabet
from runner_svc.gguf.errors import GgufError
from runner_svc.gguf.keys import Keys
from runner_svc.gguf.splitting import SPLITTINGS
from runner_svc.gguf.tokenizer import StatedTokenizer, tokenizer_json, write_tokenizer
from runner_svc.model.folder.json_file import read_object
from tests.support.tiny_gguf import byte_level_keys, sentence_piece_keys, sentence_piece_tokens

# Spelled outside the byte alphabet, and no `<|endoftext|>` among them: so are DeepSeek's.
DEEPSEEK = {IM_START_ID: "<｜begin▁of▁sentence｜>", IM_END_ID: "<｜end▁of▁sentence｜>", END_OF_TEXT_ID: "<｜User｜>"}
# The bytes but 0xFF, and behind them BOS, EOS, a word of a user's, and an ordinary token that pads.
BYTES = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*byte_alphabet()[:-1], "<s>", "</s>", "<think>", "th"],
    "tokenizer.ggml.token_type": [TokenType.NORMAL] * 255
    + [TokenType.CONTROL] * 2
    + [TokenType.USER_DEFINED, TokenType.NORMAL],
    "tokenizer.ggml.merges": ["t h"],
    "tokenizer.ggml.bos_token_id": 255,
    "tokenizer.ggml.eos_token_id": 256,
    "tokenizer.ggml.padding_token_id": 258,
}


def stated(keys: dict[str, Any] = BYTES, architecture: str = "llama", **changes: Any) -> StatedTokenizer:
    """The tokenizer of these keys; of `changes`, whose names lack "tokenizer.ggml.", None removes a key."""
    renamed = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    merged = {"general.architecture": architecture, **keys, **renamed}
    return StatedTokenizer.read(Keys({key: value for key, value in merged.items() if value is not None}))


def made(stated: StatedTokenizer) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_json(stated)))


def test_special_tokens_outside_the_byte_alphabet_keep_their_ids() -> None:
    tokenizer = made(stated(byte_level_keys("smollm", specials=DEEPSEEK)))
    assert tokenizer.encode("".join(DEEPSEEK.values())).ids == list(DEEPSEEK)
    assert tokenizer.encode("<|endoftext|>").ids == [*b"<|endoftext|>"]


def test_names_of_special_tokens(tmp_path: Path) -> None:
    write_tokenizer(stated(seperator_token_id=257, mask_token_id=258), tmp_path)
    config = read_object(tmp_path / "tokenizer_config.json")
    named = {role: text for role, text in config.items() if role.endswith("_token")}
    expected = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "th", "sep_token": "<think>", "mask_token": "th"}
    assert named == expected


def test_a_byte_level_vocabulary() -> None:
    tokenizer = made(stated())
    ids = tokenizer.encode("a the\xe9 <s></s><think>").ids
    assert ids == [*b"a ", 258, *"e\xe9 ".encode(), 255, 256, 257]
    assert tokenizer.decode(ids) == "a the\xe9 <think>"
    assert tokenizer.encode("<|endoftext|>").ids == [*b"<|endoftext|>"]


def test_bytes_without_a_token_are_left_out() -> None:
    tokens = [text for text in BYTES["tokenizer.ggml.tokens"] if text != byte_alphabet()[4]]
    tokenizer = made(
        stated(tokens=tokens, token_type=None, bos_token_id=None, eos_token_id=None, padding_token_id=None)
    )
    assert tokenizer.encode("a\x04b").tokens == ["a", "b"]


def test_without_types_only_the_ends_are_special() -> None:
    tokenizer = made(stated(token_type=None))
    assert tokenizer.encode("<s></s>").ids == [255, 256]
    assert tokenizer.encode("<think>").ids == [*b"<", 258, *b"ink>"]
    assert tokenizer.decode([255, 258, 256]) == "th"


@pytest.mark.parametrize(("adds_bos", "adds_eos"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("keys", [BYTES, sentence_piece_keys()], ids=["gpt2", "llama"])
def test_what_is_added_to_a_text(keys: dict[str, Any], adds_bos: bool, adds_eos: bool) -> None:
    added = stated(keys, add_bos_token=adds_bos, add_eos_token=adds_eos)
    ids = made(added).encode("", add_special_tokens=True).ids
    assert ids == [added.ids["bos_token"]] * adds_bos + [added.ids["eos_token"]] * adds_eos


@pytest.mark.parametrize(("keys", "adds"), [(BYTES, False), (sentence_piece_keys(), True)], ids=["gpt2", "llama"])
def test_bos_where_the_file_does_not_say(keys: dict[str, Any], adds: bool) -> None:
    assert stated(keys, add_bos_token=None).adds_bos is adds
    if keys is BYTES:
        assert stated(keys, pre="llama-bpe", add_bos_token=None).adds_bos


def test_nothing_is_added_where_the_file_has_no_such_token() -> None:
    without = stated(add_bos_token=True, add_eos_token=True, bos_token_id=None, eos_token_id=None)
    assert made(without).encode("a").ids == [*b"a"]


def test_all_ends() -> None:
    assert stated().ends == [256]
    assert stated().config_ids() == {"bos_token_id": 255, "pad_token_id": 258, "eos_token_id": 256}
    several = stated(eot_token_id=257, eom_token_id=258, eos_token_ids=[256, 3])
    assert several.config_ids()["eos_token_id"] == [256, 3, 257, 258]
    # Each is a special token, whatever its kind.
    assert {token["id"] for token in tokenizer_json(several)["added_tokens"] if token["special"]} == {
        3,
        *range(255, 259),
    }
    assert stated(eos_token_id=None).config_ids() == {"bos_token_id": 255, "pad_token_id": 258}


def test_a_space_that_a_text_does_not_have() -> None:
    tokens = sentence_piece_tokens()
    with_space, without = (made(stated(sentence_piece_keys(), add_space_prefix=adds)) for adds in (True, False))
    assert [tokens[token] for token in with_space.encode("the", add_special_tokens=False).ids] == ["▁the"]
    assert [tokens[token] for token in without.encode("the", add_special_tokens=False).ids] == ["t", "he"]
    assert with_space.decode(with_space.encode("the  in").ids) == "the  in"
    assert without.decode(without.encode(" the  in").ids) == " the  in"


def test_a_piece_that_is_a_token_as_a_whole() -> None:
    """In Llama 3's tokenizers it is taken whole, though no merges make it."""
    tokens = [*BYTES["tokenizer.ggml.tokens"], "the"]
    kinds = [*BYTES["tokenizer.ggml.token_type"], 1]
    for pre, expected in (("llama-bpe", ["the"]), ("smaug-bpe", ["th", "e"])):
        made_of = made(stated(tokens=tokens, token_type=kinds, pre=pre, add_bos_token=False))
        assert made_of.encode("the").tokens == expected


@pytest.mark.parametrize("pre", SPLITTINGS)
def test_each_rule_of_splitting_loses_nothing(pre: str) -> None:
    text = "It's 12345 o'clock,\n\n  don't YOU'll  know?\tÉtéß 一二 🙂 \n"
    tokenizer = made(stated(byte_level_keys(pre), add_bos_token=False))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_templates(tmp_path: Path) -> None:
    write_tokenizer(stated({**BYTES, "tokenizer.chat_template": CHAT_TEMPLATE}), tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    named = {"tokenizer.chat_template.tool_use": "tools", "tokenizer.chat_templates": ["tool_use"]}
    folder = tmp_path / "named"
    folder.mkdir()
    write_tokenizer(stated({**BYTES, **named, "tokenizer.chat_template": CHAT_TEMPLATE}), folder)
    assert not (folder / "chat_template.jinja").exists()
    assert read_object(folder / "tokenizer_config.json")["chat_template"] == [
        {"name": "default", "template": CHAT_TEMPLATE},
        {"name": "tool_use", "template": "tools"},
    ]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"eos_token_id": 259}, r"Its tokenizer.ggml.eos_token_id is token 259, but it has 259 tokens\."),
        ({"eos_token_ids": [1, -1]}, r"Its tokenizer.ggml.eos_token_ids has a token -1, but it has 259 tokens\."),
        ({"token_type": [1, 1]}, r"It has 2 token types, but 259 tokens\."),
        ({"token_type": [1] * 258 + [7]}, r"Its tokenizer.ggml.token_type has a type 7, which is not known\."),
        ({"model": "bert"}, r"Its tokenizer.ggml.model is 'bert', which is not supported; supported: gpt2, llama\."),
        (
            {"pre": "falcon"},
            r"Its tokenizer.ggml.pre is 'falcon', so the rule by which its tokenizer splits a text is unk",
        ),
        ({"pre": None}, r"It has no key 'tokenizer.ggml.pre', so the rule by which its tokenizer splits a text is unk"),
        ({"tokens": None}, r"It has no key 'tokenizer.ggml.tokens', which must be there\."),
        ({"merges": None}, r"It has no key 'tokenizer.ggml.merges', which must be there\."),
        ({"merges": ["t x"]}, r"Its tokenizer.ggml.merges has 't x', which is no pair of tokens that make a third\."),
        ({"scores": [0.0]}, r"It has 1 scores, but 259 tokens\."),
        ({"add_bos_token": 1}, r"Its tokenizer.ggml.add_bos_token is 1, where true or false is needed\."),
        ({"model": "llama", "pre": "default", "merges": None}, r"It has neither 'tokenizer.ggml.scores' nor"),
        ({"model": "llama", "pre": "qwen2"}, r"Its tokenizer.ggml.pre is 'qwen2', which a SentencePiece vocabulary"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(GgufError, match=sentence):
        stated(**changes)


def test_a_template_that_is_named_only() -> None:
    with pytest.raises(GgufError, match=r"It names a chat template 'rag', which it doesn't have\."):
        stated({**BYTES, "tokenizer.chat_templates": ["rag"]})
