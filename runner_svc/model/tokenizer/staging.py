"""The files that a tokenizer may be read from, and a folder with nothing else for transformers to read.

transformers opens whatever file a key of tokenizer_config.json names, and looks for code beside the tokenizer. It is
therefore given a folder with the tokenizer's files only, and a tokenizer_config.json without names of files.
"""

from __future__ import annotations

import json
from pathlib import Path

from runner_svc.model.folder.errors import BrokenModel
from runner_svc.model.folder.json_file import AGAIN, read_object, refuse_pointer, refuse_unreadable
from runner_svc.model.tokenizer.errors import MissingTokenizer
from runner_svc.model.tokenizer.tokenizer_keys import FILE_KEYS

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""Files that hold a vocabulary by themselves or with merges.txt; one of them must exist."""
_PATTERNS = (
    *VOCABULARIES,
    "*.model",
    "tokenizer.*.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "config.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
_TEMPLATE = ".jinja"
_MAY_BE_EMPTY = (_TEMPLATE, ".txt")
"""No chat template, and no merges."""


def tokenizer_files(folder: Path) -> list[Path]:
    """Returns the folder's files that decide its tokenizer, sorted.

    Raises BrokenModel for one that can't be read, or is empty, or is a pointer of Git LFS.
    """
    named = {path for pattern in _PATTERNS for path in folder.glob(pattern)}
    named |= {link for pattern in _PATTERNS if (link := folder / pattern).is_symlink()}  # glob leaves out broken ones
    for path in named:
        _check(path)
    return sorted(named)


def _check(path: Path) -> None:
    refuse_unreadable(path)
    with path.open("rb") as file:
        content = file.read(-1 if path.suffix == _TEMPLATE else 64)
    refuse_pointer(path, content)
    if not content and path.suffix not in _MAY_BE_EMPTY:
        raise BrokenModel(f"{path} is empty: {AGAIN}.")
    try:
        content.decode("utf-8" if path.suffix == _TEMPLATE else "latin-1")
    except UnicodeDecodeError as error:
        raise BrokenModel(f"{path} is not UTF-8 text: {AGAIN}, or save it as UTF-8.") from error


def stage(folder: Path, target: Path) -> None:
    """Fills the empty folder `target` with links to the tokenizer's files of `folder`.

    Raises MissingTokenizer if there is no vocabulary, and BrokenModel for an invalid tokenizer_config.json and what
    `tokenizer_files` raises it for.
    """
    files = tokenizer_files(folder)
    names = [path.name for path in files]
    if not any(name in VOCABULARIES or name.endswith(".model") for name in names):
        raise MissingTokenizer(
            f"{folder} has no tokenizer.json, nor {', '.join(VOCABULARIES[1:-1])} or {VOCABULARIES[-1]}."
        )
    for path in files:
        linked = target / path.relative_to(folder)
        linked.parent.mkdir(exist_ok=True)
        if path.name == "tokenizer_config.json":
            config = {key: value for key, value in read_object(path).items() if key not in FILE_KEYS}
            linked.write_text(json.dumps(config), encoding="utf-8")
        else:
            linked.symlink_to(path.resolve())
