"""The attention calls of a forward pass are recorded, and what the paged attention lacks is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from runner_svc.model.errors import UnsupportedModel
from runner_svc.transformers_decoder import step_attention
from runner_svc.transformers_decoder.attention_trace import TRACED_TOKENS, TracedCall, probe_window, trace
from runner_svc.transformers_decoder.step_attention import MaskRequest

WINDOW = 5


def causal(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def windowed(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & (key > query - WINDOW)


def chunked(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & (key // WINDOW == query // WINDOW)


def bidirectional(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
    return key >= 0


def prefix(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) | ((key < 12) & (query < 12))


def call(heads: int = 4, kv_heads: int = 2, dims: tuple[int, int] = (16, 16), **arguments: Any) -> Tensor:
    """Calls attention as a model does; a `mask` other than None is what its mask function evaluates."""
    mask = arguments.pop("mask", causal)
    window = arguments.pop("window", None)
    made = None if mask is None else step_attention._mask(mask_function=mask, local_size=window)
    if arguments.pop("changes", False) and made is not None:
        made = made + 1
    query = torch.zeros(1, heads, TRACED_TOKENS, dims[0])
    key, value = (torch.zeros(1, kv_heads, arguments.pop("keys", TRACED_TOKENS), dim) for dim in dims)
    output, _ = step_attention._attention(torch.nn.Identity(), query, key, value, made, **arguments)
    assert output.shape == (1, TRACED_TOKENS, heads, dims[1])
    return output


def traced(*calls: dict[str, Any]) -> list[TracedCall]:
    return trace(lambda tokens, positions: [call(**one) for one in calls])


def test_scale_cap_sinks_window_and_sizes_are_recorded() -> None:
    sinks = torch.arange(4.0)
    first, second = traced(
        {"scaling": 0.5, "softcap": 30.0, "s_aux": sinks, "mask": windowed, "window": WINDOW},
        {"dims": (24, 16), "dropout": 0.0, "position_ids": None, "use_cache": False},
    )
    assert (first.layer.scale, first.layer.soft_cap, first.layer.window) == (0.5, 30.0, WINDOW)
    assert first.layer.sinks is not None and first.layer.sinks.tolist() == sinks.tolist()
    assert (second.layer.scale, second.layer.soft_cap, second.layer.window) == (24**-0.5, None, None)
    assert (second.num_heads, second.num_kv_heads, second.key_dim, second.value_dim) == (4, 2, 24, 16)


def test_layers_may_have_fewer_key_value_heads_than_others() -> None:
    assert [one.num_kv_heads for one in traced({"kv_heads": 1}, {"kv_heads": 4})] == [1, 4]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no mask": ({"mask": None}, "has no mask"),
    "a mask of its own": ({"changes": True}, "changes its mask"),
    "both ways": ({"mask": bidirectional}, "not causal"),
    "a prefix seen by all": ({"mask": prefix}, "not causal"),
    "chunks": ({"mask": chunked, "window": WINDOW}, f"not causal with a window of {WINDOW}"),
    "an undeclared window": ({"mask": windowed}, "not causal with no window"),
    "a bias": ({"position_bias": torch.zeros(1)}, "passes 'position_bias'"),
    "other keys": ({"keys": 7}, "attends to 7 keys"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused(what: str) -> None:
    arguments, says = REFUSED[what]
    with pytest.raises(UnsupportedModel, match=says):
        traced({}, arguments)


def test_unlike_query_heads_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="4 and 2, 8 and 2"):
        traced({}, {"heads": 8})


def test_a_pass_without_attention_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="never calls the attention function"):
        traced()


def test_a_mask_over_a_tensor_of_the_batch_is_refused() -> None:
    kinds = torch.zeros(3)
    with pytest.raises(UnsupportedModel, match="depends on more than positions"):
        probe_window(MaskRequest(lambda batch, head, query, key: (key <= query) & (kinds[query] == kinds[key]), None))


def test_attention_outside_of_a_step_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="outside of a step"):
        call()
