"""The kernels of the canonical order, their very sources, on a CPU: all routes of a product have the same bits.

Clusters are not emulated: a block adds up its parts itself, with the bits of as many blocks.
"""

from __future__ import annotations

import ctypes.util
import random
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.cuda import tensor_map
from runner_svc.cuda.canonical import log_softmax, many_rows, products, rows
from runner_svc.cuda.canonical.many_variant import ManyVariant
from runner_svc.cuda.canonical.products import CanonicalProducts
from runner_svc.cuda.fp8 import product as fp8_product
from runner_svc.cuda.fp8 import rows as fp8_rows
from runner_svc.cuda.fp8.product import Fp8Products
from runner_svc.cuda.fp8.variant import Fp8Variant
from runner_svc.cuda.products import skinny_product
from runner_svc.cuda.products.gated_variant import GatedVariant
from runner_svc.cuda.products.skinny_product import SkinnyProducts
from runner_svc.cuda.products.skinny_variant import SkinnyVariant
from runner_svc.interface.products.canonical_launchers import NormedRows, Planned
from runner_svc.interface.products.skinny_launchers import ScaledRows, TileSums
from runner_svc.weights.activation_rounding import GroupRounding, Rounding, TokenRounding
from runner_svc.weights.fp8_matrix import to_fp8, to_fp8_blocks
from runner_svc.weights.matrix import Matrix
from runner_svc.weights.plain_matrix import PlainMatrix
from tests.support.emulator.kernel import EmulatedKernel, EmulatedModule, MapEncoder
from tests.support.thoroughness import FULL

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

EPS, HIDDEN, INNER, QKV = 1e-5, 128, 128, 160
BF16, CPU = torch.bfloat16, torch.device("cpu")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = MapEncoder()
    monkeypatch.setattr(tensor_map, "_driver", lambda: encoder)
    for module in (skinny_product, many_rows, rows, log_softmax, fp8_product, fp8_rows):
        monkeypatch.setattr(module, "Kernel", EmulatedKernel)
        monkeypatch.setattr(module, "load", partial(EmulatedModule, arch="sm_90a"))
    for module in (skinny_product, many_rows, products, fp8_product):
        monkeypatch.setattr(module, "num_multiprocessors", lambda: 1)
    # The down product, and gate and up, have two parts.
    monkeypatch.setattr(many_rows, "canonical_parts", lambda rows, columns: 1 if rows == QKV else 2)
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    EmulatedKernel.orders.seed(seed)
    torch.manual_seed(seed)


def variant_of(columns: int, *, split: bool) -> many_rows.Choose:
    """Returns what chooses tiles of 128 rows by twice `columns` columns; `split`: for products without gates."""
    tile = GatedVariant(2, columns, 1, 1, head_start=0)

    def choose(ends: str, num_tokens: int, half: int, width: int, parts: int) -> ManyVariant:
        return ManyVariant(tile, 1, parts) if split and ends != "ENDS_GATED" else ManyVariant(tile, parts)

    return choose


class Launcher(CanonicalProducts):
    """Products whose few rows are up to `tokens` at a time, or that take any rows for many.

    `split`: the parts of the columns of many rows are tiles of their own.
    """

    def __init__(self, tokens: int, *, many: bool, split: bool = False) -> None:
        super().__init__(EPS, "silu", HIDDEN, 256, CPU)

        def few(num_tokens: int, num_rows: int, num_columns: int) -> SkinnyVariant:
            return SkinnyVariant(tokens, 1, 1, many_rows.canonical_parts(num_rows, num_columns), canonical=True)

        self.few = SkinnyProducts(EPS, "silu", few)
        self.many = many_rows.ManyRows(EPS, "silu", variant_of(64, split=split), CPU)
        self._many = many

    def _takes_many(self, kind: str, num_tokens: int, matrix: Matrix) -> bool:
        return self._many


