"""Loads a folder's tokenizer as transformers does, and takes from it what the scheduler needs.

transformers decides by the configuration, the tokenizer's class and all files together: it merges added tokens,
rebuilds vocabularies for some classes and converts older formats. Its result is serialized. Whatever it does beyond
that in Python, which the scheduler can't do, is found by comparing both on a few texts, and refused.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from runner_svc.model.folder.json_file import read_object
from runner_svc.model.tokenizer.as_written import AS_WRITTEN, as_in_file, original_tokenizer, read_as_written
from runner_svc.model.tokenizer.errors import UnusableTokenizer
from runner_svc.model.tokenizer.likeness import check_likeness, check_special_tokens
from runner_svc.model.tokenizer.parts import TokenizerParts, special_ids_of, with_special
from runner_svc.model.tokenizer.staging import stage
from runner_svc.model.tokenizer.stated_ids import check_stated_ids, check_statements
from runner_svc.model.tokenizer.tokenizer_keys import check_keys, check_types, named_tokens

# A token in base64 and its rank, as tiktoken has one on each line.
_RANKED = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")


def load_tokenizer(folder: Path) -> TokenizerParts:
    """Returns the folder's tokenizer. Imports transformers, which takes seconds.

    Raises MissingTokenizer if there is none, UnusableTokenizer for files that transformers can't load, that contradict
    each other, or that state something which would be dropped, and BrokenModel for a file that is no JSON object.
    """
    tokenizer_config = read_object(folder / "tokenizer_config.json")
    if tokenizer_config.get(AS_WRITTEN) is True:
        return read_as_written(folder, tokenizer_config)
    serialized, special_tokens_map, added_tokens = (
        read_object(folder / name) for name in ("tokenizer.json", "special_tokens_map.json", "added_tokens.json")
    )
    check_types(tokenizer_config)
    check_statements(tokenizer_config, added_tokens)
    with _staged(folder) as scratch:
        loaded = _loaded_by_transformers(folder, Path(scratch))
    check_keys(tokenizer_config, special_tokens_map, loaded)
    backend: Tokenizer = loaded.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    check_stated_ids(backend, serialized, tokenizer_config, added_tokens)
    check_likeness(loaded, backend)
    named: dict[str, str] = dict(loaded.special_tokens_map)
    tokenizer, special_ids = backend.to_str(), set(special_ids_of(backend))
    control = {token for text in loaded.all_special_tokens if (token := backend.token_to_id(text)) is not None}
    if not control <= special_ids:
        tokenizer, special_ids = with_special(tokenizer, control), special_ids | control
    check_special_tokens(backend, special_ids)
    template, template_notes = _chat_template(loaded)
    original = original_tokenizer(folder)
    return TokenizerParts(
        tokenizer=as_in_file(folder, serialized, original, tokenizer),
        chat_template=template,
        special_tokens=named,
        eos_token_id=backend.token_to_id(named["eos_token"]) if "eos_token" in named else None,
        special_ids=tuple(sorted(special_ids)),
        notes=(*template_notes, *_unused_names(special_tokens_map, named), *_rebuilt(backend, original)),
    )


def _staged(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """Returns a temporary folder that `stage` has filled. Raises what it does, UnusableTokenizer without a place."""
    try:
        scratch = tempfile.TemporaryDirectory(prefix="roster-tokenizer-")
        stage(folder, Path(scratch.name))
    except OSError as error:
        raise UnusableTokenizer(
            f"Loading the tokenizer of {folder} needs a temporary folder ({error.strerror}): set TMPDIR to one that "
            "can be written."
        ) from error
    return scratch


def _loaded_by_transformers(folder: Path, staged: Path) -> Any:
    """Returns transformers' tokenizer of the staged files. `folder`: for messages."""
    if not (staged / "tokenizer.json").exists() and any(staged.glob("*.model")):
        _require_converter(folder)
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(staged), trust_remote_code=False, local_files_only=True)
    except MemoryError:
        raise
    except Exception as error:  # of any type: it trips over whatever a file states
        raise UnusableTokenizer(_refusal(folder, staged, error)) from error
    except BaseException as error:  # a panic of the `tokenizers` library, which is no Exception
        if type(error).__name__ != "PanicException":
            raise
        raise UnusableTokenizer(_refusal(folder, staged, error)) from error
    if not isinstance(getattr(loaded, "backend_tokenizer", None), Tokenizer):
        raise UnusableTokenizer(
            f"{folder} has a {type(loaded).__name__}, which is written in Python; only tokenizers of the `tokenizers` "
            "library are supported."
        )
    if loaded.split_special_tokens:
        raise UnusableTokenizer(
            "tokenizer_config.json has `split_special_tokens`, with which a chat template can't write special tokens; "
            "remove it."
        )
    return loaded


def _require_converter(folder: Path) -> None:
    """Raises UnusableTokenizer if the package that reads the folder's .model file isn't installed."""
    path = next(iter(sorted(folder.glob("*.model"))))
    with path.open("rb") as file:
        package, form = (
            ("tiktoken", "tiktoken's") if _RANKED.match(file.read(4096)) else ("sentencepiece", "SentencePiece's")
        )
    if importlib.util.find_spec(package) is None:
        raise UnusableTokenizer(
            f"{path} is a tokenizer in {form} format without a tokenizer.json, and the package {package}, which "
            f"converts it, is not installed; run: pip install {package}"
        )


def _refusal(folder: Path, staged: Path, error: BaseException) -> str:
    said = " ".join(f"{type(error).__name__}: {error}".replace(str(staged), str(folder)).split()).rstrip(".:!")
    version = importlib.metadata.version("transformers")
    return f"The tokenizer in {folder} can't be loaded by transformers {version}: {said[:600]}."


def _chat_template(loaded: Any) -> tuple[str, list[str]]:
    """Returns the template for chats without tools, and sentences on the others."""
    templates = loaded.chat_template
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        if not isinstance(template, str | None):
            raise UnusableTokenizer(f"tokenizer_config.json has {template!r} as a chat template; it must be a string.")
    if not isinstance(templates, dict):
        return templates or "", []
    names = ", ".join(sorted(templates))
    if "default" not in templates:
        return "", [f"The tokenizer has the chat templates {names} and none named default, so chats are refused."]
    return templates["default"], [f"Of the chat templates {names}, only default is used: requests have no tools."]


def _unused_names(special_tokens_map: Mapping[str, Any], named: Mapping[str, str]) -> Iterator[str]:
    """Yields a sentence for each token of special_tokens_map.json that other files override."""
    for name, text in named_tokens(special_tokens_map):
        if named.get(name) != text:
            yield (
                f"special_tokens_map.json has {text!r} as {name}, but transformers uses {named.get(name)!r}, which "
                "tokenizer_config.json or the tokenizer's class states."
            )


def _rebuilt(backend: Tokenizer, original: Tokenizer | None) -> Iterator[str]:
    """Yields a sentence if transformers' class splits text otherwise than tokenizer.json (`original`) does."""
    text = "It's 12345 words,  naïve\n\n中文 x=f(y)\t👍"
    if original is None or _plain(original, text) == _plain(backend, text):
        return
    yield (
        "transformers builds this tokenizer by its class, and it splits text otherwise than tokenizer.json says; check "
        "`tokenizer_class` in tokenizer_config.json if answers look wrong."
    )


def _plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)
