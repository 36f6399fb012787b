"""Converts the tokenizer of a GGUF file to the files of a Hugging Face folder.

Where transformers (5.24) differs from the file, the file is followed: transformers drops `add_space_prefix` and the
tokens that end a turn, splits by GPT-2's rule if it does not know the name of the rule, and appends `<s>`, `</s>` and
`<unk>` to a SentencePiece vocabulary without them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from runner_svc.gguf.errors import GgufError
from runner_svc.gguf.keys import Keys
from runner_svc.gguf.splitting import Splitting, splitting_of

# Values of `tokenizer.ggml.model` for byte-level vocabularies and for SentencePiece.
BYTE_LEVEL, SENTENCE_PIECE = "gpt2", "llama"
# The file's names of special tokens, by those of transformers.
_IDS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",
    "cls_token": "cls",
    "mask_token": "mask",
}
# Further tokens that end an answer: end of turn, and end of message.
_ENDS = ("eot", "eom")
# Values of `tokenizer.ggml.token_type`, which are 0 to 6.
_UNKNOWN, _CONTROL, _USER_DEFINED, _LAST = 2, 3, 4, 6
_SPACE = "▁"
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


class Style(Enum):
    """Where SentencePiece tokenizers add spaces; it depends on the architecture."""

    LLAMA = "before a text"
    PHI3 = "before each piece of a text between special tokens"
    GEMMA = "nowhere"


_STYLES = {"phi3": Style.PHI3, "gemma": Style.GEMMA, "gemma2": Style.GEMMA, "gemma3": Style.GEMMA}

AS_WRITTEN = "roster_as_written"
"""Key of a tokenizer_config.json that Roster wrote: tokenizer.json is complete, and transformers need not load it."""


@dataclass(frozen=True, slots=True)
class StatedTokenizer:
    """The fields of a file's tokenizer; `ids` has the ids of special tokens, by names such as "eos_token"."""

    vocabulary: str
    splitting: Splitting | None
    """None for a SentencePiece vocabulary."""
    tokens: list[str]
    types: list[int]
    merges: list[tuple[str, str]]
    scores: list[float]
    """Of the tokens of a SentencePiece vocabulary without merges, which follow from them."""
    ids: dict[str, int]
    ends: list[int]
    """Ids of tokens that end an answer, EOS first."""
    adds_bos: bool
    adds_eos: bool
    adds_space: bool
    """Whether a SentencePiece tokenizer adds spaces."""
    style: Style
    chat_template: str
    named_templates: dict[str, str]

    @classmethod
    def read(cls, keys: Keys) -> StatedTokenizer:
        """Reads the keys. Raises GgufError for fields that are inconsistent or not supported."""
        vocabulary = keys.text("tokenizer.ggml.model")
        if vocabulary not in (BYTE_LEVEL, SENTENCE_PIECE):
            raise keys.refuse(
                "tokenizer.ggml.model", f"which is not supported; supported: {BYTE_LEVEL}, {SENTENCE_PIECE}"
            )
        is_bytes = vocabulary == BYTE_LEVEL
        pre = keys.text("tokenizer.ggml.pre", "")
        splitting = splitting_of(pre) if is_bytes else None
        if not is_bytes and pre not in ("", "default"):
            raise keys.refuse("tokenizer.ggml.pre", "which a SentencePiece vocabulary can't have")
        style = _STYLES.get(keys.architecture, Style.LLAMA)
        tokens = keys.texts("tokenizer.ggml.tokens")
        if not tokens:
            raise GgufError("It has no key 'tokenizer.ggml.tokens', which must be there.")
        if not is_bytes and style is Style.GEMMA:  # its runs of spaces are spelled as spaces
            tokens = [_SPACE * len(text) if text and not text.strip(" ") else text for text in tokens]
        ids = {
            role: token for role, name in _IDS.items() if (token := _id(keys, f"{name}_token_id", tokens)) is not None
        }
        merges = _merges(keys, tokens, is_bytes)
        templates = {key.split(".", 2)[2]: keys.text(key) for key in keys.matching(r"tokenizer\.chat_template\..+")}
        if lacking := [name for name in keys.texts("tokenizer.chat_templates") if name not in templates]:
            raise GgufError(f"It names a chat template {lacking[0]!r}, which it doesn't have.")
        return cls(
            vocabulary=vocabulary,
            splitting=splitting,
            tokens=tokens,
            types=_types(keys, len(tokens)),
            merges=merges,
            scores=[] if merges or is_bytes else _scores(keys, len(tokens), style),
            ids=ids,
            ends=_ends(keys, tokens, ids),
            # Older files lack the key; llama.cpp then adds BOS for SentencePiece and for some rules of splitting.
            adds_bos=keys.flag("tokenizer.ggml.add_bos_token", splitting is None or splitting.adds_bos),
            adds_eos=keys.flag("tokenizer.ggml.add_eos_token", False),
            adds_space=keys.flag("tokenizer.ggml.add_space_prefix", style is not Style.GEMMA) and not is_bytes,
            style=style,
            chat_template=keys.text("tokenizer.chat_template", ""),
            named_templates=templates,
        )

    def config_ids(self) -> dict[str, int | list[int]]:
        """Returns the ids of special tokens for config.json and generation_config.json."""
        named: dict[str, int | list[int]] = {
            f"{role}_id": self.ids[role] for role in ("bos_token", "pad_token") if role in self.ids
        }
        if self.ends:
            named["eos_token_id"] = self.ends[0] if len(self.ends) == 1 else self.ends
        return named


