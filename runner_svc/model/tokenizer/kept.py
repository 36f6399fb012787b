"""Keeps loaded tokenizers in the cache folder, so that only the first start of a model imports transformers.

The file's name is a digest of the tokenizer's files and of the versions of the packages that load them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import tempfile
from pathlib import Path

from runner_svc.model.folder.json_file import read_object
from runner_svc.model.tokenizer.as_written import read_as_written
from runner_svc.model.tokenizer.loading import load_tokenizer
from runner_svc.model.tokenizer.parts import TokenizerParts
from runner_svc.model.tokenizer.staging import tokenizer_files

# Part of the digest: raise it when a change here makes kept tokenizers wrong.
TOKENIZER_VERSION = 1
_PACKAGES = ("transformers", "tokenizers", "sentencepiece", "tiktoken")


def read_tokenizer(folder: Path, cache_folder: Path | None) -> TokenizerParts:
    """Returns the folder's tokenizer, kept in `cache_folder` (None: not kept).

    Raises UnusableTokenizer, and BrokenModel for a file that is no JSON object. A cache that can't be read or written
    costs time and nothing else.
    """
    if cache_folder is None:
        return load_tokenizer(folder)
    if folder.resolve().parent == cache_folder.resolve():  # a model that Roster converted
        return read_as_written(folder, read_object(folder / "tokenizer_config.json"))
    path = cache_folder / "tokenizers" / f"{_digest(folder)}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        return TokenizerParts.from_json(path.read_text(encoding="utf-8"))
    parts = load_tokenizer(folder)
    with contextlib.suppress(OSError):
        _write(path, parts.to_json())
    return parts


def _digest(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16, salt=bytes([TOKENIZER_VERSION]))
    for package in _PACKAGES:
        digest.update(f"{package} {_version(package)}\n".encode())
    for path in tokenizer_files(folder):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _write(path: Path, text: str) -> None:
    """Writes the file under another name first, so that an interrupted write leaves nothing that looks whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(scratch, path)
    except OSError:
        os.unlink(scratch)
        raise
