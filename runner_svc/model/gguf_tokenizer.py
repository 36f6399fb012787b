"""Corrects the tokenizer that transformers converts from a GGUF file, by the tokenizer fields of the file.

Each version of transformers gets other parts wrong. 5.17 names the BOS token as EOS and makes an unknown token of bytes
that the vocabulary lacks. Versions before 5.23 add no BOS to a prompt. Versions from 5.18 on append an `<|endoftext|>`
that the file does not have, and special tokens spelled outside the byte alphabet, to the vocabulary. The file states
all of these. Only the rule that splits text is left to transformers, because the file merely names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner_svc.model.tokenizer.as_written import AS_WRITTEN

# Values of `tokenizer.ggml.model` for byte-level vocabularies and for SentencePiece.
_BYTE_LEVEL, _SENTENCE_PIECE = "gpt2", "llama"
# Rules of `tokenizer.ggml.pre` that transformers lacks: it would split numbers into other ids than in training.
_DIGITS_THEN_BYTES = {"smollm"}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# The file's names of special tokens, by those of transformers.
_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Values of `tokenizer.ggml.token_type`.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


@dataclass(frozen=True, slots=True)
class StatedTokenizer:
    """The fields `tokenizer.ggml.*` of a file; `ids` has the ids of special tokens, by names such as "eos_token"."""

    vocabulary: str
    splitting: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    ids: dict[str, int]
    adds_bos: bool
    adds_eos: bool

    @classmethod
    def read(cls, gguf_file: Path) -> StatedTokenizer:
        """Reads the fields. Raises ValueError if it is not a GGUF file or its fields are inconsistent."""
        from gguf import GGUFReader

        reader = GGUFReader(gguf_file)

        def stated(name: str, default: Any) -> Any:
            field = reader.get_field(f"tokenizer.ggml.{name}")
            return default if field is None else field.contents()

        vocabulary, tokens = stated("model", ""), stated("tokens", [])
        ids = {role: stated(f"{name}_token_id", None) for role, name in _IDS.items()}
        for role, token in ids.items():
            if token is not None and token >= len(tokens):
                raise ValueError(f"its {role} is token {token}, but it has {len(tokens)} tokens")
        types = stated("token_type", [])
        if types and len(types) != len(tokens):
            raise ValueError(f"it has {len(types)} token types, but {len(tokens)} tokens")
        return cls(
            vocabulary=vocabulary,
            splitting=stated("pre", ""),
            tokens=tokens,
            types=types,
            merges=stated("merges", []),
            ids={role: token for role, token in ids.items() if token is not None},
            # Older files lack the field; llama.cpp then adds BOS only for SentencePiece.
            adds_bos=stated("add_bos_token", vocabulary == _SENTENCE_PIECE),
            adds_eos=stated("add_eos_token", False),
        )


def write_stated_tokenizer(stated: StatedTokenizer, folder: Path) -> None:
    """Corrects the tokenizer that transformers saved in `folder`."""
    config_file, tokenizer_file = folder / "tokenizer_config.json", folder / "tokenizer.json"
    _write(config_file, _with_special_tokens(_read(config_file), stated))
    if stated.vocabulary == _BYTE_LEVEL:
        _write(tokenizer_file, _byte_level(_read(tokenizer_file), stated) | _template(stated))
    elif stated.vocabulary == _SENTENCE_PIECE:
        _write(tokenizer_file, _read(tokenizer_file) | _template(stated))


def _with_special_tokens(config: dict[str, Any], stated: StatedTokenizer) -> dict[str, Any]:
    replaced = {*_IDS, *(f"{role}_id" for role in _IDS)}  # 5.17 also saves ids, which are as wrong as the names
    others = {key: value for key, value in config.items() if key not in replaced}
    return others | {AS_WRITTEN: True} | {role: stated.tokens[token] for role, token in stated.ids.items()}


def _byte_level(tokenizer: dict[str, Any], stated: StatedTokenizer) -> dict[str, Any]:
    """Returns the serialized tokenizer with the file's vocabulary and the steps of a byte-level one."""
    vocabulary = {text: token for token, text in enumerate(stated.tokens)}
    merges = [merge.split(" ") for merge in stated.merges]
    # Every byte is a token or, in SmolLM2, dropped: there is no unknown token and no byte fallback.
    without_unknown = {"unk_token": None, "fuse_unk": False, "byte_fallback": False}
    corrected = {
        "model": {**tokenizer["model"], **without_unknown, "vocab": vocabulary, "merges": merges},
        "added_tokens": list(_added_tokens(stated, vocabulary)),
        "decoder": _BYTES,
    }
    if stated.splitting in _DIGITS_THEN_BYTES:
        digits = {"type": "Digits", "individual_digits": True}
        corrected["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, _BYTES]}
    return tokenizer | corrected


def _added_tokens(stated: StatedTokenizer, vocabulary: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yields the tokens that are matched before text is split: special and user-defined ones such as `<think>`."""
    # The padding token is not included: in some files it is an ordinary token, such as "!".
    always_special = {stated.ids.get("bos_token"), stated.ids.get("eos_token")}
    kinds = stated.types or [0] * len(stated.tokens)
    for token, (text, kind) in enumerate(zip(stated.tokens, kinds, strict=True)):
        special = kind in (_UNKNOWN, _CONTROL) or token in always_special
        if (special or kind == _USER_DEFINED) and vocabulary[text] == token:  # the last of tokens with the same text
            plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            yield {"id": token, "content": text, **plain, "special": special}


def _template(stated: StatedTokenizer) -> dict[str, Any]:
    """Returns the step of the serialized tokenizer that adds BOS and EOS to a text."""
    first = [stated.ids["bos_token"]] if stated.adds_bos and "bos_token" in stated.ids else []
    last = [stated.ids["eos_token"]] if stated.adds_eos and "eos_token" in stated.ids else []

    def around(name: str, type_id: int) -> list[dict[str, Any]]:
        def specials(tokens: list[int]) -> list[dict[str, Any]]:
            return [{"SpecialToken": {"id": stated.tokens[token], "type_id": type_id}} for token in tokens]

        return [*specials(first), {"Sequence": {"id": name, "type_id": type_id}}, *specials(last)]

    texts = {token: stated.tokens[token] for token in (*first, *last)}
    named = {text: {"id": text, "ids": [token], "tokens": [text]} for token, text in texts.items()}
    single = around("A", 0)
    step = {"type": "TemplateProcessing", "single": single, "pair": [*single, *around("B", 1)], "special_tokens": named}
    return {"post_processor": step}


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")
