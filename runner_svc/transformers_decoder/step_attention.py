"""The attention function that transformers' models call, and the step that it serves at the moment.

transformers looks attention up by name (`AttentionInterface`), and the function receives nothing of the step but
queries, keys and values. What else it needs is a `StepAttention` that `serving` makes current for one forward pass of
one thread. Positions and lengths come from there, never from what the model passes.

A pass calls attention once for each layer, in an order that the model's trace recorded (`attention_trace`); the n-th
call is the cache's layer n.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

NAME = "roster"
"""What the attention function and its mask function are registered as."""


class StepAttention(Protocol):
    """Serves the attention calls of one forward pass, in order."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Returns [T, num_heads, value_dim]."""

    def make_mask(self, mask: MaskRequest) -> Tensor | None:
        """Returns what the model passes to the attention function as its mask."""


class AttentionCall:
    """The arguments of one call: queries [T, num_heads, head_dim], keys and values [T, kv_heads, ...]."""

    __slots__ = ("arguments", "keys", "mask", "module", "queries", "values")

    def __init__(
        self,
        module: torch.nn.Module,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        arguments: dict[str, Any],
    ) -> None:
        self.module = module
        self.queries = queries
        self.keys = keys
        self.values = values
        self.mask = mask
        self.arguments = arguments


class MaskRequest:
    """What a model asks a mask function for: a predicate over indices, and the window that it was made from."""

    __slots__ = ("function", "window")

    def __init__(self, function: Any, window: int | None) -> None:
        self.function = function
        self.window = window


class _Current(threading.local):
    step: StepAttention | None = None


_current = _Current()


@contextmanager
def serving(step: StepAttention) -> Iterator[None]:
    """Makes `step` serve the calls of this thread."""
    before, _current.step = _current.step, step
    try:
        yield
    finally:
        _current.step = before


@contextmanager
def without_packing() -> Iterator[None]:
    """Keeps transformers from looking for packed rows in the positions: it would wait for the GPU.

    The masks that it would make from them are never read.
    """
    from transformers import masking_utils

    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = before


def register() -> None:
    """Registers both functions with transformers under NAME; again is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _serving_step() -> StepAttention:
    if _current.step is None:
        raise RuntimeError("the attention function was called outside of a step")
    return _current.step


# transformers inspects the fourth parameter's name.
def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Takes query [1, num_heads, T, head_dim] and key and value [1, kv_heads, T, ...]; returns [1, T, num_heads, D]."""
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    call = AttentionCall(module, queries, keys, values, attention_mask, arguments)
    return _serving_step().attend(call).unsqueeze(0), None


def _mask(*, mask_function: Any = None, local_size: int | None = None, **_: Any) -> Tensor | None:
    return _serving_step().make_mask(MaskRequest(mask_function, local_size))
