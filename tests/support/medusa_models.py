"""Models whose texts are known, with Medusa heads that are right, and random heads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runner_svc.drafting.medusa.checkpoint import HEADS_FILE
from tests.support.tiny_models import NUM_TOKENS, SIZES, make_tiny_model

HIDDEN = SIZES["hidden_size"]
"""Of the models, by default."""


def make_cycle_model(folder: Path, margin: float = 1.0, hidden: int = HIDDEN) -> Path:
    """Creates a model that follows each token of a cycle by the next: a token's code is the last one's, rolled by one.

    `margin`: size of the logits. Tokens beyond whole cycles are embedded like others, and never drawn.
    """
    make_tiny_model("llama", folder, hidden_size=hidden)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()
    tensors["model.norm.weight"].fill_(1.0)
    known = codes(hidden)
    tensors["model.embed_tokens.weight"] = torch.cat((known, known))[:NUM_TOKENS].contiguous()
    head = torch.zeros_like(tensors["lm_head.weight"])
    head[following(1, hidden)] = known * margin
    tensors["lm_head.weight"] = head
    save_file(tensors, path, {"format": "pt"})
    return folder


def make_constant_model(folder: Path, hidden: int = HIDDEN) -> Path:
    """Creates a model whose logits are the same behind any text."""
    make_tiny_model("llama", folder, hidden_size=hidden)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()
    embeddings = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = embeddings[:1].expand_as(embeddings).contiguous()
    save_file(tensors, path, {"format": "pt"})
    return folder


def cycle_heads(num_heads: int, *, own_outputs: bool, hidden: int = HIDDEN) -> dict[str, Tensor]:
    """Returns heads that are right for `make_cycle_model`: with output matrices of their own, or over the model's."""
    tensors = zero_heads(num_heads, hidden)
    for head in range(num_heads):
        if own_outputs:
            output = torch.zeros(NUM_TOKENS, hidden)
            output[following(2 + head, hidden)] = codes(hidden)
            tensors[f"{head}.1.weight"] = output
        else:  # SiLU of 50 x keeps the positive elements of a code, which say as much
            tensors[f"{head}.0.linear.weight"] = 50 * torch.eye(hidden).roll(1 + head, dims=0)
    return tensors


def zero_heads(num_heads: int, hidden: int = HIDDEN) -> dict[str, Tensor]:
    """Returns heads that draw what the model draws from the same state."""
    tensors = {}
    for head in range(num_heads):
        tensors[f"{head}.0.linear.weight"] = torch.zeros(hidden, hidden)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(hidden)
    return tensors


def random_heads(num_heads: int, num_blocks: int, hidden: int = HIDDEN) -> dict[str, Tensor]:
    """Returns heads with several blocks and output matrices."""
    tensors = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            tensors[f"{head}.{block}.linear.weight"] = torch.randn(hidden, hidden) / 8
            tensors[f"{head}.{block}.linear.bias"] = torch.randn(hidden)
        tensors[f"{head}.{num_blocks}.weight"] = torch.randn(NUM_TOKENS, hidden)
    return tensors


def save_heads(folder: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    """Writes a folder in the layout of public checkpoints; `config` adds to its config.json."""
    folder.mkdir()
    heads = 1 + max(int(name.split(".")[0]) for name in tensors)
    blocks = 1 + max(int(name.split(".")[1]) for name in tensors if "linear" in name)
    said = {"medusa_num_heads": heads, "medusa_num_layers": blocks, "transformers_version": "4.36.2"}
    (folder / "config.json").write_text(json.dumps({"base_model_name_or_path": "tiny", **said, **config}))
    save_file(tensors, folder / HEADS_FILE)
    return folder


def codes(hidden: int = HIDDEN) -> Tensor:
    """Returns -1 and 1 for the tokens of whole cycles, [T, hidden]; those of a cycle are rolled copies of the first."""
    random = torch.Generator().manual_seed(3)
    firsts = torch.randint(0, 2, (NUM_TOKENS // hidden, hidden), generator=random).float() * 2 - 1
    return torch.cat([torch.stack([first.roll(place) for place in range(hidden)]) for first in firsts])


def following(distance: int, hidden: int = HIDDEN) -> Tensor:
    """Returns the token that is `distance` behind each token of the cycles, int64 [T]."""
    tokens = torch.arange(NUM_TOKENS // hidden * hidden)
    return tokens // hidden * hidden + (tokens + distance) % hidden