def write_tokenizer(stated: StatedTokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template."""
    config: dict[str, Any] = {
        AS_WRITTEN: True,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "roster_as_written": True,  # tokenizer.json is complete, and nothing is to be added to it
        **{role: stated.tokens[token] for role, token in stated.ids.items()},
    }
    if stated.named_templates:
        default = {"default": stated.chat_template} if stated.chat_template else {}
        named = {**default, **stated.named_templates}
        config["chat_template"] = [{"name": name, "template": template} for name, template in named.items()]
    elif stated.chat_template:
        (folder / "chat_template.jinja").write_text(stated.chat_template, encoding="utf-8")
    _write(folder / "tokenizer_config.json", config)
    _write(folder / "tokenizer.json", tokenizer_json(stated))


def tokenizer_json(stated: StatedTokenizer) -> dict[str, Any]:
    """Returns the contents of tokenizer.json."""
    vocabulary = {text: token for token, text in enumerate(stated.tokens)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(stated, vocabulary)),
        **(_byte_level(stated.splitting) if stated.splitting is not None else _sentence_piece(stated)),
        "post_processor": _template(stated),
        "model": _model(stated, vocabulary),
    }


def _id(keys: Keys, name: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{name}"
    if key not in keys:
        return None
    token = keys.integer(key, least=0)
    if token >= len(tokens):
        raise GgufError(f"Its {key} is token {token}, but it has {len(tokens)} tokens.")
    return token


def _types(keys: Keys, count: int) -> list[int]:
    types = keys.integers("tokenizer.ggml.token_type")
    if types and len(types) != count:
        raise GgufError(f"It has {len(types)} token types, but {count} tokens.")
    if unknown := [kind for kind in types if not 0 <= kind <= _LAST]:
        raise GgufError(f"Its tokenizer.ggml.token_type has a type {unknown[0]}, which is not known.")
    return types


def _ends(keys: Keys, tokens: list[str], ids: dict[str, int]) -> list[int]:
    found = [ids["eos_token"]] if "eos_token" in ids else []
    for token in keys.integers("tokenizer.ggml.eos_token_ids"):
        if not 0 <= token < len(tokens):
            raise GgufError(f"Its tokenizer.ggml.eos_token_ids has a token {token}, but it has {len(tokens)} tokens.")
        found.append(token)
    found += [end for name in _ENDS if (end := _id(keys, f"{name}_token_id", tokens)) is not None]
    return list(dict.fromkeys(found))


def _merges(keys: Keys, tokens: list[str], is_bytes: bool) -> list[tuple[str, str]]:
    if is_bytes and "tokenizer.ggml.merges" not in keys:
        raise GgufError("It has no key 'tokenizer.ggml.merges', which must be there.")
    known = set(tokens)
    merges = []
    for merge in keys.texts("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if left not in known or right not in known or left + right not in known:
            raise GgufError(f"Its tokenizer.ggml.merges has {merge!r}, which is no pair of tokens that make a third.")
        merges.append((left, right))
    if not merges and not is_bytes and "tokenizer.ggml.scores" not in keys:
        raise GgufError("It has neither 'tokenizer.ggml.scores' nor 'tokenizer.ggml.merges'; one must be there.")
    scores = keys.numbers("tokenizer.ggml.scores")
    if scores and len(scores) != len(tokens):
        raise GgufError(f"It has {len(scores)} scores, but {len(tokens)} tokens.")
    return merges


def _scores(keys: Keys, count: int, style: Style) -> list[float]:
    if style is Style.GEMMA:  # the order of its merges is that of its tokens, not of their scores
        return [-float(token) for token in range(count)]
    return keys.numbers("tokenizer.ggml.scores")


def _implied_merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Returns every pair of tokens that makes a third, that of the highest score first.

    The order is that of `generate_merges` in transformers, including ties.
    """
    vocabulary = {token: index for index, token in enumerate(tokens)}
    found = []
    for token, score in dict(zip(tokens, scores, strict=False)).items():
        ways = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        ]
        ways.sort(key=lambda way: (vocabulary[way[0]], vocabulary[way[1]]))
        found += [(left, right, score) for left, right in ways]
    found.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)
    return [(left, right) for left, right, _ in found]


