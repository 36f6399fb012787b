"""Compares a tokenizer of transformers with its serialized part, which the scheduler uses, on a few texts.

Some classes of transformers change ids or text in Python. The scheduler would not do that, so they are refused. So is a
special token that a chat template can't write, as the tokenizer's normalizer changes its text.
"""

from __future__ import annotations

from collections.abc import Iterable
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
        try:
            ids, plain = backend.encode(text).ids, backend.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises no narrower type
            raise UnusableTokenizer(f"The tokenizer can't encode every text: {error}.") from error
        try:
            theirs, their_text = list(loaded(text)["input_ids"]), loaded.decode(plain, skip_special_tokens=True)
        except Exception as error:  # of any type: such as for a missing argument of layouts or entities
            raise UnusableTokenizer(f"{kind} of transformers can't encode plain text: {error}.") from error
        if theirs != ids:
            raise UnusableTokenizer(f"{kind} of transformers changes ids in Python, which isn't supported.")
        if their_text != backend.decode(plain, skip_special_tokens=True):
            cause = (
                "`clean_up_tokenization_spaces` of tokenizer_config.json changes spaces in answers"
                if loaded.clean_up_tokenization_spaces
                else f"{kind} of transformers changes text in Python"
            )
            raise UnusableTokenizer(f"{cause}, which isn't supported; use a tokenizer without it.")


def check_special_tokens(backend: Tokenizer, ids: Iterable[int]) -> None:
    """Raises UnusableTokenizer if a special token isn't found in a text. `ids`: of the special tokens."""
    if backend.normalizer is None:
        return
    added = backend.get_added_tokens_decoder()
    for token in ids:
        if token not in added:  # an ordinary word
            continue
        text = added[token].content
        if added[token].normalized and token not in backend.encode(f".{text}.", add_special_tokens=False).ids:
            raise UnusableTokenizer(
                f"The tokenizer's special token {text!r} is `normalized`, and the normalizer changes it so that text "
                "never has it; set `normalized` to false in tokenizer.json."
            )
