"""Each fact that was lost or misread, with the smallest folder that has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from roster_protos import plan_pb2
from runner_svc.model.config import ModelConfig
from runner_svc.model.description import describe_model
from runner_svc.model.errors import ModelNotFound, UnsupportedModel
from runner_svc.model.tokenizer import generation_keys, kept, loading, tokenizer_keys
from runner_svc.model.tokenizer.errors import UnusableTokenizer
from runner_svc.model.tokenizer.kept import read_tokenizer
from runner_svc.model.tokenizer.likeness import check_likeness
from runner_svc.model.tokenizer.loading import load_tokenizer
from scheduler_svc.front.text import tokenizer as front_tokenizer
from scheduler_svc.front.text.tokenizer import ModelText
from tests.support.tokenizer_folders import TEMPLATE, write_folder
from tests.support.tokenizer_trials import InProcess, chat


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder("byte_level", tmp_path / "model")


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_tokenizer, "TemplateRenderer", InProcess)


def change(folder: Path, file: str, **values: Any) -> None:
    path = folder / file
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**content, **values}))


def change_added(folder: Path, text: str, **values: Any) -> int:
    """Changes an added token of tokenizer.json and returns its id."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    token = next(token for token in content["added_tokens"] if token["content"] == text)
    token.update(values)
    path.write_text(json.dumps(content))
    return int(token["id"])


def described(folder: Path, cache: Path | None = None) -> plan_pb2.Model:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "max_position_embeddings"), 64)
    raw = {**json.loads((folder / "config.json").read_text()), "num_hidden_layers": 1, "num_attention_heads": 1}
    raw["num_key_value_heads"] = 1
    return describe_model("tiny", folder, ModelConfig.from_hugging_face({**raw, **sizes}), "1", cache)


def rendered(model: plan_pb2.Model, content: str = "a") -> str:
    text = ModelText(model)
    return text.decode(text.encode_prompt(chat([("user", content)])), skip_special_tokens=False)


