"""Which of the timed sizes a step goes by."""

from __future__ import annotations

import pytest

from runner_svc.adding_choice import AddingChoice, timed_positions
from runner_svc.model.cuda_decoder import Adding

NORMS, PRODUCTS = Adding.NORMS, Adding.PRODUCTS


@pytest.mark.parametrize(
    ("max_step_tokens", "sizes"),
    [(40, [40]), (256, [256]), (300, [256]), (2048, [256, 1024]), (8192, [256, 1024, 4096])],
)
def test_sizes_are_those_that_steps_may_have(max_step_tokens: int, sizes: list[int]) -> None:
    assert timed_positions(max_step_tokens) == sizes


def test_a_step_goes_by_the_largest_size_below_it() -> None:
    choice = AddingChoice(
        {256: {NORMS: 2.0, PRODUCTS: 1.0}, 1024: {NORMS: 3.0, PRODUCTS: 4.0}, 4096: {NORMS: 6.0, PRODUCTS: 5.0}}
    )
    chosen = {size: choice(size) for size in (1, 256, 1023, 1024, 4095, 4096, 9000)}
    assert [size for size, adding in chosen.items() if adding is NORMS] == [1024, 4095]


def test_norms_add_before_anything_was_timed() -> None:
    assert AddingChoice()(1000) is NORMS
