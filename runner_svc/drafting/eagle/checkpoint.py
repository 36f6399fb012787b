"""Reads EAGLE's draft layer in the layouts of the public checkpoints, EAGLE-1 and EAGLE-3.

Both have the config.json of a Llama model with one layer. EAGLE-1 has `fc`, of the token's embedding and the model's
final state, and `layers.0` without its first norm. EAGLE-3 has `fc`, of three states within the model, `midlayer`,
whose attention reads the embedding beside that, `norm`, and a head `lm_head` over a smaller vocabulary: `d2t` has the
distance of each of its ids to the model's id. (SafeAILab/EAGLE on GitHub: `cnets1.py`, `cnets.py`.)
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import ModelNotFound, UnsupportedModel
from runner_svc.model.families.description import MlpDescription
from runner_svc.model.folder.checkpoint_files import checkpoint_tensors
from runner_svc.model.folder.config_file import CONFIG_FILE, read_config
from runner_svc.model.folder.key_values import shortened
from runner_svc.model.folder.safetensors_header import ELEMENT_BYTES, StoredTensor

OWN_KEYS = ("bias", "draft_vocab_size", "target_hidden_size", "eagle_config", "norm_before_residual")
"""Keys of config.json that a Llama model does not have."""
_THIRD_KEYS = ("draft_vocab_size", "eagle_config", "norm_before_residual")
"""Those of them that only EAGLE-3 reads."""
_CLASSES = {f"{a}LlamaForCausalLM{b}" for a in ("", "Eagle", "Eagle3") for b in ("", "Eagle", "Eagle3")}
_LAYER_IDS, _USES_STATES = "eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state"
_EMBEDDINGS, _D2T, _T2D = "embed_tokens.weight", "d2t", "t2d"
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class Target:
    """Sizes of the model that the layer drafts for."""

    hidden_size: int
    vocab_size: int
    num_layers: int


@dataclass(frozen=True, slots=True, eq=False)
class EagleWeights:
    """The draft layer, in float32 where `read_eagle` returns it; matrices are [out, in]. H is its hidden size."""

    config: ModelConfig
    """Sizes and RoPE of the layer."""
    fuse: Tensor
    """EAGLE-1: [H, 2 H], of embedding and state. EAGLE-3: [H, 3 * the model's], of three states."""
    fuse_bias: Tensor | None
    qkv: Tensor
    """Queries, keys, values; EAGLE-3: of embedding and state, 2 H columns."""
    output: Tensor
    gate_up: Tensor
    down: Tensor
    norm: Tensor
    """Before the MLP."""
    embeddings: Tensor | None
    """[vocab_size, H]; None: the model's."""
    taps: tuple[int, ...]
    """EAGLE-3: the layers whose inputs are the three states; one behind the last stands for its output."""
    embedding_norm: Tensor | None = None
    state_norm: Tensor | None = None
    last_norm: Tensor | None = None
    head: Tensor | None = None
    """[draft vocabulary, H]."""
    head_ids: Tensor | None = None
    """int64 [draft vocabulary]: the model's ids."""
    norm_before_residual: bool = False
    """Whether attention's output is added to the normalised state."""

    @property
    def is_third(self) -> bool:
        """Whether it is of EAGLE-3."""
        return self.head is not None

    def to(self, device: torch.device, dtype: torch.dtype) -> EagleWeights:
        """Returns the layer on a device, its numbers in `dtype`."""
        moved: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Tensor):
                moved[each.name] = value.to(device, dtype if value.is_floating_point() else value.dtype)
        return replace(self, **moved)


def read_eagle(folder: Path, target: Target) -> EagleWeights:
    """Returns the draft layer of a folder, for a model of these sizes.

    Raises ModelNotFound where a file is missing, BrokenModel for a broken one, UnsupportedModel for one that belongs to
    another model or has something that is not read.
    """
    if not folder.is_dir():
        raise ModelNotFound(
            f"There is no folder {folder} with a draft layer: set draft to 'eagle:' and a folder with {CONFIG_FILE} "
            "and model.safetensors."
        )
    raw = read_config(folder)
    config = _config(folder, raw, target)
    tensors = checkpoint_tensors(folder)
    is_third = any(name.startswith("midlayer.") for name in tensors)
    has_bias, before_residual = _flag(folder, raw, "bias", True), _flag(folder, raw, "norm_before_residual", False)
    if not is_third:
        _refuse_third_keys(folder, raw, config)
    states = _states_width(folder, raw, config, target, is_third)
    taps = _taps(folder, raw, target) if is_third else ()
    head_ids = _draft_vocab(folder, raw, config) if is_third else 0
    expected = _expected(config, "midlayer" if is_third else "layers.0", states, head_ids, has_bias)
    _check(folder, tensors, expected, {_EMBEDDINGS: (config.vocab_size, config.hidden_size)})
    return _read(config, tensors, is_third, taps, before_residual)


