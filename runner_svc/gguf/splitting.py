"""The rules by which byte-level tokenizers split a text before merging; a GGUF file only has the name of its rule.

The names are from llama.cpp (MIT, `llama-vocab.cpp`). The expressions are those of the models' tokenizer.json files, as
in transformers (Apache-2.0, `gguf_tokenizer_mapping.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runner_svc.gguf.errors import GgufError

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"

_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
_GPT4O = rf"{_CASED[0]}{_ENDINGS}?|{_CASED[1]}{_ENDINGS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"


@dataclass(frozen=True, slots=True)
class Splitting:
    """A rule, and the defaults of tokenizers that have it."""

    steps: tuple[dict[str, Any], ...]
    """Pre-tokenizers, as in tokenizer.json."""
    ignores_merges: bool = False
    """Whether a piece that equals a token becomes that token without merges."""
    adds_bos: bool = False
    """Whether a text starts with BOS if the file has no key for it."""

    @property
    def pre_tokenizer(self) -> dict[str, Any]:
        """Returns the steps as one pre-tokenizer of tokenizer.json."""
        return self.steps[0] if len(self.steps) == 1 else {"type": "Sequence", "pretokenizers": list(self.steps)}


def _by(expression: str) -> tuple[dict[str, Any], ...]:
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return split, {**_BYTES, "use_regex": False}


_GPT2_STEP = {**_BYTES, "use_regex": True}
_GPT2 = Splitting((_GPT2_STEP,))
_DIGITS = Splitting(({"type": "Digits", "individual_digits": True}, _GPT2_STEP))

_NAMES = {
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat mellum a.x-4.0": _GPT2,
    "smollm starcoder refact command-r codeshell exaone minerva-7b": _DIGITS,
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": Splitting(_by(_LLAMA3), True, True),
    "dbrx smaug-bpe": Splitting(_by(_LLAMA3)),
    "tekken": Splitting(_by(_TEKKEN), True, True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan": Splitting(_by(_QWEN2)),
    "gpt-4o llama4 kanana2 talkie": Splitting(_by(_GPT4O)),
}
SPLITTINGS = {name: splitting for names, splitting in _NAMES.items() for name in names.split()}
"""Rules by `tokenizer.ggml.pre`."""


def splitting_of(name: str) -> Splitting:
    """Returns the rule of that name. Raises GgufError if there is none."""
    if name not in SPLITTINGS:
        known = ", ".join(SPLITTINGS)
        said = f"Its tokenizer.ggml.pre is {name!r}" if name else "It has no key 'tokenizer.ggml.pre'"
        raise GgufError(f"{said}, so the rule by which its tokenizer splits a text is unknown; known: {known}.")
    return SPLITTINGS[name]
