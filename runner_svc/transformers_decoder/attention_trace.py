"""What a model asks of attention, recorded from one forward pass: a `TracedCall` for each of its calls, in order.

Everything that the paged attention lacks is refused here by name: masks that are neither causal nor a causal sliding
window, arguments that change the scores, sizes that differ between calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.model.errors import UnsupportedModel
from runner_svc.transformers_decoder.step_attention import AttentionCall, MaskRequest, serving

TRACED_TOKENS = 4
_HARMLESS_ARGUMENTS = {
    "cache_position": "positions come from the step",
    "dropout": "0 in evaluation",
    "is_causal": "the mask decides",
    "logits_to_keep": "of the model's head",
    "output_attentions": "weights are not returned",
    "output_hidden_states": "of the model's own return value",
    "output_router_logits": "of the model's own return value",
    "position_ids": "positions come from the step",
    "return_dict": "of the model's own return value",
    "sliding_window": "the mask decides",
    "use_cache": "the paged cache is always used",
}
"""Arguments of the attention function that are not read, with the reason."""
_READ_ARGUMENTS = {"scaling", "softcap", "s_aux"}


@dataclass(frozen=True, slots=True, eq=False)
class TracedCall:
    """One attention call of a forward pass."""

    layer: AttentionLayer
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    index: int | None
    """The layer's number in the model, where its module has one."""


@dataclass(slots=True, eq=False)
class _Trace:
    """Implements `StepAttention`: answers with zeros, and records."""

    device: torch.device | str
    calls: list[TracedCall] = field(default_factory=list)
    masks: dict[int, tuple[Tensor, int | None]] = field(default_factory=dict)

    def make_mask(self, mask: MaskRequest) -> Tensor:
        window = probe_window(mask)
        made = torch.zeros(1, 1, TRACED_TOKENS, TRACED_TOKENS, device=self.device)
        self.masks[made.data_ptr()] = made, window
        return made

    def attend(self, call: AttentionCall) -> Tensor:
        where = f"attention call {len(self.calls)} ({type(call.module).__name__})"
        for name, value in call.arguments.items():
            if name not in _HARMLESS_ARGUMENTS and name not in _READ_ARGUMENTS and value is not None:
                raise UnsupportedModel(f"{where} passes {name!r}, which paged attention does not have.")
        scale = call.arguments.get("scaling")
        sinks = call.arguments.get("s_aux")
        tokens, num_heads, key_dim = call.queries.shape
        if call.keys.shape[0] != tokens:
            raise UnsupportedModel(f"{where} attends to {call.keys.shape[0]} keys of {tokens} positions.")
        index = getattr(call.module, "layer_idx", None)
        layer = AttentionLayer(
            window=self._window(call.mask, where),
            scale=key_dim**-0.5 if scale is None else float(scale),
            soft_cap=call.arguments.get("softcap"),
            sinks=None if sinks is None else sinks.detach().float().reshape(-1),
        )
        self.calls.append(TracedCall(layer, num_heads, call.keys.shape[1], key_dim, call.values.shape[-1], index))
        return call.queries.new_zeros(tokens, num_heads, call.values.shape[-1])

    def _window(self, mask: Tensor | None, where: str) -> int | None:
        if mask is None:
            raise UnsupportedModel(f"{where} has no mask, so that its positions would see later ones.")
        known = self.masks.get(mask.data_ptr())
        if known is None or mask.shape != known[0].shape:
            raise UnsupportedModel(f"{where} changes its mask, which paged attention can't follow.")
        return known[1]


def trace(forward: Callable[[Tensor, Tensor], Any], device: torch.device | str = "cpu") -> list[TracedCall]:
    """Returns the attention calls of `forward`, which takes int64 token ids and positions [T] on `device`.

    Raises UnsupportedModel for what paged attention lacks.
    """
    recorded = _Trace(device)
    positions = torch.arange(TRACED_TOKENS, device=device)
    with serving(recorded), torch.inference_mode():
        forward(torch.zeros_like(positions), positions)
    calls = recorded.calls
    if not calls:
        raise UnsupportedModel("its forward pass never calls the attention function, so that nothing would be cached.")
    shapes = {(call.num_heads, call.num_kv_heads) for call in calls}
    most = max(kv_heads for _, kv_heads in shapes)
    if len({heads for heads, _ in shapes}) > 1 or any(most % kv_heads or heads % most for heads, kv_heads in shapes):
        raise UnsupportedModel(
            "its layers differ in their numbers of query and key-value heads: "
            f"{', '.join(f'{heads} and {kv_heads}' for heads, kv_heads in sorted(shapes))}."
        )
    return calls


def probe_window(mask: MaskRequest) -> int | None:
    """Returns the sliding window of a causal mask; None if every earlier position is seen.

    Raises UnsupportedModel for another mask: its predicate is evaluated at chosen pairs of positions.
    """
    window = mask.window
    far = 3 * window + 5 if window else 1 << 20
    queries = sorted({0, 1, 2, 7, 63, 1000, far, far + 1, 2 * far})
    for query in queries:
        keys = {0, 1, query // 2, query - 1, query, query + 1, query + 9}
        if window:
            keys |= {query - window - 1, query - window, query - window + 1}
        for key in sorted(keys):
            if key < 0:
                continue
            expected = key <= query and (window is None or key > query - window)
            if _sees(mask.function, query, key) is not expected:
                raise UnsupportedModel(
                    f"its mask is not causal with {'no window' if window is None else f'a window of {window}'}: "
                    f"whether position {query} sees position {key} differs."
                )
    return window


def _sees(function: Any, query: int, key: int) -> bool:
    zero = torch.tensor(0)
    try:
        return bool(function(zero, zero, torch.tensor(query), torch.tensor(key)))
    except Exception as error:  # a predicate over a tensor of this batch, say
        raise UnsupportedModel(f"its mask depends on more than positions ({type(error).__name__}).") from error