def _config(folder: Path, raw: dict[str, Any], target: Target) -> ModelConfig:
    path = folder / CONFIG_FILE
    classes = raw.get("architectures") or ["LlamaForCausalLM"]
    if not isinstance(classes, list) or len(classes) != 1 or str(classes[0]) not in _CLASSES:
        raise UnsupportedModel(
            f"{path} has the architectures {shortened(classes)}, but only Llama's draft layer is read."
        )
    plain = {key: value for key, value in raw.items() if key not in OWN_KEYS}
    try:
        config = ModelConfig.from_hugging_face(plain | {"architectures": ["LlamaForCausalLM"]})
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from error
    layer = config.layers[0]
    has_bias = layer.qkv_bias or layer.output_bias or (isinstance(layer.mlp, MlpDescription) and layer.mlp.bias)
    why_not = {
        f"{config.num_layers} layers": config.num_layers != 1,
        "biases in its layer": has_bias,
        "quantized weights": config.quantization is not None,
        "RoPE that depends on the length": any(rope.depends_on_length for rope in config.ropes),
        "an activation other than SiLU": config.activation not in ("silu", "swish"),
    }
    for what, has in why_not.items():
        if has:
            raise UnsupportedModel(f"{path} has {what}, which is not supported in a draft layer.")
    if config.vocab_size != target.vocab_size:
        raise UnsupportedModel(
            f"{path} has 'vocab_size' {config.vocab_size}, but the model's is {target.vocab_size}: use a draft layer "
            "of this model."
        )
    return config


def _flag(folder: Path, raw: dict[str, Any], key: str, default: bool) -> bool:
    value = raw.get(key, default)
    if not isinstance(value, bool):
        raise UnsupportedModel(f"{folder / CONFIG_FILE} needs true or false as {key!r}, it has {shortened(value)}.")
    return value


def _refuse_third_keys(folder: Path, raw: dict[str, Any], config: ModelConfig) -> None:
    """Raises UnsupportedModel for what only EAGLE-3 reads, unless it says what holds for EAGLE-1 too."""
    same: dict[str, tuple[Any, ...]] = {"draft_vocab_size": (None, config.vocab_size), "norm_before_residual": (False,)}
    for key in _THIRD_KEYS:
        if key in raw and raw[key] not in same.get(key, (None, {})):
            raise UnsupportedModel(
                f"{folder / CONFIG_FILE} has {key!r} ({shortened(raw[key])}), but the tensors are those of EAGLE-1, "
                "which has no such thing: delete it if the layer does not depend on it."
            )


def _states_width(folder: Path, raw: dict[str, Any], config: ModelConfig, target: Target, is_third: bool) -> int:
    """Returns the number of columns of `fc`."""
    key = "target_hidden_size" if "target_hidden_size" in raw else "hidden_size"
    width = raw.get("target_hidden_size", config.hidden_size)
    if width != target.hidden_size or (not is_third and config.hidden_size != target.hidden_size):
        raise UnsupportedModel(
            f"{folder / CONFIG_FILE} has {key!r} {shortened(width)}, but the model's states have {target.hidden_size} "
            "elements: use a draft layer of this model."
        )
    return 3 * target.hidden_size if is_third else 2 * config.hidden_size


def _taps(folder: Path, raw: dict[str, Any], target: Target) -> tuple[int, ...]:
    """Returns the layers whose inputs EAGLE-3 reads.

    A configuration names the layers whose outputs they are, as SpecForge writes them.
    """
    said = raw.get("eagle_config") or {}
    path, last = folder / CONFIG_FILE, target.num_layers
    unknown = sorted(said.keys() - {_LAYER_IDS, _USES_STATES}) if isinstance(said, dict) else ["its type"]
    if unknown or said.get(_USES_STATES, True) is not True:
        what = unknown[0] if unknown else _USES_STATES
        raise UnsupportedModel(f"{path} has an 'eagle_config' with {what!r}, which is not read.")
    ids = said.get(_LAYER_IDS, [1, last // 2 - 1, last - 4])
    fits = isinstance(ids, list) and len(ids) == 3 and all(type(i) is int and 0 <= i < last for i in ids)
    if not fits or sorted(set(ids)) != ids:
        raise UnsupportedModel(
            f"{path} has to name three of the model's {last} layers in ascending order in {_LAYER_IDS!r} of "
            f"'eagle_config', it has {shortened(ids)}."
        )
    return tuple(i + 1 for i in ids)


def _draft_vocab(folder: Path, raw: dict[str, Any], config: ModelConfig) -> int:
    value = raw.get("draft_vocab_size") or config.vocab_size
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= config.vocab_size:
        raise UnsupportedModel(
            f"{folder / CONFIG_FILE} needs a 'draft_vocab_size' of 1 to {config.vocab_size}, it has {shortened(value)}."
        )
    return value


def _expected(config: ModelConfig, layer: str, states: int, head: int, bias: bool) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor, by name; `head`: ids of EAGLE-3's head, 0 for EAGLE-1."""
    size, width = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    read = 2 * size if head else size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, states)}
    for name, out in zip(_PROJECTIONS[:3], (queries, keys, keys), strict=True):
        shapes[f"{layer}.self_attn.{name}.weight"] = out, read
    shapes[f"{layer}.self_attn.o_proj.weight"] = size, queries
    shapes[f"{layer}.mlp.gate_proj.weight"] = shapes[f"{layer}.mlp.up_proj.weight"] = width, size
    shapes[f"{layer}.mlp.down_proj.weight"] = size, width
    norms = [f"{layer}.post_attention_layernorm.weight"]
    if head:
        norms += [f"{layer}.hidden_norm.weight", f"{layer}.input_layernorm.weight", "norm.weight"]
        shapes |= {"lm_head.weight": (head, size), _D2T: (head,), _T2D: (config.vocab_size,)}
    elif bias:
        norms.append("fc.bias")
    return shapes | dict.fromkeys(norms, (size,))


