"""Trains Medusa's heads over a frozen model, from its cached states, and counts how often they are right."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from bench.speculation.own_answers import Answer
from runner_svc.drafting.medusa.checkpoint import HEADS_FILE

NEARER = 0.8
"""Weight of a head's loss, relative to the head before."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Final states of N positions, and the tokens that the heads should draft there."""

    states: Tensor  # [N, hidden_size]
    targets: Tensor  # int64 [N, heads]; -1 where the text has ended


def examples_of(texts: Sequence[Answer], num_heads: int) -> Examples:
    """Returns the examples of all answers: from the state that drew a token, head 0 drafts the token behind it."""
    states, targets = [], []
    for text in texts:
        known = len(text.tokens) - 1
        wanted = torch.full((known, num_heads), -1)
        for head in range(num_heads):
            following = text.tokens[1 + head :]
            wanted[: len(following), head] = torch.tensor(following, dtype=torch.int64)
        states.append(text.states[:known])
        targets.append(wanted)
    return Examples(torch.cat(states), torch.cat(targets).to(states[0].device))


class Heads(torch.nn.Module):
    """Heads of one residual block each, before the model's own head."""

    def __init__(self, num_heads: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(num_heads, hidden_size, hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(num_heads, 1, hidden_size))

    def forward(self, states: Tensor) -> Tensor:
        """Returns [heads, N, hidden_size], what the model's head reads, for states [N, hidden_size]."""
        return states + functional.silu(
            torch.baddbmm(self.bias, states.expand(len(self.weight), -1, -1), self.weight.mT)
        )


def train(
    heads: Heads,
    examples: Examples,
    head: Tensor,
    *,
    steps: int,
    batch: int,
    rate: float,
    seconds: float,
    rivals: int,
    dropout: float = 0.0,
) -> None:
    """Trains `heads` for at most `steps` steps of `batch` examples, or until `seconds` have passed.

    `head`: the model's output matrix, [vocab_size, hidden_size]. With `rivals`, a step distinguishes only the ids of
    its batch and as many random ones of the vocabulary. `dropout`: the share of a state's elements that are dropped.
    """
    began = time.monotonic()
    optimizer = torch.optim.AdamW(heads.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    weights = [NEARER**i for i in range(len(heads.weight))]
    for step in range(steps):
        done = max(step / steps, (time.monotonic() - began) / seconds)
        if done >= 1:
            print(f"stopped at step {step}")
            break
        optimizer.param_groups[0]["lr"] = rate * min(1.0, 10 * done + 1 / steps) * (1 + math.cos(math.pi * done)) / 2
        some = torch.randint(0, len(examples.states), (batch,), device=head.device)
        rows, wanted = head, examples.targets[some]
        if rivals:
            others = torch.randint(0, len(head), (rivals,), device=head.device)
            kept = torch.unique(torch.cat((wanted[wanted >= 0], others)))
            rows, wanted = head[kept], torch.where(wanted < 0, -1, torch.searchsorted(kept, wanted))
        outputs = heads(functional.dropout(examples.states[some].float(), dropout)).to(head.dtype)
        losses = [
            functional.cross_entropy((output @ rows.T).float(), wanted[:, i], ignore_index=-1, reduction="sum")
            / (wanted[:, i] >= 0).sum().clamp(min=1)
            for i, output in enumerate(outputs)
        ]
        loss = torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            torch.stack(losses).tolist()  # so that the device keeps up with the clock
        if step % max(1, steps // 10) == 0:
            print(f"step {step}, {time.monotonic() - began:.0f} s: {' '.join(f'{x.item():.3f}' for x in losses)}")


@torch.inference_mode()
def accuracy(heads: Heads, examples: Examples, head: Tensor, batch: int = 1024) -> tuple[list[float], list[float]]:
    """Returns the share of likeliest tokens that are right, by head, and of those right with all heads before."""
    right = []
    for at in range(0, len(examples.states), batch):
        outputs = heads(examples.states[at : at + batch].float()).to(head.dtype)
        likeliest = torch.stack([(output @ head.T).argmax(dim=1) for output in outputs], dim=1)
        right.append(likeliest == examples.targets[at : at + batch])
    known = examples.targets >= 0
    alone = torch.cat(right)
    together = alone.cumprod(dim=1)
    return tuple([(hits * known).sum(dim=0) / known.sum(dim=0)][0].tolist() for hits in (alone, together))  # type: ignore[return-value]


def save(heads: Heads, folder: Path, base_model: str) -> None:
    """Writes the heads in bfloat16, in the layout that `runner_svc.drafting.medusa.checkpoint` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for i, (weight, bias) in enumerate(zip(heads.weight.data, heads.bias.data, strict=True)):
        tensors[f"{i}.0.linear.weight"] = weight.to("cpu", torch.bfloat16).contiguous()
        tensors[f"{i}.0.linear.bias"] = bias[0].to("cpu", torch.bfloat16).contiguous()
    save_file(tensors, folder / HEADS_FILE)
    config = {"base_model_name_or_path": base_model, "medusa_num_heads": len(heads.weight), "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