def layer(launcher: Launcher, rows_of: slice, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Computes what surrounds a layer's products, for some of the rows."""
    ids = given["ids"][rows_of]
    count = len(ids)

    def empty(width: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.full((count, width), torch.nan, dtype=dtype)

    residual, normed, qkv, activated = empty(HIDDEN), empty(HIDDEN), empty(QKV), empty(INNER)
    x = launcher.take(0, given["embeddings"], ids, given["norm"], residual, normed)
    launcher.store(0, x, PlainMatrix(given["qkv"]), qkv, given["qkv_bias"])
    x = launcher.gated(0, x, PlainMatrix(given["gate_up"]), activated, given["gate_up_bias"])
    x = launcher.add(0, x, PlainMatrix(given["down"]), residual, given["norm"], normed, given["down_bias"])
    logits, again = empty(QKV, torch.float32), empty(QKV, torch.float32)
    launcher.store(0, x, PlainMatrix(given["qkv"]), logits)
    x = launcher.take(0, residual, None, given["norm"], None, empty(HIDDEN))
    launcher.store(0, x, PlainMatrix(given["qkv"]), again)
    return {"qkv": qkv, "activated": activated, "residual": residual, "logits": logits, "again": again}


def same(one: Tensor, other: Tensor) -> bool:
    kind = torch.int16 if one.dtype is BF16 else torch.int32
    return torch.equal(one.view(kind), other.view(kind))


@pytest.mark.skipif(not FULL, reason="takes seconds: ROSTER_TEST_FULL=1 runs it; tests/gpu does the same")
def test_few_rows_and_many_rows_have_the_same_bits() -> None:
    given = {
        "ids": torch.randint(0, 9, (11,), dtype=torch.int32),
        "embeddings": torch.randn(9, HIDDEN).to(BF16),
        "norm": torch.randn(HIDDEN).to(BF16),
        "qkv": torch.randn(QKV, HIDDEN).to(BF16),
        "gate_up": torch.randn(2 * INNER, HIDDEN).to(BF16),
        "down": torch.randn(HIDDEN, INNER).to(BF16),
    }
    biases = {f"{name}_bias": torch.randn(len(given[name])).to(BF16) for name in ("qkv", "gate_up", "down")}
    given |= biases
    whole, others = layer(Launcher(8, many=False), slice(0, 11), given), slice(6, 10)
    assert whole["logits"].isfinite().all() and same(whole["logits"], whole["again"])
    for launcher, rows_of in (
        (Launcher(8, many=True), slice(0, 11)),
        (Launcher(8, many=True, split=True), slice(0, 11)),
        (Launcher(16, many=False), others),
    ):
        for name, got in layer(launcher, rows_of, given).items():
            assert same(got, whole[name][rows_of]), name
    plain = given["embeddings"][given["ids"].long()].float()
    normed = torch.nn.functional.rms_norm(plain, (HIDDEN,), given["norm"].float(), EPS)
    expected = normed @ given["qkv"].float().t() + given["qkv_bias"].float()
    torch.testing.assert_close(whole["qkv"].float(), expected, rtol=0.02, atol=0.2)


def test_all_kernels_of_products_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step waits for a compiler; kernels that are launched later, of any number of rows, are those."""
    for module in (skinny_product, many_rows, products):
        monkeypatch.setattr(module, "num_multiprocessors", lambda: 132)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(EmulatedKernel, "__call__", lambda *arguments: None)
    launcher, rows_of = CanonicalProducts(EPS, "silu", HIDDEN, 4096, CPU), (5, 128, 130, 2000, 4000)
    qkv, gate_up, down = (
        PlainMatrix(torch.zeros(*size, dtype=BF16)) for size in ((QKV, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
    )
    bias, norm = torch.zeros(QKV, dtype=BF16), torch.ones(HIDDEN, dtype=BF16)
    planned = [Planned("store", qkv, BF16, True), Planned("store", qkv, torch.float32)]
    launcher.compile([*planned, Planned("gated", gate_up, BF16), Planned("add", down, BF16)], rows_of)
    caches = launcher.few._kernel, launcher.many._kernel
    compiled = [cache.cache_info().misses for cache in caches]
    assert all(compiled)
    for count in rows_of:
        x, activated = (NormedRows(torch.zeros(count, width, dtype=BF16), None) for width in (HIDDEN, INNER))
        launcher.store(0, x, qkv, torch.empty(count, QKV, dtype=BF16), bias)
        launcher.store(0, x, qkv, torch.empty(count, QKV))
        launcher.gated(0, x, gate_up, activated.rows)
        launcher.add(0, activated, down, torch.zeros(count, HIDDEN, dtype=BF16), norm, x.rows)
    assert [cache.cache_info().misses for cache in caches] == compiled


def squares_of(row: Tensor) -> np.float32:
    """Returns the sum of squares of a row, float32 [width], in the order of docs/determinism.md."""
    tiles = []
    for tile in row.numpy().reshape(-1, 16, 4):
        groups = np.zeros(16, np.float32)
        for column in range(4):
            groups = groups + tile[:, column] * tile[:, column]
        while len(groups) > 1:
            groups = groups[: len(groups) // 2] + groups[len(groups) // 2 :]
        tiles.append(groups[0])
    lanes = [np.float32(0)] * 4
    for index, tile in enumerate(tiles):
        lanes[index % 4] = lanes[index % 4] + tile
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])


@pytest.mark.skipif(not FULL, reason="takes seconds: ROSTER_TEST_FULL=1 runs it; tests/gpu does the same")
@pytest.mark.parametrize("rounding", [TokenRounding(), GroupRounding()], ids=str)
def test_rows_of_fp8_products_have_the_same_bits_alone(rounding: Rounding) -> None:
    """With the roots of the canonical order, and blocks that don't round their rows."""
    is_grouped = rounding.columns > 1

    def unsplit(tokens: int, rows: int, columns: int, *, grouped: bool) -> Fp8Variant:
        variant = Fp8Variant.choose_canonical(tokens, rows, columns, grouped=grouped)
        return replace(variant, split=1, steps=-(-columns // 128))

    products_of_codes = Fp8Products(EPS, "silu", unsplit, canonical=True)
    width, inner = 192, 64
    numbers = torch.randn(2 * inner, width)
    weight = to_fp8_blocks(numbers) if is_grouped else to_fp8(numbers)
    x, squares = torch.randn(11, width).to(BF16), torch.rand(3, 128) * width
    residual, norm = torch.randn(11, 2 * inner).to(BF16), torch.randn(2 * inner).to(BF16)

    def run(rows_of: slice) -> list[Tensor]:
        own = squares.clone()
        own[:, : rows_of.stop - rows_of.start] = squares[:, rows_of]
        scaled, count = ScaledRows(x[rows_of].clone(), own), rows_of.stop - rows_of.start
        stored, gated, out = torch.empty(count, 128), *(torch.empty(count, n, dtype=BF16) for n in (inner, 128))
        total, sums = residual[rows_of].clone(), TileSums(*(torch.zeros(2, 128) for _ in range(2)))
        products_of_codes.store(0, scaled, weight, stored)
        products_of_codes.gated(0, scaled, weight, gated, sums)
        products_of_codes.add(0, scaled, weight, total, norm, out, sums)
        return [stored, gated, out, total, sums.squares[:, :count].T.contiguous()]

    whole, some = run(slice(0, 11)), run(slice(4, 7))
    for index, (one, other) in enumerate(zip(whole, some, strict=True)):
        assert one.float().isfinite().all() and same(one[4:7].contiguous(), other), index
    padded = whole[3].float()
    assert same(row_squares(whole[4].T), torch.tensor(np.array([squares_of(row) for row in padded])))


def row_squares(squares: Tensor) -> Tensor:
    """Adds up the sums of squares of the tiles of each row, float32 [tiles, rows], as readers do."""
    zero = torch.zeros(())
    added = [torch.stack([sum(column.tolist(), zero) for column in squares[place::4].T]) for place in range(4)]
    return (added[0] + added[2]) + (added[1] + added[3])


def test_rows_follow_the_documented_order() -> None:
    width, launcher = 320, rows.CanonicalRows(EPS)
    source, norm = torch.randn(3, width).to(BF16), torch.randn(width).to(BF16)
    residual, out = (torch.full((3, width), torch.nan, dtype=BF16) for _ in range(2))
    squares = torch.full((1, 5, 128), torch.nan)
    ids = torch.tensor([2, 0, 1], dtype=torch.int32)
    taken = launcher.take(0, source, ids, norm, residual, out, squares)
    assert taken.squares is squares and squares[0, :, 3:].isnan().all()
    assert same(residual, source[ids.long()])
    assert same(out, (residual.float() * norm.float()).to(BF16))
    expected = torch.tensor(np.array([squares_of(row.float()) for row in residual]))
    assert same(row_squares(squares[0, :, :3]), expected)


@pytest.mark.parametrize(
    ("outputs", "split", "columns"),
    [(160, False, 64), (192, False, 64), (128, True, 64), *([(192, False, 128)] if FULL else [])],
)
def test_many_rows_follow_the_documented_order(outputs: int, split: bool, columns: int) -> None:
    check_many_rows(outputs, split, columns)


# A rule of the order that the kernel breaks: what is replaced in its text, and by what.
BROKEN = {
    "squares by another tree": (
        "__shfl_xor_sync(kFullWarp, squares[j], 2)",
        "__shfl_xor_sync(kFullWarp, squares[j], 1)",
    ),
    "squares of what is not rounded": (
        "const float rounded = to_float(carried[j]);",
        "const float rounded = values[j];",
    ),
    "products that are rounded before they are added": (
        "__fadd_rn(to_float(carried[j]), values[j])",
        "__fadd_rn(to_float(carried[j]), to_float(from_float<Scalar>(values[j])))",
    ),
    "biases added to what is rounded": (
        "return __fadd_rn(value, to_float(",
        "return __fadd_rn(to_float(from_float<Scalar>(value)), to_float(",
    ),
    "tiles of squares by adjacent lanes first": (
        "for (int distance = kScaleLanes / 2; distance > 0; distance /= 2)",
        "for (int distance = 1; distance < kScaleLanes; distance *= 2)",
    ),
}


@pytest.mark.skipif(not FULL, reason="takes seconds: ROSTER_TEST_FULL=1 runs it")
@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = BROKEN[rule]

    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    monkeypatch.setattr(many_rows, "load", partial(EmulatedModule, arch="sm_90a", change=change))
    with pytest.raises(AssertionError, match="same"):
        check_many_rows(160, False)


def check_many_rows(outputs: int, split: bool, columns: int = 64) -> None:
    """Rows with a one in each part: their products are sums of two elements of the matrix, exactly those."""
    width, count = 192, 70
    launcher = many_rows.ManyRows(EPS, "silu", variant_of(columns, split=split), CPU)
    # Whole multiples of 1/32: a tensor core cuts off what lies far below the larger of two numbers.
    weight, norm = ((torch.randn(outputs, width) * 32).round() / 32 + 0.0).to(BF16), torch.randn(outputs).to(BF16)
    firsts, seconds = torch.randint(64, (count,)), torch.randint(64, 192, (count,))
    x = torch.zeros(count, width, dtype=BF16)
    x[torch.arange(count), firsts] = x[torch.arange(count), seconds] = 1.0
    factors = torch.rand(1, 3, 128) * 100
    residual = torch.randn(count, outputs).to(BF16)
    before, out = residual.clone(), torch.full((count, outputs), torch.nan, dtype=BF16)
    squares = torch.full((1, -(-outputs // 64), 128), torch.nan)
    bias = torch.randn(outputs).to(BF16) if outputs == 160 else None
    launcher.add(0, NormedRows(x, factors), weight, residual, norm, out, squares, bias)
    sums = weight.T[firsts].float() + weight.T[seconds].float()
    width_of_x, eps, one = np.float32(1 / width), np.float32(EPS), np.float32(1)
    means = row_squares(factors[0]).numpy()[:count] * width_of_x
    scales = torch.tensor(one / np.sqrt(means + eps)).unsqueeze(1)
    sums = sums * scales if bias is None else sums * scales + bias.float()
    assert same(residual, (before.float() + sums).to(BF16))
    assert same(out, (residual.float() * norm.float()).to(BF16))
    padded = torch.nn.functional.pad(residual.float(), (0, -outputs % 64))
    expected = torch.tensor(np.array([squares_of(row) for row in padded]))
    assert same(row_squares(squares[0, :, :count]), expected) and squares[0, :, count:].isnan().all()
    stored = torch.full((count, outputs), torch.nan)
    launcher.store(0, NormedRows(x, factors), weight, stored, bias)
    assert same(stored, sums)
    assert not launcher._flags.any()


def lanes_added(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the sums [...] of 32 lanes, `values` [..., 32]: those 16, 8, 4, 2 and 1 apart."""
    for distance in (16, 8, 4, 2, 1):
        values = values + values[..., np.arange(32) ^ distance]
    return values[..., 0]


def log_softmax_of(row: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the log-softmax in the documented order: four adjacent ids, and every 4,096, are of one thread."""
    largest, libm = row.max(), ctypes.CDLL(ctypes.util.find_library("m"))
    for name in ("expf", "logf"):
        getattr(libm, name).argtypes, getattr(libm, name).restype = [ctypes.c_float], ctypes.c_float
    powers = np.array([libm.expf(value) for value in row - largest], np.float32)
    sums = np.zeros(1024, np.float32)
    for part in np.pad(powers, (0, -len(row) % 4096)).reshape(-1, 1024, 4):
        for column in part.T:
            sums += column
    return row - largest - np.float32(libm.logf(lanes_added(lanes_added(sums.reshape(32, 32)))))


def test_log_probabilities() -> None:
    logits, tokens = torch.randn(3, 4100) * 6, torch.tensor([7, 4099, 0])
    logits[1, 5] = logits[1, 9] = 40.0
    logprobs = log_softmax.CanonicalLogprobs(4100)
    values, ids, largest = logprobs(0, logits, tokens, 3)
    expected = torch.tensor(np.array([log_softmax_of(row) for row in logits.numpy()]))
    assert same(values, expected.gather(1, tokens.unsqueeze(1)).squeeze(1))
    assert same(largest, expected.topk(3, dim=-1).values)
    assert ids[1, :2].tolist() == [5, 9]
    for got, whole in zip(logprobs(0, logits[2:], tokens[2:], 3), (values, ids, largest), strict=True):
        assert torch.equal(got, whole[2:])
