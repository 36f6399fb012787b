"""Variants of products whose blocks share tiles, and what they leave to others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from runner_svc.cuda.products import split_product
from runner_svc.cuda.products.by_class import OwnMethods
from runner_svc.cuda.products.split_product import SplitProduct
from runner_svc.cuda.products.split_variant import COLUMNS, SPLITS, SplitVariant
from runner_svc.weights.plain_matrix import PlainMatrix


@pytest.mark.parametrize("consumers", COLUMNS)
@pytest.mark.parametrize("split", SPLITS)
def test_a_block_fits_in_shared_memory_and_its_sums_in_its_stages(consumers: int, split: int) -> None:
    for columns in COLUMNS[consumers]:
        variant = SplitVariant(columns, split, consumers)
        assert variant.stages >= 4
        assert variant.shared_bytes <= 227 << 10
        assert variant.stages * (variant.rows + columns) * 128 >= variant.rows * (columns + 8) * 4


@pytest.mark.parametrize(
    ("rows", "outputs", "width", "expected", "blocks"),
    [
        (256, 2048, 4096, SplitVariant(64, 2), 128),
        (256, 4096, 4096, SplitVariant(64, 1), 128),
        (256, 4096, 14336, SplitVariant(128, 2), 128),
        (256, 6144, 4096, SplitVariant(96, 1), 128),
        (384, 4096, 4096, SplitVariant(128, 2, 3), 128),
        (384, 6144, 4096, SplitVariant(96, 1, 3), 128),
    ],
)
def test_one_round_of_blocks(rows: int, outputs: int, width: int, expected: SplitVariant, blocks: int) -> None:
    assert SplitVariant.choose(132, rows, outputs, width) == expected
    assert expected.blocks(rows, outputs) == blocks


@pytest.mark.parametrize("width", [2048, 4096, 14336])
@pytest.mark.parametrize("outputs", [72, 1000, 2048, 4096, 6144])
def test_what_a_row_gets_does_not_depend_on_the_number_of_rows(outputs: int, width: int) -> None:
    """Sums in other parts have other bits."""
    for fewest, most in ((129, 256), (257, 384)):
        splits = {SplitVariant.choose(132, rows, outputs, width).split for rows in range(fewest, most + 1)}
        assert len(splits) == 1


def test_odd_numbers_of_steps_are_not_split() -> None:
    assert SplitVariant.choose(132, 256, 2048, 64 * 9).split == 1


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Variants that were launched."""
    found: list[str] = []

    def kernel(module: str, *arguments: object, **more: object) -> Callable[..., None]:
        return lambda *values: found.append(module)

    monkeypatch.setattr(split_product, "Kernel", kernel)
    monkeypatch.setattr(split_product, "load", lambda name, defines: f"{defines['COLUMNS']} / {defines['SPLIT']}")
    monkeypatch.setattr(split_product, "num_multiprocessors", lambda: 132)
    monkeypatch.setattr(split_product, "heads_map", lambda *arguments, **more: b"")
    return found


def test_what_does_not_fit_is_left_to_the_others(launched: list[str]) -> None:
    product = SplitProduct(torch.bfloat16, OwnMethods())

    def multiply(rows: int, bias: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> int:
        launched.clear()
        x, weight = torch.zeros(rows, 128, dtype=dtype), torch.zeros(256, 128, dtype=dtype)
        product.multiply(0, x, PlainMatrix(weight), bias, torch.empty(rows, 256, dtype=dtype))
        return len(launched)

    assert multiply(384) == multiply(129) == 1
    assert multiply(128) == multiply(385) == multiply(200, dtype=torch.float32) == 0
    assert multiply(200, bias=torch.zeros(256, dtype=torch.bfloat16)) == 0
    total = torch.ones(200, 256, dtype=torch.bfloat16)
    adding = torch.zeros(200, 128, dtype=torch.bfloat16), PlainMatrix(torch.zeros(256, 128, dtype=torch.bfloat16))
    for factor, number in ((1.0, 1), (0.5, 0)):
        launched.clear()
        product.add(0, *adding, None, total, factor)
        assert len(launched) == number
    assert not product.fits(PlainMatrix(torch.zeros(256, 100, dtype=torch.bfloat16)), 200)
