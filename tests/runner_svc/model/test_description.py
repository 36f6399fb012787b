"""A model's description in Hello: tokenizer, templates, special tokens, ids that end a sequence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import CHAT_TEMPLATE, IM_END_ID, NUM_TOKENS
from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.model.config import ModelConfig
from runner_svc.model.description import describe_model
from runner_svc.model.errors import ModelNotFound
from runner_svc.model.folder.config_file import read_config
from runner_svc.model.folder.json_file import read_object
from tests.support.tiny_models import make_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model("qwen3", tmp_path / "tiny")


def describe(folder: Path) -> plan_pb2.Model:
    config = ModelConfig.from_hugging_face(read_config(folder))
    return describe_model("my-model", folder, config, "abc")


def update_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**read_object(path), **changes}))


def test_a_saved_model(folder: Path) -> None:
    model = describe(folder)
    assert (model.name, model.architecture, model.weights_version) == ("my-model", "Qwen3ForCausalLM", "abc")
    assert (model.vocab_size, model.context_length) == (NUM_TOKENS, 256)
    assert list(model.eos_token_ids) == [IM_END_ID]
    assert model.chat_template == CHAT_TEMPLATE
    assert model.special_tokens["eos_token"] == "<|im_end|>"
    tokenizer = Tokenizer.from_str(model.tokenizer.decode())
    assert tokenizer.decode(tokenizer.encode("Grüße, 42").ids) == "Grüße, 42"


def test_the_tokenizer_is_a_phase_of_its_own(folder: Path, tmp_path: Path) -> None:
    """A first start may take longer for the tokenizer than for the weights."""
    shares: dict[str, float] = {}
    sizes = {"num_blocks": 4, "block_size": 16, "num_slots": 1, "max_step_tokens": 16}
    TorchBackend.load(str(folder), cache_folder=tmp_path / "cache", progress=shares.__setitem__, **sizes)
    assert shares == {"loading weights": 1.0, "reading the tokenizer": 1.0}


def test_eos_ids_of_both_files_without_repeats(folder: Path) -> None:
    update_json(folder / "generation_config.json", eos_token_id=[IM_END_ID, 258])
    update_json(folder / "config.json", eos_token_id=[258, 1])
    assert list(describe(folder).eos_token_ids) == [IM_END_ID, 258, 1]


def test_an_eos_token_of_the_tokenizer_alone_ends_answers(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    update_json(folder / "config.json", eos_token_id=None)
    assert list(describe(folder).eos_token_ids) == [IM_END_ID]


def test_chat_templates_of_older_folders(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    assert describe(folder).chat_template == ""
    update_json(folder / "tokenizer_config.json", chat_template="{{ one }}")
    assert describe(folder).chat_template == "{{ one }}"
    several = [{"name": "tool_use", "template": "{{ tools }}"}, {"name": "default", "template": "{{ two }}"}]
    update_json(folder / "tokenizer_config.json", chat_template=several)
    assert describe(folder).chat_template == "{{ two }}"


def test_special_tokens_as_objects(folder: Path) -> None:
    update_json(folder / "tokenizer_config.json", bos_token={"__type": "AddedToken", "content": "<|im_start|>"})
    assert describe(folder).special_tokens["bos_token"] == "<|im_start|>"


def test_truncation_and_padding_are_removed(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = Tokenizer.from_str(describe(folder).tokenizer.decode())
    assert len(described.encode("twelve bytes").ids) == 12


def test_a_folder_without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"no tokenizer\.json"):
        describe(folder)
