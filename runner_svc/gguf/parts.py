"""Finds the parts of a model that is split into several files, and joins their headers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner_svc.gguf.errors import GgufError
from runner_svc.gguf.header import Header, TensorInfo, read_header

# As llama.cpp's gguf-split names them: the number of a part from 1 on, and the count of parts.
_PART = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclass(frozen=True, slots=True)
class Model:
    """The files, keys and tensors of a model."""

    files: tuple[Path, ...]
    keys: dict[str, Any]
    tensors: dict[str, TensorInfo]


def part_files(file: Path) -> tuple[Path, ...]:
    """Returns the paths of all parts of a model by the name of one, in order; they may be missing."""
    match = _PART.match(file.name)
    if match is None:
        return (file,)
    count = int(match["count"])
    return tuple(file.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))


def only_model(files: list[Path]) -> Path | None:
    """Returns the first part of the only model among the files of a folder, or None for no or several models."""
    models = {part_files(file)[0] for file in files}
    return models.pop() if len(models) == 1 else None


def read_model(file: Path) -> Model:
    """Reads the headers of a model, which `file` is, or is a part of.

    Raises GgufError if a part is missing, broken, or belongs to another model.
    """
    header = read_header(file)
    count = header.keys.get(COUNT, 1)
    files = part_files(file) if count != 1 else (file,)
    if len(files) != count:
        raise GgufError(
            f"It is a part of {count} by its {COUNT}, but its name doesn't end in '-00001-of-{count:05}.gguf', "
            "by which the other parts are found; give all parts the names that they had."
        )
    if missing := [part.name for part in files if not part.is_file()]:
        raise GgufError(f"It is a part of {count}, and {missing[0]} is not beside it; put all parts in one folder.")
    headers = [header if part == file else _read_part(part) for part in files]
    if count != 1:
        for index, part in enumerate(headers):
            _check_part(part, index, headers[0])
    return _joined(headers)


def _read_part(file: Path) -> Header:
    try:
        return read_header(file)
    except GgufError as error:
        raise GgufError(f"Of its part {file.name}: {error}") from error


def _check_part(part: Header, index: int, first: Header) -> None:
    name = part.file.name
    count = first.keys.get(COUNT)
    if part.keys.get(COUNT) != count or part.keys.get(NUMBER) != index:
        said = f"{NUMBER} {part.keys.get(NUMBER)} and {COUNT} {part.keys.get(COUNT)}"
        raise GgufError(f"Its part {name} has {said}, not {index} and {count}: it belongs to another model.")
    if part.keys.get(TENSORS) != first.keys.get(TENSORS):
        raise GgufError(f"Its part {name} has another {TENSORS} than its first: it belongs to another model.")
    own = {NUMBER, COUNT, TENSORS, "general.alignment"}
    if foreign := sorted(key for key in part.keys.keys() - own if part.keys[key] != first.keys.get(key)):
        raise GgufError(f"Its part {name} has another {foreign[0]!r} than its first: it belongs to another model.")


def _joined(headers: list[Header]) -> Model:
    first = headers[0]
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for name, info in header.tensors.items():
            if name in tensors:
                raise GgufError(f"Tensor {name!r} is in two parts, {tensors[name].file.name} and {info.file.name}.")
            tensors[name] = info
    if not tensors:
        raise GgufError("It has no tensors.")
    expected = first.keys.get(TENSORS, len(tensors))
    if expected != len(tensors):
        raise GgufError(f"Its parts have {len(tensors)} tensors, but its {TENSORS} is {expected}.")
    return Model(tuple(header.file for header in headers), first.keys, tensors)
