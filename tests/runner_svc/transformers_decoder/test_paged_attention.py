"""A pass that calls attention otherwise than the model's trace is an error, not an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.interface.kv_cache import KVCache
from runner_svc.transformers_decoder.attention_trace import TracedCall
from runner_svc.transformers_decoder.paged_attention import PagedStep
from runner_svc.transformers_decoder.step_attention import AttentionCall, MaskRequest

TOKENS = 3


class Heads:
    num_layers, num_kv_heads, head_dim = 1, 4, 8


def step(layer: AttentionLayer | None = None, seen: list[Tensor] | None = None) -> PagedStep:
    cache = KVCache(Heads(), 2, 4, torch.float32, torch.device("cpu"))
    traced = TracedCall(layer or AttentionLayer(scale=0.5), 4, 2, 8, 6, 0)

    def attention(index: int, queries: Tensor) -> Tensor:
        if seen is not None:
            seen.append(cache.data[index].clone())
        return queries.reshape(len(queries), -1)

    return PagedStep([traced], cache, torch.tensor([4, 5, 9]), attention)


def call(served: PagedStep, mask: Any = "made", **arguments: Any) -> AttentionCall:
    made = served.make_mask(MaskRequest(None, None)) if mask == "made" else mask
    queries, keys, values = (torch.randn(TOKENS, *shape) for shape in ((4, 8), (2, 8), (2, 6)))
    return AttentionCall(torch.nn.Identity(), queries, keys, values, made, {"scaling": 0.5, **arguments})


def test_keys_and_values_are_padded_and_repeated_into_the_cache() -> None:
    seen: list[Tensor] = []
    served = step(seen=seen)
    one = call(served)
    assert torch.equal(served.attend(one), one.queries[..., :6])
    served.finish()
    (cached,) = seen
    keys, values = cached.view(2, 12, 4, 8)[:, [4, 5, 9]]
    assert torch.equal(keys, one.keys.repeat_interleave(2, dim=1))
    assert torch.equal(values[..., :6], one.values.repeat_interleave(2, dim=1)) and not values[..., 6:].any()


WRONG: dict[str, tuple[Callable[[PagedStep], AttentionCall], str]] = {
    "no mask": (lambda served: call(served, None), "another mask"),
    "a mask of its own": (lambda served: call(served, torch.zeros(1, 1, TOKENS, TOKENS)), "another mask"),
    "a window": (lambda served: call(served, served.make_mask(MaskRequest(None, 7))), "another mask"),
    "scaling": (lambda served: call(served, scaling=0.25), "passes scaling 0.25, not 0.5"),
    "a cap": (lambda served: call(served, softcap=20.0), "passes softcap 20.0, not None"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_call_that_is_not_the_traces_is_an_error(what: str) -> None:
    make, says = WRONG[what]
    served = step()
    with pytest.raises(RuntimeError, match=says):
        served.attend(make(served))


def test_a_pass_with_more_or_fewer_calls_is_an_error() -> None:
    served = step()
    with pytest.raises(RuntimeError, match="0 times in a pass, not 1"):
        served.finish()
    served.attend(call(served))
    with pytest.raises(RuntimeError, match="more than 1 times"):
        served.attend(call(served))
