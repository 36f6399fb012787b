"""Serves a forward pass of a transformers model from the paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.decoder.cpu_decoder import LayerAttention
from runner_svc.interface.kv_cache import KVCache
from runner_svc.transformers_decoder.attention_trace import TracedCall
from runner_svc.transformers_decoder.step_attention import AttentionCall, MaskRequest


class PagedStep:
    """Implements `StepAttention` for one pass: each call writes its keys and values, then attends over the cache.

    Keys and values that are narrower than the cache's head are padded with zeros, which change no score and no sum.
    Those of a layer with fewer key-value heads than the cache are stored once for each group of queries that reads it.
    """

    def __init__(
        self, calls: Sequence[TracedCall], cache: KVCache, slot_mapping: Tensor, attention: LayerAttention
    ) -> None:
        """`slot_mapping`, int64 [T]: where each position's keys and values are written."""
        self._calls = calls
        self._cache = cache
        self._slot_mapping = slot_mapping
        self._attention = attention
        self._num_kv_heads, self._head_dim = cache.data.shape[-2:]
        self._next = 0
        self._masks: dict[int | None, Tensor] = {}  # by window

    def make_mask(self, mask: MaskRequest) -> Tensor:
        """Returns a mask of zeros, which stands for the window: the trace knows that of each call."""
        if mask.window not in self._masks:
            tokens = len(self._slot_mapping)
            self._masks[mask.window] = torch.zeros(1, device=self._slot_mapping.device).expand(1, 1, tokens, tokens)
        return self._masks[mask.window]

    def attend(self, call: AttentionCall) -> Tensor:
        """Raises RuntimeError for a call that is not the trace's."""
        index = self._next
        if index >= len(self._calls):
            raise RuntimeError(f"the model called attention more than {len(self._calls)} times in a pass")
        self._next = index + 1
        traced = self._calls[index]
        self._compare(call, traced)
        self._cache.write(index, self._flat(call.keys), self._flat(call.values), self._slot_mapping)
        attended = self._attention(index, self._padded(call.queries)).view(len(call.queries), traced.num_heads, -1)
        return attended[..., : traced.value_dim]

    def _compare(self, call: AttentionCall, traced: TracedCall) -> None:
        """Raises RuntimeError where the model asks for other attention than in its trace: it would be ignored."""
        mask = self._masks.get(traced.layer.window)
        if mask is None or call.mask is None or call.mask.data_ptr() != mask.data_ptr():
            raise RuntimeError(f"layer {self._next - 1} has another mask than when the model was traced")
        for name, known in (("scaling", traced.layer.scale), ("softcap", traced.layer.soft_cap)):
            value = call.arguments.get(name)
            if isinstance(value, int | float) and value != known:
                raise RuntimeError(f"layer {self._next - 1} passes {name} {value}, not {known} as in its trace")

    def finish(self) -> None:
        """Raises RuntimeError if the pass made fewer calls than the trace."""
        if self._next != len(self._calls):
            raise RuntimeError(f"the model called attention {self._next} times in a pass, not {len(self._calls)} times")

    def _flat(self, heads: Tensor) -> Tensor:
        copies = self._num_kv_heads // heads.shape[1]
        if copies > 1:
            heads = heads.repeat_interleave(copies, dim=1)
        return self._padded(heads).reshape(len(heads), -1)

    def _padded(self, heads: Tensor) -> Tensor:
        missing = self._head_dim - heads.shape[-1]
        return functional.pad(heads, (0, missing)) if missing else heads
