"""Breaks the files of a model folder, each in a way that was seen or could be."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269060552\n"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def _replaced(name: str, content: str | bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def _edited(name: str, edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: _replaced(name, edit((folder / name).read_bytes()))(folder)


def _folder(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def _pipe(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def _broken_link(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to("../blobs/gone")

    return change


def _header(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """The weights with another header."""

    def change(content: bytes) -> bytes:
        (length,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + length])
        edited = edit(header)
        encoded = edited if isinstance(edited, bytes) else json.dumps(header if edited is None else edited).encode()
        return struct.pack("<Q", len(encoded)) + encoded + content[8 + length :]

    return _edited(WEIGHTS, change)


def sharded(folder: Path, edit: Callable[[dict[str, Any]], object] = lambda index: None) -> None:
    """Puts the weights into two files and an index, which `edit` changes or replaces."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / f"part-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{number}.safetensors")
    index: dict[str, Any] = {"metadata": {}, "weight_map": weight_map}
    edited = edit(index)
    (folder / INDEX).write_text(json.dumps(index if edited is None else edited))


def _index(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda folder: sharded(folder, edit)


def _twice(folder: Path) -> None:
    sharded(folder)
    first = load_file(folder / "part-0.safetensors")
    save_file({**first, **load_file(folder / "part-1.safetensors")}, folder / "part-1.safetensors")


def _first(index: dict[str, Any], file: Any) -> None:
    index["weight_map"][next(iter(index["weight_map"]))] = file


def _first_entry(header: dict[str, Any], **values: Any) -> None:
    header[next(name for name in header if name != "__metadata__")] |= values


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "config is a pointer": (_replaced("config.json", POINTER), r"config\.json is a Git LFS pointer.*git lfs pull"),
    "config with a BOM": (
        _edited("config.json", lambda c: b"\xef\xbb\xbf" + c),
        r"config\.json begins with a byte order",
    ),
    "config in UTF-16": (_edited("config.json", lambda c: c.decode().encode("utf-16")), r"config\.json is not UTF-8"),
    "config with a comma": (
        _edited("config.json", lambda c: c.rstrip(b"}\n ") + b",\n}"),
        r"config\.json is not valid JSON \(.* at line \d+, column \d+\)",
    ),
    "config is a list": (_replaced("config.json", "[]"), r"config\.json is a JSON array"),
    "config is null": (_replaced("config.json", "null"), r"config\.json is a JSON null"),
    "config is empty": (_replaced("config.json", ""), r"config\.json is empty"),
    "config of zeros": (_replaced("config.json", bytes(100)), r"config\.json is not valid JSON"),
    "config nested deeply": (_replaced("config.json", "[" * 100_000), r"config\.json is nested too deeply"),
    "config with a huge number": (
        _replaced("config.json", '{"a": 1' + "0" * 5000 + "}"),
        r"config\.json can't be read",
    ),
    "config without anything": (_replaced("config.json", "{}"), "unnamed is not supported|has no model_type None"),
    "config has a key twice": (
        _edited("config.json", lambda c: b'{"vocab_size": 1,' + c[1:]),
        r"config\.json can't be read \('vocab_size' is there twice\)",
    ),
    "config is a folder": (_folder("config.json"), r"config\.json is a folder"),
    "config is a pipe": (_pipe("config.json"), r"config\.json is a pipe or a device"),
    "weights are a pipe": (_pipe(WEIGHTS), r"model\.safetensors is a pipe or a device"),
    "config is a broken link": (_broken_link("config.json"), r"config\.json is a link to \.\./blobs/gone"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), r"model\.safetensors is missing"),
    "weights are a pointer": (_replaced(WEIGHTS, POINTER), r"model\.safetensors is a Git LFS pointer"),
    "weights are empty": (_replaced(WEIGHTS, b""), r"model\.safetensors is cut off after 0 bytes"),
    "weights of zeros": (_replaced(WEIGHTS, bytes(1000)), r"model\.safetensors is not a safetensors file"),
    "weights are text": (_replaced(WEIGHTS, "<!DOCTYPE html>" * 20), r"model\.safetensors is not a safetensors file"),
    "weights are a folder": (_folder(WEIGHTS), r"model\.safetensors is a folder"),
    "weights are a broken link": (_broken_link(WEIGHTS), r"model\.safetensors is a link to"),
    "weights with more bytes": (_edited(WEIGHTS, lambda c: c + b"\0"), "1 bytes behind its last tensor"),
    "header is a list": (_header(lambda header: []), "its header is not an object"),
    "header is not JSON": (_header(lambda header: b"{" * 40), "its header is not JSON"),
    "header without a dtype": (_header(lambda h: _first_entry(h, dtype=None)), "a broken entry|bytes behind|has dtype"),
    "header with another shape": (_header(lambda h: _first_entry(h, shape=[1, 2])), r"bytes for tensor .*F32 \(1, 2\)"),
    "header with a negative shape": (_header(lambda h: _first_entry(h, shape=[-1])), "a broken entry for tensor"),
    "header with a gap": (_header(lambda h: _first_entry(h, data_offsets=[4, 8], shape=[1])), "overlap or leave a gap"),
    "a dtype of integers": (_header(lambda h: _first_entry(h, dtype="I32")), "has dtype I32, which is not supported"),
    "a dtype of 8 bits": (_header(lambda h: _first_entry(h, dtype="F8_E5M2")), "has dtype F8_E5M2, which is not"),
    "an adapter beside": (_replaced("adapter_config.json", "{}"), "has an adapter"),
    "index is empty": (_index(lambda index: {}), "has no 'weight_map'"),
    "index is a list": (_index(lambda index: []), r"index\.json is a JSON array"),
    "index names nothing": (_index(lambda index: {"weight_map": {}}), "has no 'weight_map'"),
    "index with another value": (_index(lambda index: _first(index, 3)), "is in 3, which is no safetensors file"),
    "index leads outside": (
        _index(lambda index: _first(index, "../part-0.safetensors")),
        "which is no safetensors file of the folder",
    ),
    "index names a wrong shard": (
        _index(lambda index: _first(index, "part-1.safetensors")),
        r"says that part-1\.safetensors has 'lm_head\.weight', but it does not",
    ),
    "index names more tensors": (
        _index(lambda index: index["weight_map"].update(more="part-0.safetensors")),
        "has 'more', but it does not",
    ),
    "a shard is missing": (
        _index(lambda index: _first(index, "part-9.safetensors")),
        r"part-9\.safetensors is missing",
    ),
    "two shards have a tensor": (_twice, r"part-0\.safetensors and .*part-1\.safetensors both have a tensor"),
}
"""By name: what breaks a folder of model.safetensors, and a pattern of the sentence that it gives."""
