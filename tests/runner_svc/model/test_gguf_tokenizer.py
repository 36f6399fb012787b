"""The parts of a converted tokenizer that come from the GGUF file, regardless of transformers' version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from gguf import TokenType
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from runner_svc.backends.byte_tokenizer import END_OF_TEXT_ID, IM_END_ID, IM_START_ID, SPECIAL_TOKENS, byte_alphabet
from runner_svc.model.config import ModelConfig
from runner_svc.model.description import describe_model, read_json
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.gguf_tokenizer import StatedTokenizer, write_stated_tokenizer
from runner_svc.model.source import model_folder
from tests.support.tiny_gguf import VOCAB_SIZE, write_tiny_gguf

# Spelled outside the byte alphabet and without `<|endoftext|>`, like DeepSeek's.
DEEPSEEK = {IM_START_ID: "<｜begin▁of▁sentence｜>", IM_END_ID: "<｜end▁of▁sentence｜>", END_OF_TEXT_ID: "<｜User｜>"}


def converted(gguf_file: Path) -> Path:
    return model_folder(str(gguf_file), gguf_file.parent / "cache", lambda what, share: None)


def stated(**changes: Any) -> StatedTokenizer:
    """Returns all bytes but 0xFF, then BOS, EOS, a user-defined token, and an ordinary token for padding."""
    fields: dict[str, Any] = {
        "vocabulary": "gpt2",
        "splitting": "gpt-2",
        "tokens": [*byte_alphabet()[:-1], "<s>", "</s>", "<think>", "th"],
        "types": [TokenType.NORMAL] * 255 + [TokenType.CONTROL] * 2 + [TokenType.USER_DEFINED, TokenType.NORMAL],
        "merges": ["t h"],
        "ids": {"bos_token": 255, "eos_token": 256, "pad_token": 258},
        "adds_bos": False,
        "adds_eos": False,
    }
    return StatedTokenizer(**{**fields, **changes})


def written(folder: Path, stated: StatedTokenizer) -> Tokenizer:
    """Corrects a tokenizer in which everything is wrong."""
    vocabulary = {"<s>": 0, "<|endoftext|>": 1}
    wrong = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<s>", fuse_unk=True, byte_fallback=True))
    wrong.add_special_tokens(["<|endoftext|>"])
    wrong.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    wrong.decoder = decoders.Metaspace()
    wrong.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<s>", "eos_token_id": 255, "unk_token": "<s>", "model_max_length": 8})
    )
    write_stated_tokenizer(stated, folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_tokens_that_an_older_transformers_confuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from_pretrained = transformers.AutoTokenizer.from_pretrained

    def as_5_17(*args: Any, **kwargs: Any) -> Any:
        tokenizer = from_pretrained(*args, **kwargs)
        tokenizer.eos_token = tokenizer.unk_token = SPECIAL_TOKENS[IM_START_ID]
        tokenizer.pad_token = None
        return tokenizer

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", as_5_17)
    folder = converted(write_tiny_gguf(tmp_path / "tiny.gguf"))
    config = ModelConfig.from_hugging_face(read_json(folder / "config.json"))
    model = describe_model("tiny", folder, config, "")
    assert dict(model.special_tokens) == {
        "bos_token": SPECIAL_TOKENS[IM_START_ID],
        "eos_token": SPECIAL_TOKENS[IM_END_ID],
        "pad_token": SPECIAL_TOKENS[END_OF_TEXT_ID],
    }
    assert list(model.eos_token_ids) == [IM_END_ID]


def test_special_tokens_outside_the_byte_alphabet_keep_their_ids(tmp_path: Path) -> None:
    folder = converted(write_tiny_gguf(tmp_path / "tiny.gguf", specials=DEEPSEEK))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("".join(DEEPSEEK.values())).ids == list(DEEPSEEK)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE  # no token is appended to the model's
    assert tokenizer.encode("<|endoftext|>").ids == [*b"<|endoftext|>"]


def test_names_of_special_tokens(tmp_path: Path) -> None:
    written(tmp_path, stated())
    assert read_json(tmp_path / "tokenizer_config.json") == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "th",
        "model_max_length": 8,
    }


def test_a_byte_level_vocabulary(tmp_path: Path) -> None:
    tokenizer = written(tmp_path, stated())
    ids = tokenizer.encode("a the\xe9 <s></s><think>").ids
    assert ids == [*b"a ", 258, *"e\xe9 ".encode(), 255, 256, 257]
    assert tokenizer.decode(ids) == "a the\xe9 <think>"
    assert tokenizer.encode("<|endoftext|>").ids == [*b"<|endoftext|>"]


def test_bytes_without_a_token_are_dropped(tmp_path: Path) -> None:
    tokens = [text for text in stated().tokens if text != byte_alphabet()[4]]
    tokenizer = written(tmp_path, stated(tokens=tokens, types=stated().types[1:], ids={}))
    assert tokenizer.encode("a\x04b").tokens == ["a", "b"]


def test_without_types_only_the_ends_are_special(tmp_path: Path) -> None:
    tokenizer = written(tmp_path, stated(types=[]))
    assert tokenizer.encode("<s></s>").ids == [255, 256]
    assert tokenizer.encode("<think>").ids == [*b"<", 258, *b"ink>"]
    assert tokenizer.decode([255, 258, 256]) == "th"


@pytest.mark.parametrize(("adds_bos", "adds_eos"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("vocabulary", ["gpt2", "llama"])
def test_tokens_added_to_a_text(vocabulary: str, adds_bos: bool, adds_eos: bool, tmp_path: Path) -> None:
    added = stated(vocabulary=vocabulary, adds_bos=adds_bos, adds_eos=adds_eos)
    encoding = written(tmp_path, added).encode("", add_special_tokens=True)
    assert encoding.ids == [255] * adds_bos + [256] * adds_eos


def test_nothing_is_added_without_such_a_token_in_the_file(tmp_path: Path) -> None:
    assert written(tmp_path, stated(adds_bos=True, adds_eos=True, ids={})).encode("a").ids == [*b"a"]


def test_an_id_that_is_not_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.tiny_gguf.IM_END_ID", VOCAB_SIZE)
    gguf_file = write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(UnsupportedModel, match=f"eos_token is token {VOCAB_SIZE}, but it has {VOCAB_SIZE} tokens"):
        converted(gguf_file)
