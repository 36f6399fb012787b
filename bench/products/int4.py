"""Checks and times products of few rows with 4-bit matrices: `python -m bench.products.int4 [--tune]`.

For each matrix of an 8B model and each number of rows, a CUDA graph multiplies by copies of the matrix in turn, so that
L2 holds none of them; launches overlap, as in a step. TB/s count the bytes of codes and scales. `--tune` times the
variants of the kernel and then whole layers with the fastest.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.common.gpu_timing import captured, copy_bandwidth, median_microseconds
from runner_svc.cuda.int4.dequantize import Dequantize
from runner_svc.cuda.int4.few_rows import Int4Products, product_defines
from runner_svc.cuda.int4.int4_variant import Int4Variant
from runner_svc.cuda.int4.packed_matrix import PackedInt4Matrix, packed
from runner_svc.cuda.module import load
from runner_svc.interface.products.skinny_launchers import MAX_ROWS, ScaledRows
from runner_svc.weights.int4_matrix import Int4Matrix
from runner_svc.weights.int4_packing import pack_pairs

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STORE, GATED, ADD = "EPILOGUE_STORE", "EPILOGUE_GATED", "EPILOGUE_RESIDUAL"
Key = tuple[Int4Variant, str, torch.dtype, int, torch.dtype, bool]


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    rows: int
    columns: int
    epilogue: str


SHAPES = (
    Shape("gate-up", 28672, 4096, GATED),
    Shape("down", 4096, 14336, ADD),
    Shape("qkv", 6144, 4096, STORE),
    Shape("output", 4096, 4096, ADD),
)
FORMS = {
    8: (
        *((1, 1, 4, 0, 16), (1, 2, 2, 0, 0), (1, 2, 2, 0, 16), (1, 2, 2, 1, 16), (2, 2, 1, 0, 16), (4, 1, 2, 1, 16)),
        *((1, 4, 1, 0, 0), (1, 4, 2, 0, 0), (1, 4, 2, 0, 16), (1, 4, 2, 1, 16), (1, 4, 2, 1, 0), (2, 1, 2, 0, 16)),
        *((2, 2, 2, 0, 0), (2, 2, 2, 0, 16), (2, 2, 2, 1, 16), (4, 1, 1, 0, 0)),
    ),
    16: ((1, 2, 2, 0, 16), (1, 4, 2, 0, 16), (1, 4, 2, 1, 16), (2, 2, 2, 0, 16), (2, 2, 2, 1, 16), (2, 1, 2, 0, 16)),
    32: ((1, 2, 2, 0, 16), (2, 1, 2, 0, 16), (2, 2, 1, 0, 16), (4, 1, 1, 0, 0)),
    64: (
        *((2, 1, 1, 0, 0), (2, 2, 1, 0, 0), (2, 2, 1, 0, 8), (4, 1, 1, 0, 0), (4, 1, 1, 0, 8), (2, 1, 2, 0, 0)),
        *((2, 1, 2, 0, 8), (4, 1, 1, 0, 0, 2), (4, 1, 1, 0, 8, 2), (2, 2, 1, 0, 0, 2), (2, 1, 2, 0, 0, 2)),
    ),
    128: (
        *((2, 1, 1, 0, 0), (1, 2, 1, 0, 0), (1, 1, 2, 0, 0), (2, 1, 1, 0, 0, 2), (2, 1, 1, 0, 8, 2)),
        *((1, 2, 1, 0, 0, 2), (1, 1, 2, 0, 0, 2)),
    ),
}
"""Row groups, parts, blocks, launched blocks, prefetched stages, and sharers if there are two."""
TOTALS = {"qkv": (2, 4), "output": (4, 8), "gate-up": (1, 2, 4), "down": (4, 8)}


def variants(shape: Shape, tokens: int, tile_bytes: int) -> list[Int4Variant]:
    """Returns the variants that are worth timing."""
    found = []
    for row_groups, parts, blocks, launched, prefetched, *more in FORMS[tokens]:
        sharers = more[0] if more else 1
        for total in TOTALS[shape.name]:
            split = total // parts
            is_large = shape.name == "gate-up"
            if total % parts or split * sharers > 8 or (split > 1 if is_large else launched):
                continue
            variant = Int4Variant(tokens, row_groups, parts, split, blocks, tile_bytes, launched, sharers, prefetched)
            if variant.stages >= 2:
                found.append(variant)
    return found


def random_matrix(rows: int, columns: int, group: int, zeros: bool, scale: torch.dtype, order: bool) -> Int4Matrix:
    """Returns random codes with scales of which some are outliers and some zero."""
    groups = -(-columns // group)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device="cuda")
    scales = torch.randn(rows, groups, device="cuda") * 0.02
    scales[::7, 0] = 1.5
    scales[::5, groups // 2] = 0.0
    zero = torch.randint(0, 16, (rows, groups), dtype=torch.uint8, device="cuda") if zeros else None
    columns_order = torch.randperm(columns, device="cuda") if order else None
    return Int4Matrix(pack_pairs(codes), scales.to(scale), zero, group, columns, columns_order)


@dataclass(frozen=True, slots=True)
class Check:
    tokens: int
    rows: int
    columns: int
    group: int
    zeros: bool
    scale: torch.dtype
    order: bool
    epilogue: str
    form: tuple[int, int, int, int]  # row groups, parts, split, blocks
    sharers: int = 1

    @property
    def variant(self) -> Int4Variant:
        box = next(box for box in (8, 16, 32, 64, 128) if box >= self.tokens)
        per_group = 32 * (self.scale.itemsize + self.zeros)
        tile_bytes = 2 * (2048 + 128 // self.group * per_group)
        return Int4Variant(box, *self.form, tile_bytes, sharers=self.sharers, prefetched=3)

    @property
    def key(self) -> Key:
        out = F32 if self.epilogue == STORE else BF16
        return self.variant, self.epilogue, out, self.group, self.scale, self.zeros


CHECKS = (
    Check(1, 6144, 4096, 128, False, BF16, False, STORE, (1, 2, 2, 2)),
    Check(5, 192, 576, 64, True, F16, False, STORE, (2, 1, 1, 2)),
    Check(8, 960, 320, 32, True, BF16, True, STORE, (1, 2, 1, 2)),
    Check(13, 1152, 2048, 128, True, F16, False, STORE, (4, 1, 4, 1)),
    Check(27, 4096, 1024, 64, False, F32, False, STORE, (2, 2, 4, 1)),
    Check(64, 640, 4096, 32, True, BF16, False, STORE, (2, 2, 2, 1)),
    Check(50, 28672, 4096, 128, False, BF16, False, STORE, (4, 1, 1, 1)),
    Check(128, 4096, 4096, 128, False, BF16, False, STORE, (2, 1, 4, 1)),
    Check(101, 576, 1536, 64, True, F16, False, STORE, (1, 2, 1, 1)),
    Check(7, 3072, 576, 64, False, BF16, False, GATED, (1, 2, 1, 2)),
    Check(16, 28672, 4096, 128, False, BF16, False, GATED, (2, 1, 1, 2)),
    Check(64, 28672, 4096, 128, True, BF16, False, GATED, (4, 1, 1, 1)),
    Check(3, 4096, 14336, 128, False, BF16, False, ADD, (1, 2, 4, 2)),
    Check(33, 576, 1536, 32, False, F16, False, ADD, (2, 2, 2, 1)),
    Check(128, 4096, 14336, 128, True, BF16, False, ADD, (2, 1, 8, 1)),
    Check(128, 4096, 4096, 128, False, BF16, False, STORE, (2, 1, 4, 1), 2),
    Check(50, 28672, 4096, 128, False, BF16, False, GATED, (4, 1, 1, 1), 2),
    Check(101, 576, 1536, 64, True, F16, False, ADD, (1, 2, 1, 1), 2),
    Check(64, 1088, 1472, 32, True, F16, False, STORE, (2, 2, 2, 1), 2),
)


def check(one: Check) -> None:
    """Compares a product with float64 torch; prints the relative error."""
    matrix = random_matrix(one.rows, one.columns, one.group, one.zeros, one.scale, one.order)
    weight = packed(matrix)
    assert weight is not None
    x = torch.randn(one.tokens, one.columns, device="cuda").to(BF16)
    x[:, 3] *= 50
    bias = torch.randn(one.rows, device="cuda").to(BF16)
    product = x.double() @ matrix.dequantized().double().t()
    squares = torch.rand(3, MAX_ROWS, device="cuda") * one.columns
    products = Int4Products(1e-5, "silu", lambda *sizes: one.variant)
    stream = torch.cuda.current_stream().cuda_stream
    if one.epilogue == ADD:
        out = torch.full((one.tokens + 1, one.rows), torch.nan, device="cuda", dtype=BF16)
        residual = torch.randn(one.tokens, one.rows, device="cuda").to(BF16)
        norm, sums = torch.randn(one.rows, device="cuda").to(BF16), torch.full((99, MAX_ROWS), torch.nan, device="cuda")
        expected = residual.double() + product + bias.double()
        products.launch(stream, ADD, ScaledRows(x, None), weight, out[:-1], bias, residual, norm, sums)
        added = sums[: one.rows // 64, : one.tokens].sum(dim=0)
        assert torch.allclose(added, residual.float().square().sum(dim=1), rtol=1e-4), "sums of squares"
        assert torch.equal(out[:-1], (residual.float() * norm.float()).to(BF16)), "normed"
        actual = residual.double()
    else:
        scale = torch.rsqrt(squares.sum(dim=0)[: one.tokens] / one.columns + 1e-5).double().unsqueeze(1)
        expected = product * scale + bias.double()
        width = one.rows
        if one.epilogue == GATED:
            gate, up = expected.chunk(2, dim=-1)
            expected, width = torch.nn.functional.silu(gate) * up, one.rows // 2
        pitch = width + (64 if one.epilogue == STORE else 0)
        out = torch.full((one.tokens + 1, pitch), torch.nan, device="cuda", dtype=one.key[2])
        products.launch(stream, one.epilogue, ScaledRows(x, squares), weight, out[:-1, :width], bias)
        assert out[:-1, width:].isnan().all(), "stride"
        actual = out[:-1, :width].double()
    torch.cuda.synchronize()
    assert out[-1].isnan().all(), "wrote too much"
    error = float((actual - expected).norm() / expected.norm())
    limit = 2e-6 if one.epilogue == STORE else 4e-3
    print(f"{'ok ' if error < limit else 'BAD'} {error:.1e} {one}", flush=True)


def check_bits() -> None:
    """Prints whether a row's bits depend on the number of rows."""
    weight = packed(random_matrix(6144, 4096, 128, False, BF16, False))
    assert weight is not None
    x, found = torch.randn(128, 4096, device="cuda").to(BF16), []
    for variant in BITS:
        out = torch.empty(variant.tokens, 6144, device="cuda")
        products = Int4Products(1e-5, "silu", lambda *sizes, variant=variant: variant)
        rows = ScaledRows(x[: variant.tokens], None)
        products.launch(torch.cuda.current_stream().cuda_stream, STORE, rows, weight, out)
        found.append(out[:8])
    print("same bits", [torch.equal(found[0], one) for one in found[1:]], flush=True)


