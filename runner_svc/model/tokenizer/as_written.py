"""Tokenizers that are served as tokenizer.json has them, in its own words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from runner_svc.gguf.tokenizer import AS_WRITTEN
from runner_svc.model.tokenizer.errors import UnusableTokenizer
from runner_svc.model.tokenizer.parts import TokenizerParts, special_ids_of
from runner_svc.model.tokenizer.tokenizer_keys import named_tokens

__all__ = ["AS_WRITTEN", "as_in_file", "original_tokenizer", "read_as_written"]


def read_as_written(folder: Path, tokenizer_config: Mapping[str, Any]) -> TokenizerParts:
    """Returns the tokenizer of a folder that Roster wrote, such as that of a GGUF file.

    Raises UnusableTokenizer for one that has been damaged since.
    """
    try:
        text = (folder / "tokenizer.json").read_text("utf-8")
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises no narrower type
        raise UnusableTokenizer(
            f"{folder / 'tokenizer.json'} is not as Roster wrote it ({error}): delete {folder}, which is made again."
        ) from error
    named = dict(named_tokens(tokenizer_config))
    path, template = folder / "chat_template.jinja", tokenizer_config.get("chat_template") or ""
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default", "")
    return TokenizerParts(
        tokenizer=text,
        chat_template=path.read_text("utf-8") if path.is_file() else template,
        special_tokens=named,
        eos_token_id=tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None,
        special_ids=tuple(special_ids_of(tokenizer)),
        notes=(),
    )


def original_tokenizer(folder: Path) -> Tokenizer | None:
    """Returns the tokenizer as tokenizer.json has it, without truncation and padding; None if there is no such file."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    original = Tokenizer.from_file(str(path))
    original.no_truncation()
    original.no_padding()
    return original


def as_in_file(folder: Path, serialized: Mapping[str, Any], original: Tokenizer | None, loaded: str) -> str:
    """Returns the text of tokenizer.json if it is the same tokenizer as `loaded`, else `loaded`.

    Runners with different packages, and those of releases before this module, then have equal tokenizers.
    `serialized`: the contents of tokenizer.json. `original`: see `original_tokenizer`.
    """
    if original is None:
        return loaded
    if original.post_processor is None:  # transformers puts one there, which may do nothing
        step = Tokenizer.from_str(loaded).post_processor
        if step is not None and step.num_special_tokens_to_add(False) == 0:
            original.post_processor = step
    if original.to_str() != loaded:
        return loaded
    if serialized.get("truncation") is None and serialized.get("padding") is None:
        return (folder / "tokenizer.json").read_text("utf-8")
    return json.dumps({**serialized, "truncation": None, "padding": None}, ensure_ascii=False)
