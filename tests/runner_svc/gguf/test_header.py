"""Files that are broken: each costs a sentence, and no memory."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from runner_svc.gguf.errors import GgufError
from runner_svc.gguf.header import read_header
from tests.support.gguf_bytes import GgufFile, StoredTensor, Typed
from tests.support.thoroughness import count
from tests.support.tiny_gguf import ARCHITECTURES, tiny_gguf, tiny_model

NUMBERS = StoredTensor.of(np.arange(96, dtype=np.float32).reshape(3, 32))


def small() -> GgufFile:
    keys = {"general.architecture": "llama", "a": [1, 2], "b": ["x", "y"], "c": 1.5, "d": True, "e": Typed(10, 2**40)}
    return GgufFile(keys, {"one": NUMBERS, "two": StoredTensor.of(np.ones(5, np.float32))})


def changed(change: Callable[[GgufFile], object]) -> bytes:
    file = small()
    change(file)
    return file.content()


def with_field(name: str, value: object) -> bytes:
    return changed(lambda file: setattr(file, name, value))


def with_tensor(**fields: object) -> bytes:
    tensor = StoredTensor(**{"shape": NUMBERS.shape, "type": 0, "content": NUMBERS.content, **fields})
    return changed(lambda file: file.tensors.update(one=tensor))


def test_values_and_places(tmp_path: Path) -> None:
    header = read_header(small().write(tmp_path / "small.gguf"))
    assert header.keys == {
        "general.architecture": "llama", "a": [1, 2], "b": ["x", "y"], "c": 1.5, "d": True, "e": 2**40,
    }  # fmt: skip
    one = header.tensors["one"]
    assert (one.shape, one.type.name, one.num_bytes) == ((3, 32), "F32", 384)
    assert (tmp_path / "small.gguf").read_bytes()[one.offset :].startswith(NUMBERS.content)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_same_as_the_package_reads(architecture: str, tmp_path: Path) -> None:
    path = tiny_gguf(architecture, tiny_model(architecture)).write(tmp_path / "tiny.gguf")
    header, reader = read_header(path), GGUFReader(path)
    theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.keys == theirs
    places = {tensor.name: (tensor.data_offset, tensor.n_bytes) for tensor in reader.tensors}
    assert {name: (info.offset, info.num_bytes) for name, info in header.tensors.items()} == places


def test_a_version_2(tmp_path: Path) -> None:
    (tmp_path / "old.gguf").write_bytes(with_field("version", 2))
    assert list(read_header(tmp_path / "old.gguf").tensors) == ["one", "two"]


BROKEN = {
    "empty": (b"", r"It is empty\."),
    "one byte": (b"G", r"It starts with b'G', where a GGUF file has b'GGUF'\."),
    "magic": (with_field("magic", b"GGML"), r"It starts with b'GGML', where a GGUF file has b'GGUF'\."),
    "a pointer of Git LFS": (b"version https://git-lfs.github.com/spec/v1\n", r"It is a Git LFS pointer.*git lfs pull"),
    "version 1": (with_field("version", 1), r"It is of GGUF version 1; versions 2 and 3 are read\."),
    "version 4": (with_field("version", 4), r"It is of GGUF version 4; versions 2 and 3 are read\."),
    "big-endian": (with_field("order", ">"), r"It is big-endian; convert it for a little-endian machine\."),
    "many keys": (with_field("num_keys", 2**60), r"It is cut off: it says that it has 1152921504606846976 keys"),
    "many tensors": (with_field("num_tensors", 2**60), r"It is cut off: it says that it has 1\d+ tensors, but "),
    "a key too many": (with_field("num_keys", 7), r"It is cut off|unknown type|no UTF-8"),
    "a tensor too many": (with_field("num_tensors", 3), r"It is cut off|Tensor .* has \d+ dimensions"),
    "a key twice": (changed(lambda file: file.more_keys.append(("a", 1))), r"The key 'a' is there twice\."),
    "a tensor twice": (changed(lambda file: file.more_tensors.append(("one", NUMBERS))), r"Tensor 'one' is there"),
    "an unknown type": (changed(lambda file: file.keys.update(f=Typed(13, 1))), r"The key 'f' has a value of an"),
    "no UTF-8": (changed(lambda file: file.keys.update(f="\udcff")), r"It has bytes in the key 'f' that are no UTF-8"),
    "alignment 24": (changed(lambda f: f.keys.update({"general.alignment": 24})), r"Its general.alignment is 24"),
    "alignment 0": (changed(lambda f: f.keys.update({"general.alignment": 0})), r"Its general.alignment is 0"),
    "alignment x": (changed(lambda f: f.keys.update({"general.alignment": "x"})), r"Its general.alignment is 'x'"),
    "no dimensions": (with_tensor(shape=()), r"Tensor 'one' has 0 dimensions; 1 to 4 are read\."),
    "five dimensions": (with_tensor(shape=(1, 1, 1, 3, 32)), r"Tensor 'one' has 5 dimensions; 1 to 4 are read\."),
    "no elements": (with_tensor(shape=(0, 32)), r"Tensor 'one' of \[0, 32\] is empty\."),
    "huge": (with_tensor(shape=(2**40, 2**40)), r"It is cut off|overlap"),
    "half a block": (with_tensor(type=2, shape=(3, 31)), r"Tensor 'one' has rows of 31, which Q4_0, in blocks of"),
    "an unknown type of tensors": (with_tensor(type=77), r"Tensor 'one' is stored as the unknown type 77"),
    "overlap": (with_tensor(shape=(3, 33)), r"Tensors 'one' and 'two' overlap\."),
    "an array of arrays": (
        changed(lambda file: file.more_keys.append(("f", Typed(99, 0)))).replace(
            struct.pack("<II", 99, 0), struct.pack("<IIQ", 9, 9, 0)
        ),
        r"The key 'f' has an array of an unknown type, 9\.",
    ),
    "a long array": (
        changed(lambda file: file.keys.update(a=[7, 8])).replace(
            struct.pack("<IIQ", 9, 5, 2), struct.pack("<IIQ", 9, 5, 2**50)
        ),
        r"It is cut off: it says that it has \d+ values of 'a'",
    ),
    "a long string": (
        small().content().replace(struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 2**62) + b"llama"),
        r"It is cut off within the key 'general.architecture', which has \d+ bytes\.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_one_sentence(name: str, tmp_path: Path) -> None:
    content, sentence = BROKEN[name]
    (tmp_path / "broken.gguf").write_bytes(content)
    with pytest.raises(GgufError, match=sentence):
        read_header(tmp_path / "broken.gguf")


def test_wherever_it_is_cut_off(tmp_path: Path) -> None:
    content = small().content()
    whole = len(content) - 12  # behind the last number there are 12 bytes of padding
    for length in range(0, whole, count(1, in_ci=11)):
        (tmp_path / "cut.gguf").write_bytes(content[:length])
        with pytest.raises(GgufError, match=r"It is empty|It starts with|It is cut off"):
            read_header(tmp_path / "cut.gguf")