def _check(
    folder: Path,
    tensors: dict[str, StoredTensor],
    expected: dict[str, tuple[int, ...]],
    optional: dict[str, tuple[int, ...]],
) -> None:
    """Raises UnsupportedModel for a tensor that is missing, left over, or of another shape or type."""
    for name in sorted(expected.keys() - tensors.keys()):
        raise UnsupportedModel(f"The draft layer in {folder} has no tensor {name!r}, which its {CONFIG_FILE} requires.")
    for name, found in sorted(tensors.items()):
        shape = expected.get(name) or optional.get(name)
        if shape is None:
            raise UnsupportedModel(f"{found.path} has a tensor {name!r}, which is not read for a draft layer.")
        if found.shape != shape:
            raise UnsupportedModel(
                f"{found.path} has a tensor {name!r} of shape {list(found.shape)}, but {list(shape)} is required."
            )
        types = {_D2T: ("I64", "I32"), _T2D: ("BOOL", "U8")}.get(name, tuple(ELEMENT_BYTES))
        if found.dtype not in types:
            raise UnsupportedModel(
                f"{found.path} has a tensor {name!r} of type {found.dtype}: convert it to {types[-1]}."
            )


def _read(
    config: ModelConfig, tensors: dict[str, StoredTensor], is_third: bool, taps: tuple[int, ...], before_residual: bool
) -> EagleWeights:
    def stored(name: str) -> Tensor:
        with safe_open(tensors[name].path, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def read(name: str) -> Tensor:
        return stored(name).to(torch.float32)

    layer = "midlayer" if is_third else "layers.0"
    third: dict[str, Any] = {}
    if is_third:
        third = {
            "embedding_norm": read(f"{layer}.input_layernorm.weight"),
            "state_norm": read(f"{layer}.hidden_norm.weight"),
            "last_norm": read("norm.weight"),
            "head": read("lm_head.weight"),
            "head_ids": _head_ids(tensors[_D2T].path, stored(_D2T), stored(_T2D)),
            "norm_before_residual": before_residual,
        }
    return EagleWeights(
        config=config,
        fuse=read("fc.weight"),
        fuse_bias=read("fc.bias") if "fc.bias" in tensors else None,
        qkv=torch.cat([read(f"{layer}.self_attn.{name}.weight") for name in _PROJECTIONS[:3]]),
        output=read(f"{layer}.self_attn.o_proj.weight"),
        gate_up=torch.cat([read(f"{layer}.mlp.{name}_proj.weight") for name in ("gate", "up")]),
        down=read(f"{layer}.mlp.down_proj.weight"),
        norm=read(f"{layer}.post_attention_layernorm.weight"),
        embeddings=read(_EMBEDDINGS) if _EMBEDDINGS in tensors else None,
        taps=taps,
        **third,
    )


def _head_ids(path: Path, distances: Tensor, known: Tensor) -> Tensor:
    """Returns the model's id of each of the head's ids."""
    ids = torch.arange(len(distances)) + distances.to(torch.int64)
    if not bool(((ids >= 0) & (ids < len(known))).all()) or len(ids.unique()) < len(ids):
        raise UnsupportedModel(f"{path} has a tensor {_D2T!r} that does not name ids of the model, each once.")
    if not torch.equal(known.to(torch.bool).nonzero().flatten(), ids.sort().values):
        raise UnsupportedModel(f"{path} has tensors {_D2T!r} and {_T2D!r} that name different ids of the model.")
    return ids
