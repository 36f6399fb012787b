"""Model folders without weights: a small tokenizer of each kind, and each fact about it in each of its files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from runner_svc.model.tokenizer import generation_keys, tokenizer_keys
from tests.support import small_tokenizers

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "image_token")
TOKENS = ("<|im_start|>", "<|im_end|>", "<eot>", "<tool>", "<sep>", "<cls>", "<mask>")
"""Added tokens of each kind; the first two are special."""

HARMLESS_VALUES = {
    "backend": "tokenizers",
    "errors": "strict",
    "files_loaded": ["tokenizer.json"],
    "init_inputs": [],
    "is_local": True,
    "model_input_names": ["input_ids"],
    "model_max_length": 7,
    "never_split": ["the"],
    "padding_side": "left",
    "sp_model_kwargs": {"enable_sampling": True},
    "truncation_side": "left",
    **dict.fromkeys(("max_len", "max_length", "pad_to_multiple_of", "pad_token_type_id", "stride"), 4),
    **dict.fromkeys(("do_lower_case", "strip_accents", "from_slow", "trust_remote_code", "use_fast"), True),
}
"""Values of harmless keys of tokenizer_config.json with which transformers loads a tokenizer; others get "x"."""


def _with_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in TOKENS[:2]])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in TOKENS[2:]])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": small_tokenizers.merged_byte_level,
    "llama_like": small_tokenizers.llama_like,
    "gemma_like": small_tokenizers.gemma_like,
    "metaspace_first": small_tokenizers.metaspace_first,
    "unigram": small_tokenizers.unigram,
    "word_piece": small_tokenizers.word_piece,
    "words": small_tokenizers.words,
}


@cache
def serialized(kind: str) -> str:
    """Returns the tokenizer of a kind, with `TOKENS`, as JSON."""
    return str(_with_tokens(KINDS[kind]()).to_str())


@dataclass(frozen=True)
class Fact:
    """One change to a folder: `change` writes it."""

    name: str
    change: Callable[[Path], None]


def write_folder(kind: str, folder: Path) -> Path:
    """Fills `folder`, which is made, with the files that the facts change."""
    folder.mkdir()
    tokenizer = json.loads(serialized(kind))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    size = 8 * (Tokenizer.from_str(serialized(kind)).get_vocab_size() // 8 + 2)
    _write(folder, "config.json", {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": size})
    _write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE})
    _write(folder, "generation_config.json", {})
    return folder


def _read(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return content


def _write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content))


def _set(file: str, **values: Any) -> Callable[[Path], None]:
    return lambda folder: _write(folder, file, {**_read(folder, file), **values})


def _both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


def _added(text: str, **values: Any) -> Callable[[Path], None]:
    """Changes an added token of tokenizer.json."""

    def change(folder: Path) -> None:
        tokenizer = _read(folder, "tokenizer.json")
        for token in tokenizer["added_tokens"]:
            if token["content"] == text:
                token.update(values)
        _write(folder, "tokenizer.json", tokenizer)

    return change


def _removed(text: str) -> Callable[[Path], None]:
    """Removes an added token of tokenizer.json."""

    def change(folder: Path) -> None:
        tokenizer = _read(folder, "tokenizer.json")
        tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] != text]
        _write(folder, "tokenizer.json", tokenizer)

    return change


def _at_end(file: str, distance: int, text: str, **flags: Any) -> Callable[[Path], None]:
    """Adds a token that tokenizer.json lacks, `distance` behind the last id."""

    def change(folder: Path) -> None:
        token = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() + distance
        if file == "added_tokens.json":
            _set(file, **{text: token})(folder)
        else:
            _set(file, added_tokens_decoder={str(token): {"content": text, **flags}})(folder)

    return change


def _raw(file: str, data: bytes | Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / file
        path.write_bytes(data if isinstance(data, bytes) else data(path.read_bytes()))

    return change


def _template(file: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)

    return change


def _named(name: str) -> Iterator[Fact]:
    """The ways to name a token: of each kind of token, as text and as object, in each file."""
    role = {"template": TEMPLATE + "{{ " + name + " }}"}
    told = _set("tokenizer_config.json", chat_template=role["template"])
    for label, value in {
        "special": "<|im_end|>",
        "added": "<eot>",
        "word": "the",
        "new": "<new>",
        "object": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "object-lstrip": {"__type": "AddedToken", "content": "<sep>", "lstrip": True, "normalized": False},
        "object-new": {"__type": "AddedToken", "content": "<new>", "rstrip": True, "normalized": False},
        "untyped": {"content": "<|im_end|>"},
        "null": None,
        "empty": "",
        "number": 1,
        "list": ["<|im_end|>"],
    }.items():
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            yield Fact(f"{file}: {name} {label}", _both(told, _set(file, **{name: value})))
    yield Fact(
        f"both files: {name}",
        _both(
            told, _set("tokenizer_config.json", **{name: "<eot>"}), _set("special_tokens_map.json", **{name: "<sep>"})
        ),
    )


def _lists() -> Iterator[Fact]:
    for key in ("additional_special_tokens", "extra_special_tokens"):
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            yield Fact(f"{file}: {key}", _set(file, **{key: ["<eot>", "<tool>"]}))
            yield Fact(f"{file}: {key} new", _set(file, **{key: ["<eot>", "<new>"]}))
            yield Fact(f"{file}: {key} objects", _set(file, **{key: [{"content": "<eot>", "__type": "AddedToken"}]}))
            yield Fact(
                f"{file}: {key} named",
                _both(
                    _set(file, **{key: {"turn_token": "<eot>"}}),
                    _set("tokenizer_config.json", chat_template=TEMPLATE + "{{ turn_token }}"),
                ),
            )
            yield Fact(f"{file}: {key} empty", _set(file, **{key: []}))
            yield Fact(f"{file}: {key} number", _set(file, **{key: 3}))


def _stated() -> Iterator[Fact]:
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    for special in (True, False):
        for distance in (0, 1):
            yield Fact(
                f"added_tokens_decoder: new at {distance}, special {special}",
                _at_end("tokenizer_config.json", distance, "<new>", **plain, special=special),
            )
    for distance in (0, 1):
        yield Fact(f"added_tokens.json: new at {distance}", _at_end("added_tokens.json", distance, "<new>"))
        yield Fact(
            f"added_tokens.json: new at {distance}, the end",
            _both(_at_end("added_tokens.json", distance, "<new>"), _set("tokenizer_config.json", eos_token="<new>")),
        )
    decoder = "tokenizer_config.json"
    yield Fact("added_tokens_decoder: conflict", _set(decoder, added_tokens_decoder={"3": {"content": "<eot>"}}))
    yield Fact("added_tokens_decoder: no id", _set(decoder, added_tokens_decoder={"x": {"content": "<eot>"}}))
    yield Fact("added_tokens_decoder: text", _set(decoder, added_tokens_decoder={"3": "<eot>"}))
    yield Fact("added_tokens.json: conflict", _set("added_tokens.json", **{"<eot>": 3}))
    yield Fact("added_tokens.json: text", _set("added_tokens.json", **{"<eot>": "3"}))
    yield Fact(
        "both: added_tokens_decoder hides added_tokens.json",
        _both(_at_end(decoder, 0, "<new>", **plain, special=True), _at_end("added_tokens.json", 1, "<newer>")),
    )


def _flags() -> Iterator[Fact]:
    for text in ("<|im_end|>", "<eot>"):
        for flag in ("special", "lstrip", "rstrip", "single_word", "normalized"):
            for value in (True, False):
                yield Fact(f"tokenizer.json: {text} {flag} {value}", _added(text, **{flag: value}))
        yield Fact(f"tokenizer.json: {text} removed", _removed(text))
    ends = _set("tokenizer_config.json", eos_token="<|im_end|>")
    yield Fact("tokenizer.json: the end isn't special", _both(_added("<|im_end|>", special=False), ends))
    for key, value in {
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 8},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<unk>",
        },
        "post_processor": None,
        "normalizer": {"type": "Lowercase"},
        "decoder": None,
    }.items():
        yield Fact(f"tokenizer.json: {key}", _set("tokenizer.json", **{key: value}))
    yield Fact(
        "tokenizer.json: Lowercase and a normalized end",
        _both(_set("tokenizer.json", normalizer={"type": "Lowercase"}), _added("<|im_end|>", normalized=True), ends),
    )


def _settings() -> Iterator[Fact]:
    for key in ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "clean_up_tokenization_spaces"):
        for value in (True, False):
            ends = _set("tokenizer_config.json", bos_token="<|im_start|>", eos_token="<|im_end|>")
            yield Fact(f"{key} {value}", _both(ends, _set("tokenizer_config.json", **{key: value})))
    for key, value in {
        **{key: HARMLESS_VALUES.get(key, "x") for key in tokenizer_keys.HARMLESS},
        "split_special_tokens": True,
        "padding_side ": "left",
        "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]},
        "foreign": 1,
        "chat_template": 3,
    }.items():
        yield Fact(f"tokenizer_config.json: {key} {value}", _set("tokenizer_config.json", **{key: value}))
    yield Fact("special_tokens_map.json: foreign", _set("special_tokens_map.json", foreign="<eot>"))
    for key, wrong in {"tokenizer_class": 3, "added_tokens_decoder": None, "model_input_names": 3}.items():
        yield Fact(f"tokenizer_config.json: {key} {wrong}", _set("tokenizer_config.json", **{key: wrong}))
    for name in ("LlamaTokenizer", "GPT2Tokenizer", "Qwen2TokenizerFast", "GemmaTokenizer", "BertTokenizer", "Unknown"):
        yield Fact(f"tokenizer_class {name}", _set("tokenizer_config.json", tokenizer_class=name))
    for kind in ("qwen2", "mistral", "gpt2", "gemma2", "phi3", "bert", "unknown"):
        yield Fact(f"model_type {kind}", _set("config.json", model_type=kind))
        yield Fact(
            f"model_type {kind} without a class",
            _both(_set("config.json", model_type=kind), lambda folder: (folder / "tokenizer_config.json").unlink()),
        )


def _templates() -> Iterator[Fact]:
    two = "{{ 'two' }}" + TEMPLATE
    named = [{"name": "tool_use", "template": two}, {"name": "default", "template": TEMPLATE}]
    yield Fact("chat templates: list", _set("tokenizer_config.json", chat_template=named))
    yield Fact("chat templates: no default", _set("tokenizer_config.json", chat_template=named[:1]))
    yield Fact("chat templates: empty", _set("tokenizer_config.json", chat_template=""))
    yield Fact("chat templates: null", _set("tokenizer_config.json", chat_template=None))
    yield Fact("chat templates: file over key", _template("chat_template.jinja", two))
    other = _template("additional_chat_templates/tool_use.jinja", two)
    yield Fact("chat templates: additional over key", other)
    yield Fact("chat templates: additional and file", _both(other, _template("chat_template.jinja", two)))
    yield Fact("chat templates: additional default", _template("additional_chat_templates/default.jinja", two))


def _ends() -> Iterator[Fact]:
    for file in ("generation_config.json", "config.json"):
        for value in (3, [3], [3, 4, 3], [], None, -1, "2", True, 10**6, [3, -1], [3, "2"], 1.5, {"a": 1}):
            ends = _set(file, eos_token_id=value)
            yield Fact(f"{file}: eos_token_id {value}", ends)
            if value in (3, [3]):
                own = _set("tokenizer_config.json", eos_token="<|im_end|>")
                yield Fact(f"{file}: eos_token_id {value} and eos_token", _both(ends, own))
    yield Fact(
        "both configs: eos_token_id",
        _both(_set("config.json", eos_token_id=[4, 5]), _set("generation_config.json", eos_token_id=[5, 6])),
    )

    def not_special(folder: Path) -> None:
        token = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<eot>")
        _set("generation_config.json", eos_token_id=token)(folder)

    yield Fact("generation_config.json: an added token that isn't special", not_special)
    ignored: dict[str, Any] = dict.fromkeys((*sorted(generation_keys.SUGGESTED), *generation_keys.HARMLESS), 1)
    ignored |= {"assistant_ensemble_weight": 0.5, "cache_implementation": "static", "compile_config": None}
    for key, value in {**ignored, "suppress_tokens": [3], "stop_strings": ["a"], "foreign": 1}.items():
        yield Fact(f"generation_config.json: {key}", _set("generation_config.json", **{key: value}))


def _broken() -> Iterator[Fact]:
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        yield Fact(f"{file}: BOM", _raw(file, lambda data: b"\xef\xbb\xbf" + data))
        yield Fact(f"{file}: comma", _raw(file, lambda data: data[:-1] + b",}"))
        yield Fact(f"{file}: cut", _raw(file, lambda data: data[: len(data) // 2]))
        yield Fact(f"{file}: list", _raw(file, b"[1]"))
        yield Fact(f"{file}: empty", _raw(file, b""))
        yield Fact(
            f"{file}: pointer", _raw(file, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
        )
        yield Fact(f"{file}: latin", _raw(file, b'{"a": "\xe9"}'))
        yield Fact(f"{file}: nested", _raw(file, b'{"a":' * 100_000))
        yield Fact(f"{file}: missing", lambda folder, file=file: (folder / file).unlink())  # type: ignore[misc]
        yield Fact(f"{file}: {{}}", _raw(file, b"{}"))
    for file in ("chat_template.jinja", "tokenizer.model", "merges.txt"):
        yield Fact(f"{file}: pointer", _raw(file, b"version https://git-lfs.github.com/spec/v1\n"))
        yield Fact(f"{file}: a folder", lambda folder, file=file: (folder / file).mkdir())  # type: ignore[misc]
        yield Fact(f"{file}: a link", lambda folder, file=file: (folder / file).symlink_to("gone"))  # type: ignore[misc]
    yield Fact("chat_template.jinja: latin", _raw("chat_template.jinja", b"{{ '\xe9' }}"))


def _older() -> Iterator[Fact]:
    def vocabulary(folder: Path) -> None:
        model = _read(folder, "tokenizer.json")["model"]
        (folder / "tokenizer.json").unlink()
        vocab = model["vocab"]
        ordered = [piece[0] for piece in vocab] if isinstance(vocab, list) else sorted(vocab, key=vocab.__getitem__)
        if model["type"] == "WordPiece":
            (folder / "vocab.txt").write_text("\n".join(ordered) + "\n")
        else:
            _write(folder, "vocab.json", {text: number for number, text in enumerate(ordered)})
        if "merges" in model:
            merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
            (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")

    for name in ("GPT2Tokenizer", "Qwen2Tokenizer", "BertTokenizer", "PreTrainedTokenizerFast"):
        yield Fact(f"older files, {name}", _both(vocabulary, _set("tokenizer_config.json", tokenizer_class=name)))


def facts() -> dict[str, Fact]:
    """Returns all facts by name."""
    every = [Fact("nothing", lambda folder: None)]
    for name in NAMES:
        every += _named(name)
    for group in (_lists, _stated, _flags, _settings, _templates, _ends, _broken, _older):
        every += group()
    return {fact.name: fact for fact in every}
