"""Converts a GGUF model to a Hugging Face folder.

The plan needs only the header and raises for everything that cannot be converted, so that a file is refused before
anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner_svc.gguf.architectures import Family, TensorRule
from runner_svc.gguf.config import Sizes, read_config
from runner_svc.gguf.errors import GgufError
from runner_svc.gguf.header import TensorInfo
from runner_svc.gguf.kept_blocks import HEAD, quantization_config, with_kept_blocks
from runner_svc.gguf.keys import Keys
from runner_svc.gguf.parts import Model, read_model
from runner_svc.gguf.tensor_data import Piece, Target, write_tensors
from runner_svc.gguf.tokenizer import StatedTokenizer, write_tokenizer
from runner_svc.interface.progress import Progress


@dataclass(frozen=True, slots=True)
class Conversion:
    """The contents of the folder."""

    config: dict[str, Any]
    targets: list[Target]
    tokenizer: StatedTokenizer

    @classmethod
    def plan(cls, file: Path) -> Conversion:
        """Plans a file, or a split model by any of its parts. Raises GgufError if it cannot be converted completely."""
        model = read_model(file)
        keys = Keys(model.keys)
        tokenizer = StatedTokenizer.read(keys)
        sizes = Sizes.read(keys, len(tokenizer.tokens))
        if sizes.layers > len(model.tensors):
            raise keys.refuse(".block_count", f"but it has {len(model.tensors)} tensors")
        family, config = read_config(keys, model, sizes)
        keys.refuse_rest()
        tensors = _Tensors(model, family, sizes, keys.architecture)
        targets = with_kept_blocks(tensors.targets())
        config |= tensors.flags() | quantization_config(targets)
        config["tie_word_embeddings"] = not any(target.module == HEAD for target in targets)
        config |= tokenizer.config_ids()
        return cls(config, targets, tokenizer)

    def write(self, folder: Path, progress: Progress, what: str) -> None:
        """Writes config.json, generation_config.json, the files of the tokenizer, and the tensors."""
        _write_json(folder / "config.json", self.config)
        _write_json(folder / "generation_config.json", self.tokenizer.config_ids())
        write_tokenizer(self.tokenizer, folder)
        write_tensors(self.targets, folder, progress, what)


class _Tensors:
    """Matches the tensors of a model with those of its family."""

    def __init__(self, model: Model, family: Family, sizes: Sizes, architecture: str) -> None:
        self._tensors = model.tensors
        self._family, self._sizes, self._architecture = family, sizes, architecture
        self._layers = range(sizes.layers)
        self._taken = {f"{name}.weight" for name in family.rope_factors}
        self._biases = {
            group: any(f"blk.{layer}.{name}.bias" in self._tensors for layer in self._layers for name in names)
            for group, names in _bias_groups(family).items()
        }

    def flags(self) -> dict[str, bool]:
        """Returns the keys of the configuration for biases."""
        flags = {group: is_there for group, is_there in self._biases.items() if group not in self._family.always_biased}
        if self._family.model == "MistralForCausalLM" and any(flags.values()):
            raise GgufError("It has a sliding window and biases, which no supported model has together.")
        return flags

    def targets(self) -> list[Target]:
        """Returns the tensors to write. Raises GgufError if one is missing, unknown, or has another shape."""
        targets = [target for rule in self._family.around for target in self._matched(rule, "", "")]
        for layer in self._layers:
            for rule in self._family.layer:
                targets += self._matched(rule, f"blk.{layer}.", f"model.layers.{layer}.")
        if unused := [name for name in self._tensors if name not in self._taken]:
            more = f", and {len(unused) - 1} more are not" if len(unused) > 1 else ""
            layers = f"{self._architecture!r} with {self._sizes.layers} layers"
            raise GgufError(f"Its tensor {unused[0]!r} is not known for the architecture {layers}{more}.")
        return targets

    def _matched(self, rule: TensorRule, prefix: str, target: str) -> Iterator[Target]:
        shape = tuple(int(getattr(self._sizes, size)) for size in rule.shape)
        name = f"{prefix}{rule.name}.weight"
        if name not in self._tensors and rule.is_optional:
            return
        if name not in self._tensors and rule.parts and f"{prefix}{rule.parts[0]}.weight" in self._tensors:
            pieces = self._parts(rule, prefix, shape)
        else:
            pieces = (self._piece(rule, name, shape),)
        yield Target(f"{target}{rule.target}.weight", pieces)
        if rule.bias is not None and (self._biases[rule.bias] or rule.bias in self._family.always_biased):
            bias = f"{prefix}{rule.name}.bias"
            is_there = bias in self._tensors
            piece = self._piece(rule, bias, shape[:1]) if is_there else Piece(shape[:1], None)
            yield Target(f"{target}{rule.target}.bias", (piece,))

    def _parts(self, rule: TensorRule, prefix: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
        """Returns separate queries, keys and values as pieces of one tensor."""
        rows = (self._sizes.q, self._sizes.kv, self._sizes.kv)
        names = [f"{prefix}{part}.weight" for part in rule.parts]
        return tuple(self._piece(rule, name, (count, *shape[1:])) for name, count in zip(names, rows, strict=True))

    def _piece(self, rule: TensorRule, name: str, shape: tuple[int, ...]) -> Piece:
        info = self._tensors.get(name)
        if info is None:
            raise GgufError(f"It has no tensor {name!r}, which the architecture {self._architecture!r} needs.")
        self._check_shape(info, shape)
        self._taken.add(name)
        heads = None if rule.heads is None else int(getattr(self._sizes, rule.heads))
        return Piece(shape, info, heads, rule.added)

    def _check_shape(self, info: TensorInfo, shape: tuple[int, ...]) -> None:
        if info.shape != shape:
            raise GgufError(f"Its tensor {info.name!r} is {list(info.shape)}, but its keys make it {list(shape)}.")


def _bias_groups(family: Family) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for rule in family.layer:
        if rule.bias is not None:
            groups.setdefault(rule.bias, []).append(rule.name)
    return groups


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")