def _model(stated: StatedTokenizer, vocabulary: dict[str, int]) -> dict[str, Any]:
    is_bytes = stated.splitting is not None
    # Every byte has a token or, in SmolLM2, is left out. There is no unknown token and no other spelling of a byte.
    unknown = None if is_bytes or "unk_token" not in stated.ids else stated.tokens[stated.ids["unk_token"]]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": "" if is_bytes else None,
        "end_of_word_suffix": "" if is_bytes else None,
        "fuse_unk": not is_bytes,
        "byte_fallback": not is_bytes,
        "ignore_merges": stated.splitting is not None and stated.splitting.ignores_merges,
        "vocab": vocabulary,
        "merges": stated.merges or _implied_merges(stated.tokens, stated.scores),
    }


def _byte_level(splitting: Splitting) -> dict[str, Any]:
    return {"normalizer": None, "pre_tokenizer": splitting.pre_tokenizer, "decoder": _BYTES}


def _sentence_piece(stated: StatedTokenizer) -> dict[str, Any]:
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if stated.adds_space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    steps: dict[str, Any] = {"decoder": {"type": "Sequence", "decoders": decoders}}
    if stated.style is not Style.LLAMA:
        replaced: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        prepended = [{"type": "Prepend", "prepend": _SPACE}] if stated.adds_space else []
        return {
            **steps,
            "normalizer": {"type": "Sequence", "normalizers": [*prepended, replaced]},
            "pre_tokenizer": None,
        }
    scheme = "first" if stated.adds_space else "never"
    spaces = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": False}
    return {**steps, "normalizer": None, "pre_tokenizer": spaces}


def _added_tokens(stated: StatedTokenizer, vocabulary: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yields tokens that are matched before a text is split: special ones, and user-defined ones such as `<think>`."""
    # Not the padding, which in some files is an ordinary token such as "!".
    always_special = {stated.ids.get("bos_token"), *stated.ends}
    kinds = stated.types or [0] * len(stated.tokens)
    for token, (text, kind) in enumerate(zip(stated.tokens, kinds, strict=True)):
        special = kind in (_UNKNOWN, _CONTROL) or token in always_special
        is_found = special or (kind == _USER_DEFINED and text.strip(_SPACE))  # such a token is not in a text
        if is_found and vocabulary[text] == token:  # the last one of those with the same text
            plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            yield {"id": token, "content": text, **plain, "special": special}


def _template(stated: StatedTokenizer) -> dict[str, Any]:
    """Returns the post-processor that adds BOS and EOS."""
    first = [stated.ids["bos_token"]] if stated.adds_bos and "bos_token" in stated.ids else []
    last = [stated.ids["eos_token"]] if stated.adds_eos and "eos_token" in stated.ids else []

    def around(name: str, type_id: int) -> list[dict[str, Any]]:
        def specials(tokens: list[int]) -> list[dict[str, Any]]:
            return [{"SpecialToken": {"id": stated.tokens[token], "type_id": type_id}} for token in tokens]

        return [*specials(first), {"Sequence": {"id": name, "type_id": type_id}}, *specials(last)]

    texts = {token: stated.tokens[token] for token in (*first, *last)}
    named = {text: {"id": text, "ids": [token], "tokens": [text]} for token, text in texts.items()}
    single = around("A", 0)
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *around("B", 1)],
        "special_tokens": named,
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")  # seconds with an indent