@pytest.mark.parametrize("where", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"])
def test_an_end_that_is_not_marked_special_is_no_text_and_no_user_writes_it(folder: Path, where: str) -> None:
    end = change_added(folder, "<|im_end|>", special=False)
    change(folder, where, **({"eos_token_id": end} if "generation" in where else {"eos_token": "<|im_end|>"}))
    model = described(folder)
    text = ModelText(model)
    assert list(model.eos_token_ids) == [end]
    assert text.decode([*b"ab", end]) == text.decode([*b"ab"])
    assert text.encode_prompt(chat([("user", "a")])).count(end) == 1
    assert text.encode_prompt(chat([("user", "a<|im_end|>")])).count(end) == 1
    assert end not in text.encode("a<|im_end|>")


@pytest.mark.parametrize("name", ["sep_token", "cls_token", "mask_token", "image_token"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_every_named_token_reaches_the_template(folder: Path, name: str, file: str) -> None:
    change(folder, "tokenizer_config.json", chat_template="{{ " + name + " }}")
    change(folder, file, **{name: "<sep>"})
    assert rendered(described(folder)) == "<sep>"


def test_named_extra_tokens_reach_the_template(folder: Path) -> None:
    extra = {"turn_token": "<sep>"}
    change(folder, "tokenizer_config.json", chat_template="{{ turn_token }}.", extra_special_tokens=extra)
    assert rendered(described(folder)) == "<sep>."


@pytest.mark.parametrize("file", ["tokenizer_config.json", "added_tokens.json"])
def test_tokens_that_only_another_file_has_are_added(folder: Path, file: str) -> None:
    token = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    stated = (
        {"<new>": token} if file == "added_tokens.json" else {"added_tokens_decoder": {token: {"content": "<new>"}}}
    )
    change(folder, file, **stated)
    text = ModelText(described(folder))
    assert text.decode([token]) == "<new>"
    assert text.encode("a<new>") == [*text.encode("a"), token]


@pytest.mark.parametrize("file", ["tokenizer_config.json", "added_tokens.json"])
def test_a_token_that_would_get_another_id_is_refused_by_name(folder: Path, file: str) -> None:
    stated = {"<new>": 5} if file == "added_tokens.json" else {"added_tokens_decoder": {5: {"content": "<new>"}}}
    change(folder, file, **stated)
    with pytest.raises(UnsupportedModel, match=f"{file}.* has the token '<new>' at 5, but"):
        described(folder)


def test_additional_chat_templates(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("default {{ messages[0].content }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert rendered(described(folder)) == "default a"
    (folder / "chat_template.jinja").unlink()
    assert described(folder).chat_template == ""  # as in transformers: named templates replace the config's


def test_a_template_file_wins_over_the_configs(folder: Path) -> None:
    assert described(folder).chat_template == TEMPLATE
    (folder / "chat_template.jinja").write_text("file")
    assert described(folder).chat_template == "file"


@pytest.mark.parametrize("value", [-1, "2", True, [], [3, -1], [3, "2"], 1.5, {"a": 1}, 10**6])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_an_end_that_is_no_id_is_refused_in_one_sentence(folder: Path, file: str, value: object) -> None:
    change(folder, file, eos_token_id=value)
    with pytest.raises(UnsupportedModel, match=rf"{file} .*eos_token_id") as caught:
        described(folder)
    assert "\n" not in str(caught.value)


def test_ends_of_all_files(folder: Path) -> None:
    change(folder, "config.json", eos_token_id=[4, 5])
    change(folder, "generation_config.json", eos_token_id=[5, 6])
    change(folder, "tokenizer_config.json", eos_token="<|im_end|>")
    end = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|im_end|>")
    assert list(described(folder).eos_token_ids) == [5, 6, 4, end]


def test_an_end_of_the_tokenizer_that_the_model_lacks_is_left_out(folder: Path) -> None:
    change(folder, "tokenizer_config.json", eos_token="<|im_end|>")
    change(folder, "config.json", vocab_size=64)
    assert list(described(folder).eos_token_ids) == []


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "mark": (lambda data: b"\xef\xbb\xbf" + data, "begins with a byte order mark"),
    "comma": (lambda data: data[:-1] + b",}", "is not valid JSON .* at line 1"),
    "cut": (lambda data: data[: len(data) // 2], "is not valid JSON"),
    "list": (lambda data: b"[1]", "is a JSON array"),
    "pointer": (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    "latin": (lambda data: b'{"\xe9": 1}', "is not UTF-8"),
    "nested": (lambda data: b'{"a":' * 100_000, "is nested too deeply"),
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_broken_file_is_refused_in_one_sentence(folder: Path, file: str, how: str) -> None:
    changed, match = BROKEN[how]
    path = folder / file
    path.write_bytes(changed(path.read_bytes()))
    with pytest.raises(UnsupportedModel, match=f"{file} {match}") as caught:
        described(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer.model", "merges.txt"])
def test_a_file_that_is_not_there_itself_is_refused(folder: Path, file: str) -> None:
    path = folder / file
    pointer, _ = BROKEN["pointer"]
    path.write_bytes(pointer(b""))
    with pytest.raises(UnsupportedModel, match=f"{file} is a Git LFS pointer"):
        described(folder)
    with pytest.raises(UnsupportedModel, match=f"{file} is a Git LFS pointer"):  # before a kept one is looked for
        described(folder, folder / "cache")
    path.unlink()
    path.symlink_to("gone")
    with pytest.raises(UnsupportedModel, match=f"{file} is a link to gone, which does not exist"):
        described(folder)
    path.unlink()
    path.mkdir()
    with pytest.raises(UnsupportedModel, match=f"{file} is a folder"):
        described(folder)


def test_a_template_in_another_encoding(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"{{ '\xe9' }}")
    with pytest.raises(UnsupportedModel, match=r"chat_template\.jinja is not UTF-8 text"):
        described(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("added_tokens_decoder", None),
        ("added_tokens_decoder", [1]),
        ("chat_template", ["{{ 1 }}"]),
        ("chat_template", [{"name": "default"}]),
        ("tokenizer_class", 3),
        ("model_input_names", 3),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_key(folder: Path, key: str, value: object) -> None:
    change(folder, "tokenizer_config.json", **{key: value})
    with pytest.raises(UnsupportedModel, match=f"tokenizer_config.json has .*`{key}`.*must be"):
        described(folder)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"])
def test_an_unknown_key_is_refused_by_name(folder: Path, file: str) -> None:
    change(folder, file, foreign="<eot>")
    with pytest.raises(UnsupportedModel, match=f"{file} has the key 'foreign'"):
        described(folder)


def test_every_key_has_one_place() -> None:
    assert tokenizer_keys.USED.isdisjoint(tokenizer_keys.HARMLESS)
    groups = (generation_keys.USED, generation_keys.SUGGESTED, generation_keys.HARMLESS, generation_keys.NEUTRAL)
    every = [key for group in groups for key in group]
    assert len(every) == len(set(every))
    assert all(tokenizer_keys.HARMLESS.values()) and all(generation_keys.HARMLESS.values())


def test_suggested_sampling_is_named_in_the_log() -> None:
    notes = generation_keys.check_generation_keys({"temperature": 0.6, "top_k": 20, "suppress_tokens": []})
    assert notes == ["generation_config.json suggests temperature 0.6, top_k 20: requests state their own sampling."]


def test_ids_or_text_that_transformers_changes_in_python_are_refused(folder: Path) -> None:
    loaded = loading._loaded_by_transformers(folder, folder)
    check_likeness(loaded, loaded.backend_tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(loaded), "_decode", lambda *_, **__: "other")
        with pytest.raises(UnusableTokenizer, match="changes text in Python"):
            check_likeness(loaded, loaded.backend_tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(loaded), "_encode_plus", lambda *_, **__: {"input_ids": [1]})
        with pytest.raises(UnusableTokenizer, match="changes ids in Python"):
            check_likeness(loaded, loaded.backend_tokenizer)


def test_code_of_the_folder_is_not_run(folder: Path) -> None:
    (folder / "own.py").write_text("raise SystemExit('run')")
    change(folder, "config.json", model_type="unknown", auto_map={"AutoConfig": "own.Config"})
    change(folder, "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    with pytest.raises(UnusableTokenizer, match="can't be loaded by transformers"):
        load_tokenizer(folder)


def test_a_vocabulary_in_an_older_format_needs_its_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedModel, match=r"SentencePiece's format .* run: pip install sentencepiece"):
        described(folder)
    (folder / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(UnsupportedModel, match=r"tiktoken's format .* run: pip install tiktoken"):
        described(folder)


def test_a_kept_tokenizer_is_used_while_its_files_are_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    first = described(folder, cache)
    assert first == described(folder)
    with monkeypatch.context() as patch:
        patch.setattr(kept, "load_tokenizer", lambda folder: pytest.fail("loaded again"))
        assert described(folder, cache) == first
    change(folder, "tokenizer_config.json", eos_token="<|im_end|>")
    assert described(folder, cache).special_tokens["eos_token"] == "<|im_end|>"
    for path in (cache / "tokenizers").iterdir():
        path.write_text("{")
    assert described(folder, cache).special_tokens["eos_token"] == "<|im_end|>"


def test_a_cache_that_cannot_be_written_costs_only_time(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    assert read_tokenizer(folder, tmp_path / "cache") == load_tokenizer(folder)


def test_without_a_temporary_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a file system that can't be written."""
    monkeypatch.setattr("tempfile.tempdir", "/dev/null/nowhere")
    with pytest.raises(UnsupportedModel, match=r"needs a temporary folder \(.*\): set TMPDIR"):
        described(folder)


def test_a_folder_without_any_vocabulary(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFound, match=r"has no tokenizer\.json, nor"):
        described(folder)


def test_a_tokenizer_that_transformers_leaves_as_it_is_is_sent_as_the_file_has_it(folder: Path) -> None:
    """Runners of other releases then have the same bytes."""
    path = folder / "tokenizer.json"
    content = path.read_text()
    assert described(folder).tokenizer.decode() == content
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps({**json.loads(content), "truncation": cut}))
    assert json.loads(described(folder).tokenizer) == json.loads(content)


def test_a_tokenizer_that_roster_wrote_is_taken_as_it_is(folder: Path) -> None:
    """Such as one of a GGUF file, which transformers would build by its own rules."""
    templates = [{"name": "other", "template": "x"}, {"name": "default", "template": "{{ sep_token }}"}]
    change(folder, "config.json", model_type="qwen2", num_key_value_heads=1)
    change(folder, "tokenizer_config.json", sep_token="<sep>", chat_template=templates)
    model = described(folder, folder.parent)  # in the cache folder
    change(folder, "tokenizer_config.json", roster_as_written=True)
    assert described(folder) == model
    assert json.loads(model.tokenizer) == json.loads((folder / "tokenizer.json").read_text())
    assert dict(model.special_tokens) == {"sep_token": "<sep>"}
    assert rendered(model) == "<sep>"
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json is not as Roster wrote it .*: delete .*made again"):
        described(folder)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_special_token_that_the_normalizer_changes_is_refused_by_name(tmp_path: Path, by_name: bool) -> None:
    """With a normalizer that puts a space before it, text within a chat never has the token."""
    folder = write_folder("llama_like", tmp_path / "model")
    token = change_added(folder, "<eot>", normalized=True)
    described(folder)  # as a word it is harmless
    ends = {"eos_token": "<eot>"} if by_name else {"eos_token_id": token}
    change(folder, "tokenizer_config.json" if by_name else "generation_config.json", **ends)
    with pytest.raises(UnsupportedModel, match="special token '<eot>' is `normalized`"):
        described(folder)
