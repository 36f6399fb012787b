"""Finds the safetensors files of a model folder, and checks their index against what they hold.

As transformers does, a folder with model.safetensors is read from that file alone, whether or not there is an index.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner_svc.model.folder.errors import BrokenModel, ModelNotFound, UnsupportedModel
from runner_svc.model.folder.json_file import AGAIN, read_object, refuse_unreadable
from runner_svc.model.folder.safetensors_header import StoredTensor, stored_tensors

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_config.json"
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def pickled_weights_sentence(folder: Path) -> str:
    """Returns a sentence that names a pickle file in the folder, which could run code when loaded; "" without one."""
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED_SUFFIXES)
    if not pickled:
        return ""
    return f" {pickled[0]} is a pickle file, which could run code when loaded; convert it to safetensors."


def checkpoint_files(folder: Path) -> list[Path]:
    """Returns the folder's safetensors files, sorted.

    Raises ModelNotFound when there is none or a shard is missing, BrokenModel for a broken index, UnsupportedModel for
    a folder with an adapter beside the weights.
    """
    if (folder / ADAPTER_FILE).exists():
        raise UnsupportedModel(
            f"{folder} has an adapter ({ADAPTER_FILE}) beside the weights, and adapters are not supported: merge it "
            f"into the weights, or delete {ADAPTER_FILE} to serve the model without it."
        )
    if (folder / SINGLE_FILE).exists() or (folder / SINGLE_FILE).is_symlink():
        paths = [folder / SINGLE_FILE]
    elif (weight_map := _weight_map(folder)) is not None:
        paths = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        paths = [folder / SINGLE_FILE]
    for path in paths:
        refuse_unreadable(path)
        if not path.is_file():
            raise ModelNotFound(
                f"{path} is missing; a model's folder needs {SINGLE_FILE}, or {INDEX_FILE} and its shards."
                f"{pickled_weights_sentence(folder)}"
            )
    return paths


def checkpoint_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of all files of a folder, by name.

    Raises what `checkpoint_files` and `stored_tensors` do, and BrokenModel where two files have the same tensor or
    the index names a tensor that its file lacks.
    """
    paths = checkpoint_files(folder)
    found: dict[str, StoredTensor] = {}
    for path in paths:
        for name, tensor in stored_tensors(path).items():
            if name in found:
                raise UnsupportedModel(
                    f"{found[name].path} and {path} both have a tensor {name!r}: delete one of them."
                )
            found[name] = tensor
    if paths == [folder / SINGLE_FILE]:
        return found
    for name, file in (_weight_map(folder) or {}).items():
        if name not in found or found[name].path != folder / file:
            raise BrokenModel(f"{folder / INDEX_FILE} says that {file} has {name!r}, but it does not: {AGAIN}.")
    return found


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Returns the file of each tensor as the index has it; None where there is no index."""
    index = folder / INDEX_FILE
    content: dict[str, Any] = read_object(index)
    if not content and not index.exists():
        return None
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BrokenModel(f"{index} has no 'weight_map' that names the file of each tensor: {AGAIN}.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            raise BrokenModel(
                f"{index} says that tensor {name!r} is in {file!r}, which is no safetensors file of the folder."
            )
    return weight_map
