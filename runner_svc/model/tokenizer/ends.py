"""The ids that end an answer.

They are those of generation_config.json, those that config.json states, and the tokenizer's own `eos_token`: the first
is where `generate` of transformers stops, the last what chat programs add. The default of a configuration class counts
only if generation_config.json states nothing, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner_svc.model.tokenizer.errors import UnusableTokenizer


def stated_ends(where: str, values: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Returns the ids of a file's `eos_token_id`: one, several or none (absent or null).

    Raises UnusableTokenizer for anything but an id of the vocabulary or a list of at least one. `where`: the file.
    """
    value = values.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not ids:
        raise UnusableTokenizer(
            f"{where} has an empty list as `eos_token_id`; give the ids that end an answer, or null."
        )
    for token in ids:
        if type(token) is not int:
            raise UnusableTokenizer(f"{where} has {token!r} as `eos_token_id`; it must be an integer, a list or null.")
        if not 0 <= token < vocab_size:
            raise UnusableTokenizer(
                f"{where} has {token} as `eos_token_id`, but the model's ids are 0 to {vocab_size - 1}; correct it."
            )
    return tuple(ids)
