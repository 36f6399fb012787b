"""Compares a tokenizer of transformers with its serialized part, which the scheduler uses, on a few texts.

Some classes of transformers change ids or text in Python. The scheduler would not do that, so they are refused.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from runner_svc.model.tokenizer.errors import UnusableTokenizer

TEXTS = (
    "The quick brown fox.",
    " a  b . c , d ! e ? it 's n't I 'm we 've they 're ' x ' y",
    "Ünïcödé 中文 👍 ﬁ\n\ttabs <s> [INST] ##x",
    "",
)


def check_likeness(loaded: Any, backend: Tokenizer) -> None:
    """Raises UnusableTokenizer if transformers' tokenizer gives other ids or other text than its `backend`."""
    kind = type(loaded).__name__
    for text in TEXTS:
        ids = backend.encode(text).ids
        if list(loaded(text)["input_ids"]) != ids:
            raise UnusableTokenizer(f"{kind} of transformers changes ids in Python, which isn't supported.")
        plain = backend.encode(text, add_special_tokens=False).ids
        if loaded.decode(plain, skip_special_tokens=True) != backend.decode(plain, skip_special_tokens=True):
            cause = (
                "`clean_up_tokenization_spaces` of tokenizer_config.json changes spaces in answers"
                if loaded.clean_up_tokenization_spaces
                else f"{kind} of transformers changes text in Python"
            )
            raise UnusableTokenizer(f"{cause}, which isn't supported; use a tokenizer without it.")
