"""Products of one to four hundred rows on a Hopper GPU, against float64 torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runner_svc.weights.plain_matrix import PlainMatrix

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.module import is_hopper, num_multiprocessors
from runner_svc.cuda.products.by_class import OwnMethods
from runner_svc.cuda.products.split_product import SplitProduct  # imports CuPy
from runner_svc.cuda.products.split_variant import COLUMNS, SPLITS, SplitVariant

if not is_hopper():
    pytest.skip("needs Hopper, and kernels compiled for it", allow_module_level=True)

BF16 = torch.bfloat16
# [outputs, width]: QKV and output of Qwen3-30B-A3B's shape and of Llama-3.1-8B's, its down, partial tiles.
SHAPES = [(5120, 2048), (2048, 4096), (6144, 4096), (4096, 4096), (4096, 14336), (1000, 512), (72, 256)]


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def product(variant: SplitVariant | None = None, dtype: torch.dtype = BF16, *, overlap: bool = True) -> SplitProduct:
    made = SplitProduct(dtype, OwnMethods(), overlap=overlap)
    if variant is not None:
        made._choose = lambda *sizes: variant  # type: ignore[assignment]
    return made


def check(made: SplitProduct, rows: int, outputs: int, width: int, dtype: torch.dtype = BF16) -> Tensor:
    x = torch.randn(rows, width, device="cuda").to(dtype)
    matrix = PlainMatrix((torch.randn(outputs, width, device="cuda") / width**0.5).to(dtype))
    poisoned = torch.full((rows + 1, outputs), torch.nan, device="cuda", dtype=dtype)
    assert made.fits(matrix, rows)
    made.multiply(stream(), x, matrix, None, poisoned[:rows])
    expected = x.double() @ matrix.weight.double().t()
    torch.testing.assert_close(poisoned[:rows].double(), expected, rtol=0.01, atol=0.004)
    assert poisoned[rows].isnan().all()
    again = torch.full_like(poisoned, torch.nan)
    made.multiply(stream(), x, matrix, None, again[:rows])
    assert torch.equal(again[:rows], poisoned[:rows])
    least = 129 if rows <= 256 else 257
    for begin, end in ((0, min(least + 1, rows)), (rows - least, rows)):  # what a row gets depends on it alone
        part = torch.full((end - begin, outputs), torch.nan, device="cuda", dtype=dtype)
        made.multiply(stream(), x[begin:end].contiguous(), matrix, None, part)
        assert torch.equal(part, poisoned[begin:end])
    total = torch.cat([torch.randn(rows, outputs, device="cuda").to(dtype), poisoned[rows:]])
    added = total[:rows].double() + expected
    made.add(stream(), x, matrix, None, total[:rows], 1.0)
    torch.testing.assert_close(total[:rows].double(), added, rtol=0.01, atol=0.008)
    assert total[rows].isnan().all()
    return poisoned


@pytest.mark.parametrize("rows", [129, 150, 256, 257, 320, 384])
@pytest.mark.parametrize(("outputs", "width"), SHAPES)
def test_product(rows: int, outputs: int, width: int) -> None:
    check(product(), rows, outputs, width)


@pytest.mark.parametrize(
    ("consumers", "columns"), [(own, columns) for own, each in COLUMNS.items() for columns in each]
)
@pytest.mark.parametrize("split", SPLITS)
def test_every_variant(consumers: int, columns: int, split: int) -> None:
    dtype = torch.float16 if split == 2 else BF16
    check(product(SplitVariant(columns, split, consumers), dtype), 128 * consumers, 1096, 2048, dtype)


def test_a_chain_that_overlaps() -> None:
    """Products that read each other's outputs, each of which copies weights before the one before has ended."""
    variant = SplitVariant.choose(num_multiprocessors(), 256, 2048, 2048)
    made = product(variant)
    matrices = [PlainMatrix((torch.randn(2048, 2048, device="cuda") / 2048**0.5).to(BF16)) for _ in range(8)]
    x = torch.randn(256, 2048, device="cuda").to(BF16)
    outs = [torch.empty_like(x) for _ in matrices]
    for _ in range(20):
        for out in outs:
            out.fill_(torch.nan)
        for index, matrix in enumerate(matrices):
            made.multiply(stream(), outs[index - 1] if index else x, matrix, None, outs[index])
        for index, matrix in enumerate(matrices):
            expected = (outs[index - 1] if index else x).double() @ matrix.weight.double().t()
            torch.testing.assert_close(outs[index].double(), expected, rtol=0.01, atol=0.004)
