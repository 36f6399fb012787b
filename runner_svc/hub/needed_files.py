"""Which files of a repository a runner reads. The rest is not downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from runner_svc.hub.gguf_files import choose_gguf, gguf_models
from runner_svc.hub.names import HubError, HubName

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DESCRIPTION = (
    CONFIG,
    INDEX,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.*.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "*.model",
    "chat_template.jinja",
)
"""Patterns of the small files beside the weights: what describes the model, and every kind of tokenizer."""
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "*.model")
"""Patterns of files of which a tokenizer has one."""
TEMPLATES = "additional_chat_templates"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def description_files(paths: Iterable[str]) -> list[str]:
    """Returns the files that describe the model: all that is read but weights."""
    return sorted(path for path in paths if _describes(PurePosixPath(path)))


def _describes(path: PurePosixPath) -> bool:
    if str(path.parent) == TEMPLATES:
        return path.suffix == ".jinja"
    return str(path.parent) == "." and any(fnmatchcase(path.name, pattern) for pattern in DESCRIPTION)


def has_tokenizer(paths: Iterable[str]) -> bool:
    """Returns whether a folder with these files has a tokenizer."""
    return any(fnmatchcase(path, pattern) for path in paths for pattern in VOCABULARIES)


def holds_gguf(paths: Iterable[str]) -> bool:
    """Returns whether a folder with these files holds GGUF models, and no other: some have a config.json as well."""
    paths = list(paths)
    has_others = CONFIG in paths and any(path.endswith(".safetensors") and "/" not in path for path in paths)
    return bool(gguf_models(paths)) and not has_others


def gguf_files(paths: Iterable[str], name: HubName) -> tuple[str, ...]:
    """Returns the files of the GGUF model that is meant; () where safetensors are.

    Raises HubError when there are several, or none of that name.
    """
    paths = list(paths)
    if name.file is None and CONFIG in paths and (INDEX in paths or SINGLE in paths):
        return ()
    chosen = choose_gguf(paths, name.file, name.repo)
    if name.file is not None and not chosen:
        raise HubError(f"{name.repo} has no .gguf file; leave out ':{name.file}'.")
    return chosen


def weight_files(paths: Iterable[str], folder: Path, repo: str) -> list[str]:
    """Returns the safetensors files: those that the index in `folder` names, or the single one.

    `paths`: of the repository. Raises HubError when there are none.
    """
    paths = set(paths)
    if INDEX in paths:
        shards = indexed_shards(folder)
        if shards is None:
            raise HubError(f"{INDEX} of {repo} is broken: tell its authors, or give another revision, {repo}@REVISION.")
        if missing := sorted(shards - paths):
            raise HubError(f"{repo} has no {missing[0]}, which its {INDEX} names: give another revision of it.")
        return sorted(shards)
    if SINGLE in paths:
        return [SINGLE]
    raise HubError(f"{repo} has neither {SINGLE} nor {INDEX}{_instead(paths)}.")


def indexed_shards(folder: Path) -> set[str] | None:
    """Returns the files that the index in a folder names; None when it can't be read."""
    try:
        names = json.loads((folder / INDEX).read_text("utf-8-sig"))["weight_map"].values()
        return {str(name) for name in names} or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _instead(paths: set[str]) -> str:
    if models := list(gguf_models(paths)):
        return f"; it has GGUF files: name one of them behind a colon, such as ':{models[0]}'"
    if pickles := sorted(path for path in paths if path.endswith(_PICKLES)):
        return f"; {pickles[0]} is a pickle, which may run code when it is read, and is refused: convert it"
    return ": give a repository of a model in safetensors or GGUF"
