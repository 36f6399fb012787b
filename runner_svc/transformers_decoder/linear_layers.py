"""Swaps the linear layers of a transformers model for `arithmetic.linear.Linear`, the product of both decoders.

Only plain `torch.nn.Linear` layers are swapped, and of these only such as a pass calls: a layer whose weight is read
past its call (absorbed projections, say) stays as it is, and so does one of a part that text does not reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from runner_svc.arithmetic.linear import Linear
from runner_svc.decoder.cpu_decoder import MAX_PLAIN_WEIGHTS
from runner_svc.weights.linear_weights import LinearWeights


class ServedLinear(nn.Module):
    """A linear layer in the format that its product is fastest in."""

    def __init__(self, linear: nn.Linear, *, keep_plain: bool) -> None:
        """Takes over weight and bias; see `Linear` for `keep_plain`."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        bias = None if linear.bias is None else linear.bias.data
        self._product = Linear(LinearWeights.plain(linear.weight.data, bias), keep_plain=keep_plain)

    def forward(self, x: Tensor) -> Tensor:
        """Takes [..., in_features]; returns [..., out_features]."""
        return self._product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


class _WatchedLinear(nn.Linear):
    """Stands for `torch.nn.Linear` while a pass is watched."""

    calls: set[nn.Module]
    reads: set[nn.Module]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Notes that it was read from outside."""
        self.reads.add(self)
        return self._parameters["weight"]  # type: ignore[return-value]

    def forward(self, input: Tensor) -> Tensor:
        """As the class that it stands for."""
        self.calls.add(self)
        parameters = self._parameters
        return functional.linear(input, parameters["weight"], parameters["bias"])  # type: ignore[arg-type]


@contextmanager
def watched_layers(model: nn.Module) -> Iterator[set[nn.Module]]:
    """Yields a set that gets, after the block, the linear layers that it called and whose weights nothing else read."""
    calls: set[nn.Module] = set()
    reads: set[nn.Module] = set()
    watched = type("_Watched", (_WatchedLinear,), {"calls": calls, "reads": reads})
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    found: set[nn.Module] = set()
    for layer in layers:
        layer.__class__ = watched
    try:
        yield found
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear
    found |= calls - reads
    calls.clear()  # which the class refers to
    reads.clear()


def swap_linear_layers(model: nn.Module, layers: set[nn.Module]) -> None:
    """Swaps `layers` one after another and empties the set, so that a second copy of the model never exists."""
    keep_plain = sum(layer.weight.numel() for layer in layers if isinstance(layer, nn.Linear)) <= MAX_PLAIN_WEIGHTS
    places: dict[int, list[tuple[nn.Module, str]]] = {}  # a layer may be in two
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child in layers:
                places.setdefault(id(child), []).append((parent, name))
    layers.clear()
    for found in places.values():
        layer = getattr(*found[0])
        with torch.no_grad():
            served = ServedLinear(layer, keep_plain=keep_plain)
        for parent, name in found:
            setattr(parent, name, served)
        del layer