BITS = (
    Int4Variant(8, 1, 2, 2, 2, 4224),
    Int4Variant(16, 4, 1, 4, 1, 4224),
    Int4Variant(32, 2, 2, 2, 1, 4224),
    Int4Variant(64, 2, 2, 2, 1, 4224),
    Int4Variant(128, 2, 1, 4, 1, 4224),
)


class Work:
    """Copies of the matrices of an 8B model, and the tensors around them."""

    def __init__(self, layers: int) -> None:
        self.weights: dict[str, list[PackedInt4Matrix]] = {}
        for shape in SHAPES:
            weight = packed(random_matrix(shape.rows, shape.columns, 128, False, BF16, False))
            assert weight is not None
            count = max(layers, round(600e6 / weight.tiles.numel()))
            self.weights[shape.name] = [replace(weight, tiles=weight.tiles.clone()) for _ in range(count)]
        self.x = torch.randn(MAX_ROWS, 14336, device="cuda").to(BF16)
        self.out = torch.empty(MAX_ROWS, 14336, device="cuda", dtype=BF16)
        self.residual = torch.zeros(MAX_ROWS, 4096, device="cuda", dtype=BF16)
        self.norm = torch.ones(4096, device="cuda", dtype=BF16)
        self.squares = torch.rand(64, MAX_ROWS, device="cuda")

    def launch(self, products: Int4Products, shape: Shape, weight: PackedInt4Matrix, tokens: int) -> None:
        x = self._rows(self.x, tokens, shape.columns)
        outputs = shape.rows // 2 if shape.epilogue == GATED else shape.rows
        out = self._rows(self.out, tokens, outputs)
        stream = torch.cuda.current_stream().cuda_stream
        if shape.epilogue == ADD:
            residual = self.residual[:tokens]
            rows = ScaledRows(x, None)
            products.launch(stream, ADD, rows, weight, out, None, residual, self.norm, self.squares)
        else:
            products.launch(stream, shape.epilogue, ScaledRows(x, self.squares), weight, out)

    @staticmethod
    def _rows(tensor: Tensor, tokens: int, width: int) -> Tensor:
        return tensor.flatten()[: tokens * width].view(tokens, width)

    def product_time(self, shape: Shape, variant: Int4Variant, tokens: int) -> float:
        """Returns microseconds of a product."""
        products = Int4Products(1e-5, "silu", lambda *sizes: variant, overlap=True)
        weights = self.weights[shape.name]

        def run() -> None:
            for weight in weights:
                self.launch(products, shape, weight, tokens)

        return median_microseconds(captured(run), repeats=7, warm_up=2) / len(weights)

    def layer_time(self, chosen: dict[str, Int4Variant], tokens: int, layers: int) -> float:
        """Returns microseconds of a layer's four products, one after another."""
        by_size = {(shape.rows // 64, shape.columns // 128): chosen[shape.name] for shape in SHAPES}
        choose = lambda num_tokens, tiles, steps, tile_bytes: by_size[tiles, steps]  # noqa: E731
        products = Int4Products(1e-5, "silu", choose, overlap=True)

        def run() -> None:
            for layer in range(layers):
                for shape in SHAPES:
                    self.launch(products, shape, self.weights[shape.name][layer], tokens)

        return median_microseconds(captured(run), repeats=9, warm_up=3) / layers


def compile_one(key: Key) -> str:
    """Compiles a kernel into CuPy's cache; returns an error."""
    variant, epilogue, out, group, scale, zeros = key
    try:
        load("int4_product", product_defines(variant, epilogue, "silu", BF16, out, group, scale, zeros))
    except Exception as error:
        return f"{key}: {error}"
    return ""


def compile_all(keys: Sequence[Key]) -> None:
    """Compiles in parallel."""
    unique, begin = list(dict.fromkeys(keys)), time.monotonic()
    workers = max(1, min(14, (os.cpu_count() or 2) - 1))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for error in pool.imap_unordered(compile_one, unique, chunksize=1):
            if error:
                print("COMPILE", error[:600], flush=True)
    print(f"compiled {len(unique)} kernels in {time.monotonic() - begin:.0f} s", flush=True)


def time_dequantization(work: Work) -> None:
    """Prints whether it is right, and its time for the gate-up matrix."""
    matrix = random_matrix(576, 704, 64, True, F16, False)
    weight = packed(matrix)
    assert weight is not None
    stream, small = torch.cuda.current_stream().cuda_stream, torch.empty(576, 704, device="cuda", dtype=BF16)
    Dequantize(BF16)(stream, weight, small)
    is_right = torch.equal(small, matrix.dequantized().to(BF16))
    weights, write = work.weights["gate-up"], Dequantize(BF16)
    out = torch.empty(28672, 4096, device="cuda", dtype=BF16)

    def run() -> None:
        for weight in weights:
            write(torch.cuda.current_stream().cuda_stream, weight, out)

    print(
        f"dequantized: {is_right}, {median_microseconds(captured(run), 5, 2) / len(weights):.1f} us gate-up", flush=True
    )


def tune(rows: Sequence[int], layers: int) -> None:
    """Times all variants, and layers of the fastest."""
    begin = time.monotonic()
    work, bandwidth = Work(layers), copy_bandwidth()
    print(f"copy {bandwidth:.2f} TB/s, ready after {time.monotonic() - begin:.1f} s", flush=True)
    try:
        time_dequantization(work)
    except Exception as error:
        print("FAILED dequantization", str(error)[:200], flush=True)
    for tokens in rows:
        chosen: dict[str, dict[str, Int4Variant]] = {}
        box = next(box for box in FORMS if box >= tokens)
        for shape in SHAPES:
            weight, times = work.weights[shape.name][0], {}
            for variant in variants(shape, box, weight.tiles.shape[2]):
                try:
                    times[variant] = work.product_time(shape, variant, tokens)
                except Exception as error:
                    print("FAILED", variant, str(error)[:200], flush=True)
            ordered = sorted(times, key=lambda variant: times[variant])
            for kind, present in (("any", ordered), ("kept", [one for one in ordered if not one.prefetched])):
                chosen.setdefault(kind, {})[shape.name] = present[0]
            ahead = [one for one in ordered if one.prefetched]
            chosen.setdefault("prefetched", {})[shape.name] = (ahead or ordered)[0]
            shown = " ".join(
                f"{one.row_groups}.{one.parts}.{one.split}/{one.blocks}.{one.launched}p{one.prefetched}s{one.sharers}"
                f" {us:.1f}"
                for one, us in sorted(times.items(), key=lambda item: item[1])[:10]
            )
            rate = weight.tiles.numel() / times[ordered[0]] / 1e6
            print(f"T {tokens:3} {shape.name:7} {rate:.2f} TB/s {rate / bandwidth:4.0%}: {shown}", flush=True)
        for kind, fewer in [(kind, fewer) for kind in chosen for fewer in ((1, 8) if tokens == 8 else (tokens,))]:
            try:
                print_layer(work, kind, chosen[kind], fewer, layers, bandwidth)
            except Exception as error:
                print("FAILED layer", str(error)[:200], flush=True)


def print_layer(
    work: Work, kind: str, chosen: dict[str, Int4Variant], tokens: int, layers: int, bandwidth: float
) -> None:
    """Prints the time of a layer's products."""
    microseconds = work.layer_time(chosen, tokens, layers)
    size = sum(work.weights[shape.name][0].tiles.numel() for shape in SHAPES)
    rate = size / microseconds / 1e6
    print(f"T {tokens:3} layer {kind} {microseconds:.1f} us {rate:.2f} TB/s {rate / bandwidth:4.0%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--checks", type=int, default=len(CHECKS))
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 64, 128])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=600.0)
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(arguments.seconds, exit=True)
    keys = [one.key for one in CHECKS[: arguments.checks]] + [
        (variant, STORE, F32, 128, BF16, False) for variant in BITS
    ]
    if arguments.tune:
        for tokens in arguments.rows:
            box = next(box for box in FORMS if box >= tokens)
            for shape in SHAPES:
                keys += [(one, shape.epilogue, BF16, 128, BF16, False) for one in variants(shape, box, 4224)]
    compile_all(keys)
    for one in CHECKS[: arguments.checks]:
        try:
            check(one)
        except Exception as error:
            print("BAD", type(error).__name__, str(error)[:200], one, flush=True)
    check_bits()
    if arguments.tune:
        tune(arguments.rows, arguments.layers)


if __name__ == "__main__":
    main()
