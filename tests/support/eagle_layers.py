"""Draft layers of EAGLE in the layouts of public checkpoints, random or right; what they draft, without a cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from tests.support.tiny_models import NUM_TOKENS, SIZES

HIDDEN, WIDTH, HEADS, KV_HEADS, EPS, THETA = SIZES["hidden_size"], 80, 4, 2, 1e-5, 10000.0
HEAD_DIM = HIDDEN // HEADS
DRAFT_IDS = 100
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": WIDTH,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": EPS,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": NUM_TOKENS,
}
"""As the first checkpoints have it."""


def random_layer(third: bool, *, own_embeddings: bool = False, hidden: int = HIDDEN) -> dict[str, Tensor]:
    """Returns a random layer of EAGLE-3 (`third`) or EAGLE-1."""
    head_dim = hidden // HEADS
    layer, read = ("midlayer", 2 * hidden) if third else ("layers.0", hidden)
    shapes = {
        "fc.weight": (hidden, (3 if third else 2) * hidden),
        f"{layer}.self_attn.q_proj.weight": (hidden, read),
        f"{layer}.self_attn.k_proj.weight": (KV_HEADS * head_dim, read),
        f"{layer}.self_attn.v_proj.weight": (KV_HEADS * head_dim, read),
        f"{layer}.self_attn.o_proj.weight": (hidden, hidden),
        f"{layer}.mlp.gate_proj.weight": (WIDTH, hidden),
        f"{layer}.mlp.up_proj.weight": (WIDTH, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, WIDTH),
    }
    tensors = {name: torch.randn(shape) * 1.5 / shape[1] ** 0.5 for name, shape in shapes.items()}
    norms = [f"{layer}.post_attention_layernorm.weight"]
    if third:
        norms += [f"{layer}.hidden_norm.weight", f"{layer}.input_layernorm.weight", "norm.weight"]
        ids = torch.randperm(NUM_TOKENS)[:DRAFT_IDS].sort().values
        tensors["lm_head.weight"] = torch.randn(DRAFT_IDS, hidden) / 4
        tensors["d2t"] = ids - torch.arange(DRAFT_IDS)
        tensors["t2d"] = torch.zeros(NUM_TOKENS, dtype=torch.bool).index_fill(0, ids, True)
    else:
        tensors["fc.bias"] = torch.randn(hidden) / 4
    if own_embeddings:
        tensors["embed_tokens.weight"] = torch.randn(NUM_TOKENS, hidden)
    return tensors | {name: 1 + torch.randn(hidden) / 5 for name in norms}


def cycle_layer(hidden: int = HIDDEN) -> dict[str, Tensor]:
    """Returns a layer of EAGLE-1 that is right for `medusa_models.make_cycle_model`, by the model's states alone."""
    tensors = random_layer(False, hidden=hidden)
    tensors["fc.bias"].zero_()
    tensors["fc.weight"] = torch.cat((torch.zeros(hidden, hidden), torch.eye(hidden).roll(1, dims=0)), dim=1)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"layers.0.{name}.weight"].zero_()
    return tensors


def save_layer(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """Writes the folder of a layer; `config` changes its config.json."""
    folder.mkdir()
    said = CONFIG | ({"draft_vocab_size": len(tensors["d2t"])} if "d2t" in tensors else {}) | config
    (folder / "config.json").write_text(json.dumps(said))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def greedy_drafts(
    tensors: dict[str, Tensor],
    tokens: Sequence[int],
    states: Tensor,
    count: int,
    embeddings: Tensor,
    model_head: Callable[[Tensor], Tensor],
) -> list[int]:
    """Returns `count` drafts behind `tokens`, computed again as EAGLE's own code does; `states`: the model's, of all
    tokens but the last."""
    third = "d2t" in tensors
    embeddings = tensors.get("embed_tokens.weight", embeddings)
    inputs, drafts = list(tokens[1:]), []
    states = states[: len(inputs)]
    if third:
        states = states @ tensors["fc.weight"].T
    for _ in range(count):
        out = _layer(tensors, embeddings[inputs], states, third)[-1:]
        if third:
            choice = int((_norm(out, tensors["norm.weight"]) @ tensors["lm_head.weight"].T).argmax())
            drafts.append(choice + int(tensors["d2t"][choice]))
        else:
            drafts.append(int(model_head(out).argmax()))
        inputs.append(drafts[-1])
        states = torch.cat((states, out))
    return drafts


def _layer(tensors: dict[str, Tensor], embedded: Tensor, states: Tensor, third: bool) -> Tensor:
    def weight(name: str) -> Tensor:
        return tensors[f"{'midlayer' if third else 'layers.0'}.{name}.weight"]

    if third:
        residual = states
        read = torch.cat((_norm(embedded, weight("input_layernorm")), _norm(states, weight("hidden_norm"))), dim=1)
    else:
        residual = read = torch.cat((embedded, states), dim=1) @ tensors["fc.weight"].T + tensors["fc.bias"]
    queries = _rotated((read @ weight("self_attn.q_proj").T).view(-1, HEADS, HEAD_DIM))
    keys = _rotated((read @ weight("self_attn.k_proj").T).view(-1, KV_HEADS, HEAD_DIM))
    values = (read @ weight("self_attn.v_proj").T).view(-1, KV_HEADS, HEAD_DIM)
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1) for x in (keys, values))
    scores = queries.transpose(0, 1) @ keys.transpose(1, 2) / HEAD_DIM**0.5
    future = torch.ones(len(read), len(read), dtype=torch.bool).triu(1)
    attended = scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ values
    hidden = residual + attended.transpose(0, 1).flatten(1) @ weight("self_attn.o_proj").T
    normed = _norm(hidden, weight("post_attention_layernorm"))
    gated = functional.silu(normed @ weight("mlp.gate_proj").T) * (normed @ weight("mlp.up_proj").T)
    return hidden + gated @ weight("mlp.down_proj").T


def _rotated(x: Tensor) -> Tensor:
    half = HEAD_DIM // 2
    angles = torch.arange(len(x))[:, None] / THETA ** (torch.arange(half) * 2 / HEAD_DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight
