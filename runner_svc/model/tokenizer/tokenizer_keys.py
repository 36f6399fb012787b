"""The keys of tokenizer_config.json and special_tokens_map.json: used, harmless (with the reason), or refused by name.

A key counts as used if transformers' tokenizer class has a parameter of that name, since that class builds the
tokenizer. transformers ignores all others in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from runner_svc.model.folder.key_values import shortened
from runner_svc.model.tokenizer.errors import UnusableTokenizer

USED = frozenset(
    {
        "add_bos_token",
        "add_eos_token",
        "add_prefix_space",
        "added_tokens_decoder",
        "additional_special_tokens",
        "auto_map",
        "chat_template",
        "clean_up_tokenization_spaces",
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
        "extra_special_tokens",
        "fast_tokenizer_files",
        "fix_mistral_regex",
        "legacy",
        "model_specific_special_tokens",
        "split_special_tokens",
        "tokenizer_class",
        "unk_id",
    }
)
"""Keys of tokenizer_config.json that every tokenizer of transformers reads. Those that end in "_token" are, too."""

FILE_KEYS = frozenset(
    {
        "vocab_file",
        "merges_file",
        "tokenizer_file",
        "spm_file",
        "special_tokens_map_file",
        "emoji_file",
        "vocab",
        "merges",
    }
)
"""Keys that name files: left out before transformers sees them, since the files of the folder are read."""

_LENGTHS = "no prompt is cut or padded: the context length is the model's"
_SLOW = "only tokenizers in Python read it, and they are refused"
_ORIGIN = "it says where the tokenizer came from or what it is for"
_ANSWERS = "it describes how to read an answer, which clients do themselves"
_OTHER = "it belongs to a processor of images, audio or tables"
HARMLESS: dict[str, str] = {
    **dict.fromkeys(FILE_KEYS, "the folder's own files are read"),
    **dict.fromkeys(
        (
            "max_len",
            "max_length",
            "model_max_length",
            "pad_to_multiple_of",
            "pad_token_type_id",
            "padding",
            "padding_side",
            "stride",
            "truncation",
            "truncation_side",
            "truncation_strategy",
        ),
        _LENGTHS,
    ),
    **dict.fromkeys(
        (
            "do_basic_tokenize",
            "errors",
            "fast",
            "from_slow",
            "never_split",
            "sp_model_kwargs",
            "spaces_between_special_tokens",
            "use_fast",
        ),
        _SLOW,
    ),
    **dict.fromkeys(
        (
            "_commit_hash",
            "backend",
            "code_revision",
            "device_map",
            "files_loaded",
            "init_inputs",
            "is_local",
            "local_files_only",
            "model_type",
            "name_or_path",
            "pretrained_model_name_or_path",
            "processor_class",
            "revision",
            "subfolder",
            "tokenizer_type",
            "transformers_version",
            "trust_remote_code",
            "verbose",
        ),
        _ORIGIN,
    ),
    **dict.fromkeys(
        ("chat_control_tokens", "response_schema", "response_template", "tool_parser_type", "reasoning_parser"),
        _ANSWERS,
    ),
    **dict.fromkeys(("image_size", "return_token_type_ids", "model_input_names", "patch_size"), _OTHER),
    "tokenize_chinese_chars": "tokenizer.json's normalizer says it",
    "do_lower_case": "tokenizer.json's normalizer says it",
    "strip_accents": "tokenizer.json's normalizer says it",
    "remove_space": "tokenizer.json's normalizer says it",
    "keep_accents": "tokenizer.json's normalizer says it",
    "trim_offsets": "it moves offsets in the text, which nothing uses",
    "use_default_system_prompt": "chat templates replaced it",
    "vocab_size": "the vocabulary says it",
    "mistral_format": "the folder's tokenizer.json or tekken.json is converted in either case",
}
"""Keys of tokenizer_config.json that change no id and no text, each with the reason."""


_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "added_tokens_decoder": ((dict,), "an object of tokens by their ids"),
    "auto_map": ((dict, type(None)), "an object or null"),
    "chat_template": ((str, list, dict, type(None)), "a string, a list of named templates, or null"),
    "model_input_names": ((list, type(None)), "a list of strings"),
    "tokenizer_class": ((str, type(None)), "a string or null"),
}
"""Of keys of tokenizer_config.json over whose other types transformers trips."""


def check_types(tokenizer_config: Mapping[str, Any]) -> None:
    """Raises UnusableTokenizer for the first key with a value of a type that it can't have."""
    for key in tokenizer_config.keys() & _TYPES.keys():
        kinds, wanted = _TYPES[key]
        if not isinstance(value := tokenizer_config[key], kinds):
            raise UnusableTokenizer(f"tokenizer_config.json has {shortened(value)} as `{key}`; it must be {wanted}.")
    templates = tokenizer_config.get("chat_template")
    for entry in templates if isinstance(templates, list) else ():
        named = isinstance(entry, Mapping) and all(isinstance(entry.get(key), str) for key in ("name", "template"))
        if not named:
            raise UnusableTokenizer(
                f"tokenizer_config.json has {shortened(entry)} in the list `chat_template`; each entry must be an "
                "object with the strings `name` and `template`."
            )


def check_keys(tokenizer_config: Mapping[str, Any], special_tokens_map: Mapping[str, Any], tokenizer: object) -> None:
    """Raises UnusableTokenizer for the first key of the two files that is neither used nor known to be harmless.

    `tokenizer`: as transformers built it.
    """
    parameters = _parameters(type(tokenizer))
    for key in tokenizer_config:
        if not (key in USED or key in HARMLESS or key in parameters or _is_token(key) or key.startswith("_")):
            raise UnusableTokenizer(
                f"tokenizer_config.json has the key {key!r}, which neither Roster nor transformers' "
                f"{type(tokenizer).__name__} knows; remove it if it changes nothing."
            )
    for key in special_tokens_map:
        if not (_is_token(key) or key in ("additional_special_tokens", "extra_special_tokens")):
            raise UnusableTokenizer(
                f"special_tokens_map.json has the key {key!r}, which names no token; its keys are such as "
                "'eos_token'; remove it if it changes nothing."
            )


def _is_token(key: str) -> bool:
    """Whether a key names a token, or its id, which transformers takes from the token's text."""
    return key.endswith(("_token", "_token_id", "_token_ids", "_tokens", "_token_index"))


def _parameters(kind: type) -> set[str]:
    """Returns the names of the parameters with which a tokenizer class of transformers is built."""
    found: set[str] = set()
    for one in inspect.getmro(kind):
        if one.__module__.startswith("transformers.") and "__init__" in vars(one):
            found.update(inspect.signature(vars(one)["__init__"]).parameters)
    return found - {"self", "args", "kwargs"}


def named_tokens(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yields the tokens that a file names, each with its name: "eos_token" and so on."""
    for key, value in values.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(text, str):
            yield key, text
