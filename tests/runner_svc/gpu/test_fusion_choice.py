"""The choice of a step's fusions by the timed sizes."""

from __future__ import annotations

import pytest

from runner_svc.decoder.fusions import Activating, Adding, Fusions
from runner_svc.gpu.fusion_choice import FusionChoice, timed_positions

PLAIN, FUSED = Fusions(), Fusions(Adding.PRODUCTS, Activating.PRODUCT)


@pytest.mark.parametrize(
    ("max_step_tokens", "sizes"),
    [(40, [40]), (64, [64]), (270, [64, 256]), (400, [64, 256, 288, 384]), (8192, [64, 256, 288, 384, 512, 1024])],
)
def test_timed_sizes_are_within_those_of_steps(max_step_tokens: int, sizes: list[int]) -> None:
    assert timed_positions(max_step_tokens) == sizes
    with_experts = [size for size in (64, 256, 1024, 2048, 4096) if size <= max_step_tokens] or sizes
    assert timed_positions(max_step_tokens, has_experts=True) == with_experts


def test_a_step_uses_the_choice_of_the_largest_size_below() -> None:
    choice = FusionChoice(
        {256: {PLAIN: 2.0, FUSED: 1.0}, 1024: {PLAIN: 3.0, FUSED: 4.0}, 4096: {PLAIN: 6.0, FUSED: 5.0}}
    )
    chosen = {size: choice(size) for size in (1, 256, 1023, 1024, 4095, 4096, 9000)}
    assert [size for size, fusions in chosen.items() if fusions == PLAIN] == [1024, 4095]


def test_a_large_step_prefers_more_fusions_even_if_slightly_slower() -> None:
    adding, activating = Fusions(Adding.PRODUCTS), Fusions(activating=Activating.PRODUCT)
    close = {PLAIN: 1.0, adding: 1.01, activating: 1.005, FUSED: 1.02}
    assert FusionChoice({256: close, 1024: close})(1023) == PLAIN
    assert FusionChoice({256: close, 1024: close})(1024) == FUSED
    assert FusionChoice({1024: close | {FUSED: 1.04}})(5000) == activating


def test_only_fusions_of_some_size_are_compiled() -> None:
    never = FusionChoice({64: {PLAIN: 1.0, FUSED: 1.2}, 256: {PLAIN: 1.0, FUSED: 1.1}})
    late = FusionChoice({64: {PLAIN: 1.0, FUSED: 1.2}, 1024: {PLAIN: 1.0, FUSED: 1.02}})
    assert [choice.ever(Activating.PRODUCT) for choice in (never, late, FusionChoice())] == [False, True, False]


def test_nothing_is_fused_without_times() -> None:
    assert FusionChoice()(1000) == PLAIN
