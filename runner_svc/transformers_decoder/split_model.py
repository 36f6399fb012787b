"""A causal model of transformers in two parts: up to its last hidden states, and from there to logits.

Every causal class is a base model and a head, and its own forward joins them: caps, scales and shifts of the logits
are in there, differently in each class. So the class's forward runs for both parts. Up to the hidden states, it is left
as the base model returns. For the logits, the base model answers with the hidden states that it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runner_svc.model.errors import UnsupportedModel


class _BaseReturned(Exception):
    def __init__(self, output: Any) -> None:
        self.output = output


class SplitModel:
    """Wraps the base model's forward of `model`, for good: the model itself still works as before."""

    def __init__(self, model: Any) -> None:
        """Raises UnsupportedModel for a model that has no base model of its own."""
        base = getattr(model, model.base_model_prefix, None)
        if not isinstance(base, nn.Module):
            raise UnsupportedModel(f"{type(model).__name__} has no base model {model.base_model_prefix!r}.")
        self._model = model
        self._leaves = False
        self._depth = 0
        self._answer: Any = None
        self._example: Any = None  # an output of the base model
        # Some classes call the decoder within the base model, past it. The first of them to return is the one.
        inner = getattr(base, "decoder", None)
        for module in (base, inner) if isinstance(inner, nn.Module) else (base,):
            module.forward = partial(self._base_forward, module.forward)

    def hidden(self, arguments: dict[str, Any]) -> Tensor:
        """Returns the base model's last hidden states [T, hidden_size] for arguments of the model's forward."""
        self._leaves = True
        try:
            self._model(**arguments)
        except _BaseReturned as returned:
            self._example = returned.output
            hidden: Tensor = returned.output[0][0]
            return hidden
        finally:
            self._leaves = False
        raise UnsupportedModel(f"The forward pass of {type(self._model).__name__} does not call its base model.")

    @property
    def example(self) -> Tensor:
        """Hidden states [T, hidden_size] that `hidden` returned last."""
        hidden: Tensor = self._example[0][0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [L, vocab_size] of L positions that `hidden` returned, [L, hidden_size]."""
        self._answer = self._answer_with(hidden[None])
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        try:
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
        finally:
            self._answer = None
        return logits[0]

    def _answer_with(self, hidden: Tensor) -> Any:
        if isinstance(self._example, tuple):
            return (hidden, *self._example[1:])
        first, *others = self._example.items()
        return type(self._example)(**{first[0]: hidden, **dict(others)})

    def _base_forward(self, forward: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        if self._depth:
            return forward(*positional, **named)
        if self._answer is not None:
            return self._answer
        self._depth += 1
        try:
            output = forward(*positional, **named)
        finally:
            self._depth -= 1
        if self._leaves:
            raise _BaseReturned(output)
        return output
