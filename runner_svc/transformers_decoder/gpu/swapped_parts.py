"""Swaps parts of a transformers model on a GPU for Roster's kernels, where they are recognised and compute the same.

| part | recognised by | becomes |
| --- | --- | --- |
| RMSNorm | a weight, an epsilon, and its own numbers on random rows | one kernel |
| gated MLP | gate_proj, up_proj, down_proj, and its own numbers | one product of gate and up, one activation |
| head | the output embeddings, a plain linear layer | a product whose sums stay float32 |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from runner_svc.interface.layer_launchers import NormLauncher
from runner_svc.interface.products.expert_launchers import ActivationLauncher

_ROWS = 3
_ACTIVATIONS = {"silu": functional.silu}
"""Functions of `act_fn` by the kernel's name; another keeps its MLP as it is."""


class SwapLaunchers(Protocol):
    """Makes the kernels that parts are swapped for. Each raises ValueError for a size that it does not support."""

    def norm(self, size: int, eps: float) -> NormLauncher: ...

    def activation(self, size: int, name: str) -> ActivationLauncher: ...


class _Norm(nn.Module):
    """RMSNorm of the last dimension by one kernel."""

    def __init__(self, weight: Tensor, launcher: NormLauncher, stream: Callable[[], int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._launcher = launcher
        self._stream = stream

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Takes and returns [..., size]."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        self._launcher.norm(self._stream(), rows, self.weight, out)
        return out.view(hidden_states.shape)


class _GatedMlp(nn.Module):
    """activation(gate) * up, then down, of a model's own three matrices."""

    def __init__(self, mlp: Any, launcher: ActivationLauncher, stream: Callable[[], int]) -> None:
        super().__init__()
        gate, up = mlp.gate_proj, mlp.up_proj
        self.gate_up = torch.cat((gate.weight.data, up.weight.data))
        width = gate.out_features
        gate.weight.data, up.weight.data = self.gate_up[:width], self.gate_up[width:]  # no second copy
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = gate, up, mlp.down_proj, mlp.act_fn
        self._launcher = launcher
        self._stream = stream

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns [..., hidden_size]."""
        gate_up = functional.linear(x.reshape(-1, x.shape[-1]), self.gate_up)
        activated = gate_up.new_empty(len(gate_up), gate_up.shape[-1] // 2)
        self._launcher(self._stream(), gate_up, activated)
        out: Tensor = self.down_proj(activated)
        return out.view(*x.shape[:-1], -1)


class _Head(nn.Module):
    """The product with the output embeddings, whose sums stay float32: rounding them to 16 bits would make ties."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Takes [..., hidden_size]; returns float32 [..., vocab_size]."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        out = torch.empty(len(rows), len(self.weight), dtype=torch.float32, device=rows.device)
        torch.mm(rows, self.weight.t(), out_dtype=torch.float32, out=out)
        return out.view(*hidden_states.shape[:-1], -1)


@torch.inference_mode()
def swap_parts(model: nn.Module, launchers: SwapLaunchers, stream: Callable[[], int]) -> dict[str, int]:
    """Swaps what is recognised; returns how many parts of each kind were."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    counts = {"norms": 0, "MLPs": 0, "head": 0}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (norm := _norm_of(child, launchers, stream)) is not None:
                counts["norms"] += 1
                setattr(parent, name, norm)
            elif (mlp := _mlp_of(child, launchers, stream)) is not None:
                counts["MLPs"] += 1
                setattr(parent, name, mlp)
            elif child is head and type(child) is nn.Linear and child.bias is None and child.weight.is_cuda:
                counts["head"] += 1
                setattr(parent, name, _Head(child))
    return counts


def _norm_of(module: nn.Module, launchers: SwapLaunchers, stream: Callable[[], int]) -> _Norm | None:
    """Returns the kernel's module for an RMSNorm, with the weight or with 1 + weight; None for another module."""
    parameters = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1 or not isinstance(eps, float):
        return None
    weight = parameters["weight"].data
    x = torch.randn(_ROWS, len(weight), dtype=weight.dtype, device=weight.device) * 3
    own = _own_values(module, x)
    if own is None:
        return None
    for candidate in (weight, (weight.float() + 1).to(weight.dtype)):
        if torch.equal(candidate.float(), weight.float()) or torch.equal((candidate.float() - 1), weight.float()):
            expected = functional.rms_norm(x.float(), x.shape[-1:], candidate.float(), eps)
            if _alike(own, expected):
                try:
                    return _Norm(candidate, launchers.norm(len(weight), eps), stream)
                except ValueError:
                    return None
    return None


def _mlp_of(module: nn.Module, launchers: SwapLaunchers, stream: Callable[[], int]) -> _GatedMlp | None:
    children = dict(module.named_children())
    if not {"gate_proj", "up_proj", "down_proj"} <= children.keys() or len(list(module.parameters())) != 3:
        return None
    gate, up, down = (children[name] for name in ("gate_proj", "up_proj", "down_proj"))
    if any(type(each) is not nn.Linear or each.bias is not None for each in (gate, up, down)):
        return None
    assert isinstance(gate, nn.Linear) and isinstance(up, nn.Linear) and isinstance(down, nn.Linear)
    x = torch.randn(_ROWS, gate.in_features, dtype=gate.weight.dtype, device=gate.weight.device)
    own = _own_values(module, x)
    if own is None or gate.weight.shape != up.weight.shape:
        return None
    for name, function in _ACTIVATIONS.items():
        if _alike(own, down(function(gate(x)) * up(x)).float()):
            try:
                return _GatedMlp(module, launchers.activation(gate.out_features, name), stream)
            except ValueError:
                return None
    return None


def _own_values(module: nn.Module, x: Tensor) -> Tensor | None:
    """Returns the module's own output for x [rows, size] as float32, or None if it does not take that."""
    try:
        own = module(x)
    except Exception:
        return None
    return own.float() if isinstance(own, Tensor) and own.shape[0] == len(x) else None


def _alike(own: Tensor, expected: Tensor) -> bool:
    """Whether they differ by rounding to 16 bits alone."""
    return own.shape == expected.shape and bool(
        ((own - expected).abs() <= 0.02 * expected.abs() + 0.01 * expected.abs().mean()).all()
    )
