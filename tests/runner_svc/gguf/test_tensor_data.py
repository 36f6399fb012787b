"""Numbers of tensors, and the safetensors files that they are written to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.numpy import load_file

from runner_svc.gguf import tensor_data
from runner_svc.gguf.header import read_header
from runner_svc.gguf.tensor_data import Piece, Target, write_tensors
from runner_svc.gguf.tensor_types import Dtype
from tests.support.gguf_bytes import GgufFile, StoredTensor, random_blocks
from tests.support.gguf_cases import MATRIX_TYPES

SHAPE = (20, 768)
PLAIN = ("F32", "F16", "BF16")


def ignore(what: str, share: float) -> None:
    pass


@pytest.mark.parametrize("kind", MATRIX_TYPES, ids=lambda kind: kind.name)
def test_each_type_is_what_gguf_makes_of_it(
    kind: GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_data, "_CHUNK_ELEMENTS", 5 * 768)
    rng = np.random.default_rng(kind.value)
    if kind.name in PLAIN:
        stored = StoredTensor.of(rng.standard_normal(SHAPE).astype(np.float32), kind)
    else:
        stored = random_blocks(rng, kind, SHAPE)
    path = GgufFile({"general.architecture": "x"}, {"m": stored}).write(tmp_path / "one.gguf")
    info = read_header(path).tensors["m"]
    theirs = GGUFReader(path).tensors[0]
    expected = dequantize(theirs.data, theirs.tensor_type).reshape(SHAPE)
    pairs = expected.reshape(5, 2, 2, 768).swapaxes(1, 2).reshape(SHAPE)
    targets = [
        Target("plain", (Piece(SHAPE, info),)),
        Target("heads", (Piece(SHAPE, info, permuted_heads=5),)),
        Target("less", (Piece(SHAPE, info, added=-1.0),)),
        Target("joined", (Piece(SHAPE, info), Piece((2, 768), None))),
    ]
    write_tensors(targets, tmp_path, ignore, "")
    assert targets[0].dtype == (Dtype(kind.name) if kind.name in PLAIN else Dtype.F32)
    written = _numbers(tmp_path / "model.safetensors", targets)
    assert np.array_equal(written["plain"], expected)
    assert np.array_equal(written["heads"], pairs)
    assert np.array_equal(written["less"], expected - np.float32(1.0))
    assert np.array_equal(written["joined"], np.concatenate([expected, np.zeros((2, 768), np.float32)]))


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_blocks_are_written_as_they_are(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_data, "_CHUNK_ELEMENTS", 2000)
    ggml = GGMLQuantizationType[kind]
    stored = random_blocks(np.random.default_rng(), ggml, SHAPE)
    other = random_blocks(np.random.default_rng(), GGMLQuantizationType.Q5_1, SHAPE)
    path = GgufFile({"general.architecture": "x"}, {"m": stored, "o": other}).write(tmp_path / "one.gguf")
    infos = read_header(path).tensors
    plain = Target("a.weight", (Piece(SHAPE, infos["m"]),))
    kept = [
        plain.as_blocks([kind]),
        Target("b.weight", (Piece(SHAPE, infos["m"], permuted_heads=5),)).as_blocks([kind]),
        Target("c.weight", (Piece(SHAPE, infos["m"]), Piece(SHAPE, infos["m"]))).as_blocks([kind]),
    ]
    assert [target.block_type for target in kept] == [kind] * 3
    assert plain.as_blocks(["Q5_1"]) == plain
    for pieces in (
        (Piece(SHAPE, infos["m"]), Piece(SHAPE, infos["o"])),
        (Piece(SHAPE, infos["m"], added=1.0),),
        (Piece(SHAPE, infos["m"]), Piece(SHAPE, None)),
    ):
        mixed = Target("d.weight", pieces)
        assert mixed.as_blocks([kind, "Q5_1"]) == mixed and mixed.block_type is None
    write_tensors(kept, tmp_path, ignore, "")
    written = load_file(tmp_path / "model.safetensors")
    blocks = np.frombuffer(stored.content, np.uint8).reshape(20, -1)
    assert np.array_equal(written["a.blocks"], blocks)
    assert np.array_equal(written["b.blocks"], blocks.reshape(5, 2, 2, -1).swapaxes(1, 2).reshape(20, -1))
    assert np.array_equal(written["c.blocks"], np.concatenate([blocks, blocks]))


def _numbers(path: Path, targets: list[Target]) -> dict[str, np.ndarray]:
    """As float32, from the bytes: numpy has no bfloat16."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    numbers = {}
    for target in targets:
        first, last = header[target.name]["data_offsets"]
        part = content[8 + size + first : 8 + size + last]
        if target.dtype is Dtype.BF16:
            made = (np.frombuffer(part, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            made = np.frombuffer(part, np.float16 if target.dtype is Dtype.F16 else np.float32).astype(np.float32)
        numbers[target.name] = made.reshape(header[target.name]["shape"])
    return numbers


def test_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_data, "SHARD_BYTES", 10_000)
    numbers = {f"t{index}": np.full((10 + index, 32), index, np.float32) for index in range(12)}
    stored = {name: StoredTensor.of(one) for name, one in numbers.items()}
    path = GgufFile({"general.architecture": "x"}, stored).write(tmp_path / "many.gguf")
    header = read_header(path)
    shares: list[float] = []
    targets = [Target(name, (Piece(info.shape, info),)) for name, info in header.tensors.items()]
    write_tensors(targets, tmp_path, lambda what, share: shares.append(share), "")
    assert shares == sorted(shares) and shares[-1] == 1.0
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in numbers.values())
    assert len(set(index["weight_map"].values())) > 2
    for name, one in numbers.items():
        assert np.array_equal(load_file(tmp_path / index["weight_map"][name])[name], one)
    assert max(path.stat().st_size for path in tmp_path.glob("*.safetensors")) < 12_000
