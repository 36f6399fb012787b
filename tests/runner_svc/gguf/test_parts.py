"""Models that are split over files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runner_svc.gguf.errors import GgufError
from runner_svc.gguf.parts import only_model, read_model
from tests.support.gguf_bytes import GgufFile, Typed, split
from tests.support.tiny_gguf import tiny_gguf, tiny_model


@pytest.fixture(scope="module")
def file() -> GgufFile:
    return tiny_gguf("llama", tiny_model("llama"))


def test_any_part_stands_for_all(file: GgufFile, tmp_path: Path) -> None:
    parts = split(file, tmp_path, "tiny", [0, 9, 11])
    for part in parts:
        model = read_model(part)
        assert list(model.tensors) == list(file.tensors) and model.files == tuple(parts)
        assert model.keys["llama.block_count"] == 2
        assert {info.file for info in model.tensors.values()} == set(parts[1:])
    assert only_model(parts[::-1]) == parts[0]


def test_one_part_of_one_needs_no_name(file: GgufFile, tmp_path: Path) -> None:
    (part,) = split(file, tmp_path, "tiny", [20])
    assert read_model(part.rename(tmp_path / "renamed.gguf")).files == (tmp_path / "renamed.gguf",)


def test_files_of_several_models(tmp_path: Path) -> None:
    names = ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b-00001-of-00002.gguf"]
    files = [tmp_path / name for name in names]
    assert only_model(files[:2]) == files[0]
    assert only_model(files) is None
    assert only_model([]) is None
    assert only_model([tmp_path / "whole.gguf"]) == tmp_path / "whole.gguf"


def without(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def rewritten(**keys: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        said = {"split.no": Typed(2, 1), "split.count": Typed(2, 3), "split.tensors.count": Typed(5, 20)}
        said |= {key.replace("_", "."): value for key, value in keys.items()}
        GgufFile(said).write(path)

    return change


def as_the_third(path: Path) -> None:
    shutil.copy(path.with_name("tiny-00003-of-00003.gguf"), path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without, r"It is a part of 3, and tiny-00002-of-00003.gguf is not beside it; put all parts in one folder\."),
        (cut, r"Of its part tiny-00002-of-00003.gguf: It is cut off: tensor "),
        (rewritten(), r"Its parts have 15 tensors, but its split.tensors.count is 20\."),
        (rewritten(split_count=Typed(2, 4)), r"Its part tiny-00002-of-00003.gguf has split.no 1 and split.count 4"),
        (rewritten(split_no=Typed(2, 2)), r"Its part tiny-00002-of-00003.gguf has split.no 2 and split.count 3, not 1"),
        (rewritten(split_tensors_count=Typed(5, 21)), r"has another split.tensors.count than its first: it belongs"),
        (rewritten(general_architecture="qwen2"), r"has another 'general.architecture' than its first: it belongs"),
        (rewritten(llama_foo=1), r"has another 'llama.foo' than its first: it belongs to another model\."),
        (as_the_third, r"Its part tiny-00002-of-00003.gguf has split.no 2 and split.count 3, not 1 and 3"),
    ],
)  # fmt: skip
def test_parts_that_do_not_make_a_model(
    change: Callable[[Path], None], sentence: str, file: GgufFile, tmp_path: Path
) -> None:
    parts = split(file, tmp_path, "tiny", [8, 5, 7])
    change(parts[1])
    for part in (parts[0], parts[2]):
        with pytest.raises(GgufError, match=sentence):
            read_model(part)


def test_a_tensor_in_two_parts(file: GgufFile, tmp_path: Path) -> None:
    parts = split(file, tmp_path, "tiny", [10, 10])
    part = GgufFile({"split.no": Typed(2, 1), "split.count": Typed(2, 2), "split.tensors.count": Typed(5, 20)})
    part.tensors = dict(list(file.tensors.items())[:10])
    part.write(parts[1])
    with pytest.raises(GgufError, match=r"Tensor 'token_embd.weight' is in two parts, tiny-00001-of-00002.gguf and"):
        read_model(parts[0])


def test_a_part_under_another_name(file: GgufFile, tmp_path: Path) -> None:
    first, _ = split(file, tmp_path, "tiny", [10, 10])
    with pytest.raises(
        GgufError, match=r"It is a part of 2 by its split.count, but its name doesn't end in '-00001-of-"
    ):
        read_model(first.rename(tmp_path / "renamed.gguf"))


def test_a_file_without_tensors(file: GgufFile, tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=r"It has no tensors\."):
        read_model(GgufFile(file.keys).write(tmp_path / "vocabulary.gguf"))
