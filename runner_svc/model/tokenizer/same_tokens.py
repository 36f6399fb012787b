"""Whether two models have the same tokens: only ids pass between a draft model and its target, never text.

Rules by which text is split do not matter then, and formats write them differently. So each id that both tokenizers
have must be the same token. One may have more: reserved ids differ between the sizes of a family.
"""

from __future__ import annotations

from tokenizers import Tokenizer

_LEAST_SHARED = 0.9
"""Share of the target's tokens that the other tokenizer must have."""


def different_tokens(draft: bytes, target: bytes) -> str | None:
    """Returns in what the tokenizer `draft` (tokenizer.json) differs from `target`, as the start of a sentence; None
    if its tokens are the same."""
    if draft == target:
        return None
    own, expected = _by_id(draft), _by_id(target)
    shared = sorted(own.keys() & expected.keys())
    for token in shared:
        if own[token] != expected[token]:
            return f"its token {token} is {own[token]!r}, but {expected[token]!r} of the served model"
    if len(shared) < _LEAST_SHARED * len(expected):
        return f"it has {len(shared)} of the {len(expected)} tokens of the served model"
    return None


def _by_id(tokenizer: bytes) -> dict[int, str]:
    vocabulary = Tokenizer.from_str(tokenizer.decode()).get_vocab(with_added_tokens=True)
    return {token: text for text, token in vocabulary.items()}
