"""A model whose packed batch differs from what it computes alone is refused with the place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from runner_svc.model.errors import UnsupportedModel
from runner_svc.transformers_decoder import start_check
from runner_svc.transformers_decoder.cpu_check import check_on_cpu
from runner_svc.transformers_decoder.decoder import TransformersDecoder
from tests.support.tiny_models import SIZES


def decoder(**others: Any) -> TransformersDecoder:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, **others})
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    return TransformersDecoder(model)


def replace_attention(served: TransformersDecoder, change: Callable[..., Any]) -> None:
    """Puts `change` before the attention of each layer, in steps over the paged cache only."""
    for layer in served.model.model.layers:
        own = layer.self_attn.forward

        def forward(*positional: Any, own: Any = own, **named: Any) -> Any:
            if served.model.config._attn_implementation == "roster":
                named = change(named)
            return own(*positional, **named)

        layer.self_attn.forward = forward


def test_an_honest_model_passes() -> None:
    check_on_cpu(decoder())


def test_a_model_that_ignores_positions_is_refused() -> None:
    served = decoder()

    def without_rotation(named: dict[str, Any]) -> dict[str, Any]:
        cos, sin = named["position_embeddings"]
        return {**named, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}

    replace_attention(served, without_rotation)
    with pytest.raises(UnsupportedModel, match=r"the logits of position 1 of row 0 \(11 tokens\) differ"):
        check_on_cpu(served)


def test_a_model_whose_rows_see_each_other_is_refused() -> None:
    """It shifts a step's hidden states by their mean, which is another one where a row is alone."""
    served = decoder()
    own = served.model.model.norm.forward
    served.model.model.norm.forward = lambda hidden: own(hidden + hidden.mean(1, keepdim=True))
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM is not served"):
        check_on_cpu(served)


def test_a_model_whose_generate_goes_another_way_is_refused() -> None:
    """RoBERTa's positions begin behind its padding token in a forward pass, and at 0 in `generate`."""
    sizes = {key: value for key, value in SIZES.items() if "key_value" not in key}
    config = transformers.RobertaConfig(**{**sizes, "is_decoder": True, "pad_token_id": 1})
    served = TransformersDecoder(transformers.RobertaForCausalLM(config).eval())
    with pytest.raises(UnsupportedModel, match="numbers positions from another number than 0"):
        check_on_cpu(served)


def test_numbers_that_are_not_finite_are_a_difference() -> None:
    served = decoder()
    own = served.logits
    served.logits = lambda hidden: own(hidden) * torch.nan  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModel, match="differ by nan"):
        check_on_cpu(served)


def test_the_plan_of_the_check_has_chunks_decodes_and_a_prefix_hit() -> None:
    done = [0, 0, 0, start_check.SMALL_BLOCKS.shared]
    kinds = set()
    for extents in start_check.SMALL_BLOCKS.steps:
        for row, start, count in extents:
            assert start == done[row]
            done[row] += count
            kinds.add((count > 1, start > 0))
    assert tuple(done) == start_check.SMALL_BLOCKS.lengths and len(kinds) >= 3
    tables = start_check.SMALL_BLOCKS.block_tables()
    assert tables[3][:2] == tables[2][:2] and not set(tables[3][2:]) & set(tables[2])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_check_leaves_the_attention_as_it_was(implementation: str, tmp_path: Path) -> None:
    served = decoder()
    start_check._alone(served.model, start_check._rows(start_check.SMALL_BLOCKS, 100, 0)[0], implementation)
    assert served.model.config._attn_implementation == "roster"
