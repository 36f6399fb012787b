"""Reads Medusa heads in the layout of the public checkpoints.

A folder has a config.json with `medusa_num_heads` and `medusa_num_layers`, and medusa_lm_head.safetensors. Head i is a
sequence of modules: blocks `i.0.linear`, `i.1.linear`, ..., then an output matrix `i.{medusa_num_layers}.weight` of its
own. A file whose heads have no output matrix shares the model's head. (FasterDecoding/Medusa on GitHub, `MedusaModel`.)
The first public files have 5 heads beside a config.json that says 2, so a file may have more heads than that says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from runner_svc.drafting.medusa.heads import Block, MedusaHead
from runner_svc.model.errors import BrokenModel, ModelNotFound, UnsupportedModel
from runner_svc.model.folder.config_file import CONFIG_FILE, read_config
from runner_svc.model.folder.key_values import shortened
from runner_svc.model.folder.safetensors_header import ELEMENT_BYTES, StoredTensor, stored_tensors

HEADS_FILE = "medusa_lm_head.safetensors"
PICKLED_FILE = "medusa_lm_head.pt"
MOST_HEADS, MOST_BLOCKS = 15, 16
"""More heads draft more tokens than a step verifies."""
HARMLESS = {
    "It says where the file comes from.": "base_model_name_or_path transformers_version _name_or_path _commit_hash "
    "version",
    "It says what trained or ran the heads.": "architectures model_type dtype torch_dtype",
    "It says how many drafts another engine verifies; the scheduler decides that here.": "decoding_strategy "
    "medusa_choices max_paths topk",
}
"""Keys of config.json that change no answer, each with the reason."""
_HARMLESS = frozenset(" ".join(HARMLESS.values()).split())
_SIZES = ("hidden_size", "vocab_size")
_COUNTS = ("medusa_num_heads", "medusa_num_layers")


def read_heads(folder: Path, hidden_size: int, vocab_size: int) -> list[MedusaHead]:
    """Returns the heads of a folder for a model of these sizes, in float32 on the CPU, nearest distance first.

    Raises ModelNotFound where a file is missing, BrokenModel for a broken one, UnsupportedModel for one that belongs to
    another model or has something that is not read.
    """
    if not folder.is_dir():
        raise ModelNotFound(
            f"There is no folder {folder} with Medusa heads: set draft to 'medusa:' and a folder with {CONFIG_FILE} "
            f"and {HEADS_FILE}."
        )
    num_heads, num_blocks = _counts(folder, hidden_size, vocab_size)
    path = folder / HEADS_FILE
    if not path.exists() and not path.is_symlink():
        raise ModelNotFound(f"{folder} has no {HEADS_FILE}.{_conversion(folder)}")
    tensors = stored_tensors(path)
    num_heads = max(num_heads, _heads_in(tensors))
    has_outputs = f"0.{num_blocks}.weight" in tensors
    _check(path, tensors, _expected(num_heads, num_blocks, hidden_size, vocab_size if has_outputs else None))
    with safe_open(path, "pt") as file:

        def read(name: str) -> Tensor:
            tensor: Tensor = file.get_tensor(name)
            return tensor.to(torch.float32)

        return [
            MedusaHead(
                [
                    Block(read(f"{head}.{block}.linear.weight"), read(f"{head}.{block}.linear.bias"))
                    for block in range(num_blocks)
                ],
                read(f"{head}.{num_blocks}.weight") if has_outputs else None,
            )
            for head in range(num_heads)
        ]


def _counts(folder: Path, hidden_size: int, vocab_size: int) -> tuple[int, int]:
    """Returns the numbers of heads and of blocks in each."""
    path, config = folder / CONFIG_FILE, read_config(folder)
    for key in config:
        if key not in _HARMLESS and key not in _SIZES and key not in _COUNTS:
            raise UnsupportedModel(
                f"{path} has {key!r} ({shortened(config[key])}), which is not read for Medusa heads: delete it if the "
                "heads do not depend on it."
            )
    for key, size in zip(_SIZES, (hidden_size, vocab_size), strict=True):
        if config.get(key, size) != size:
            raise UnsupportedModel(
                f"{path} has {key!r} {shortened(config[key])}, but the model's is {size}: use heads of this model."
            )
    heads, blocks = (
        _count(path, config, key, most) for key, most in zip(_COUNTS, (MOST_HEADS, MOST_BLOCKS), strict=True)
    )
    return heads, blocks


def _count(path: Path, config: dict[str, Any], key: str, most: int) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        given = shortened(value) if key in config else "none"
        raise BrokenModel(f"{path} needs an integer {key!r} of 1 to {most}, it has {given}.")
    return value


def _heads_in(tensors: dict[str, StoredTensor]) -> int:
    """Returns the number of heads that the names of the tensors tell, at most MOST_HEADS."""
    firsts = {name.split(".")[0] for name in tensors}
    return max((head + 1 for head in range(MOST_HEADS) if str(head) in firsts), default=0)


def _expected(num_heads: int, num_blocks: int, hidden_size: int, outputs: int | None) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor, by name; `outputs`: rows of the output matrices, if there are any."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            shapes[f"{head}.{block}.linear.weight"] = hidden_size, hidden_size
            shapes[f"{head}.{block}.linear.bias"] = (hidden_size,)
        if outputs is not None:
            shapes[f"{head}.{num_blocks}.weight"] = outputs, hidden_size
    return shapes


def _check(path: Path, tensors: dict[str, StoredTensor], expected: dict[str, tuple[int, ...]]) -> None:
    """Raises UnsupportedModel for a tensor that is missing, left over, or of another shape or type."""
    for name, shape in expected.items():
        if name not in tensors:
            raise UnsupportedModel(f"{path} has no tensor {name!r}, which its {CONFIG_FILE} requires.")
        found = tensors[name]
        if found.shape != shape:
            raise UnsupportedModel(
                f"{path} has a tensor {name!r} of shape {list(found.shape)}, but the model requires {list(shape)}: "
                "use heads of this model."
            )
        if found.dtype not in ELEMENT_BYTES:
            raise UnsupportedModel(
                f"{path} has a tensor {name!r} of type {found.dtype}: convert it to float32, float16 or bfloat16."
            )
    for name in sorted(tensors):
        if name not in expected:
            raise UnsupportedModel(f"{path} has a tensor {name!r}, which its {CONFIG_FILE} does not explain.")


def _conversion(folder: Path) -> str:
    """Returns a sentence that says how to convert the pickle file, if there is one; it is never loaded here."""
    if not (folder / PICKLED_FILE).exists():
        return ""
    return (
        f' {PICKLED_FILE} is a pickle file, which could run code when loaded; convert it with "save_file({{name: '
        f"tensor.clone() for name, tensor in torch.load('{PICKLED_FILE}', weights_only=True).items()}}, "
        f"'{HEADS_FILE}')\" of safetensors.torch."
    )
