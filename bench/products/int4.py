"""Times products of few rows with 4-bit matrices: `python -m bench.products.int4`.

For each matrix of an 8B model and each number of rows, a CUDA graph multiplies by copies of the matrix in turn, so that
L2 holds none of them; launches overlap, as in a step. TB/s count the bytes of codes and scales. Then whole layers with
the fastest variants. What kernels wait for is measured by `bench.products.int4_trials`.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from bench.common.gpu_timing import captured, copy_bandwidth, median_microseconds
from bench.common.on_gpu import require_gpu
from runner_svc.cuda import module
from runner_svc.cuda.int4.dequantize import Dequantize
from runner_svc.cuda.int4.few_rows import Int4Products, Variant, product_defines
from runner_svc.cuda.int4.int4_variant import Int4Variant
from runner_svc.cuda.int4.packed_matrix import STEP, TILE_ROWS, PackedInt4Matrix, packed
from runner_svc.cuda.int4.stream_variant import MOST_ROWS, StreamVariant
from runner_svc.cuda.int4.wide_variant import WideVariant
from runner_svc.interface.products.skinny_launchers import MAX_ROWS, ScaledRows
from runner_svc.weights.int4_matrix import Int4Matrix
from runner_svc.weights.int4_packing import pack_pairs

BF16 = torch.bfloat16
STORE, GATED, ADD = "EPILOGUE_STORE", "EPILOGUE_GATED", "EPILOGUE_RESIDUAL"
Key = tuple[Variant, str, torch.dtype, int, torch.dtype, bool]


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


class Form(NamedTuple):
    """How a matrix is divided; see `Int4Variant`."""

    row_groups: int
    parts: int
    blocks: int
    launched: int = 0
    sharers: int = 1
    prefetched: int = 0
    by_warps: bool = False


BY_WARPS = tuple(
    Form(row_groups, parts, blocks, launched, by_warps=True)
    for row_groups, parts, blocks, launched in (
        *((1, 2, 2, 0), (1, 2, 3, 0), (1, 4, 1, 0), (1, 4, 2, 0), (2, 2, 1, 0), (2, 2, 2, 0)),
        *((1, 4, 2, 1), (2, 2, 2, 1)),
    )
)
FORMS = {
    8: (Form(1, 2, 2), Form(1, 4, 1), Form(1, 4, 2), *BY_WARPS),
    16: (Form(1, 2, 2), Form(1, 4, 1), *BY_WARPS[:1], BY_WARPS[2], BY_WARPS[4]),
    64: (
        *(Form(2, 2, 1), Form(2, 1, 2), Form(2, 1, 2, prefetched=8), Form(4, 1, 1), Form(2, 2, 1, sharers=2)),
        Form(4, 1, 1, sharers=2),
    ),
    128: (Form(2, 1, 1), Form(1, 2, 1), Form(2, 1, 1, 0, 2, 8), Form(2, 1, 1, sharers=2), Form(1, 2, 1, sharers=2)),
}
"""By the most rows."""
TOTALS = {"qkv": (4,), "output": (4, 8), "gate-up": (1, 2, 4), "down": (4, 8)}
"""Parts of the columns."""


def variants(shape: Shape, tokens: int, tile_bytes: int) -> list[Variant]:
    """Returns the variants that are worth timing."""
    found: list[Variant] = []
    for form in FORMS[tokens]:
        for total in TOTALS[shape.name]:
            split, is_large = total // form.parts, shape.name == "gate-up"
            if total % form.parts or split * form.sharers > 8 or (split > 1 if is_large else form.launched):
                continue
            variant = Int4Variant(tokens, form.row_groups, form.parts, split, form.blocks, tile_bytes, *form[3:])
            if variant.stages >= 2:
                found.append(variant)
    if tokens <= MOST_ROWS:
        found += streams(shape, tile_bytes)
    if tokens >= 64:
        sizes = (shape.rows // TILE_ROWS, shape.columns // STEP, tile_bytes, shape.epilogue)
        found.append(WideVariant.choose(module.num_multiprocessors(), tokens, *sizes))
    return found


def streams(shape: Shape, tile_bytes: int) -> list[Variant]:
    """Returns the variant of `int4_stream`, if there is one."""
    tiles, steps = shape.rows // TILE_ROWS, shape.columns // STEP
    found = StreamVariant.choose(module.num_multiprocessors(), tiles, steps, tile_bytes, shape.epilogue)
    return [found] if found.fits else []


def label(variant: Variant) -> str:
    """Returns how a variant is named in the output."""
    if isinstance(variant, StreamVariant):
        return f"stream{variant.strips}x{variant.units}.{variant.stages}"
    if isinstance(variant, WideVariant):
        return f"wide{variant.tokens}.{variant.groups}.{variant.split}{'shares' if variant.shares else ''}"
    form = f"{variant.row_groups}.{variant.parts}.{variant.split}/{variant.blocks}.{variant.launched}"
    return f"{form}p{variant.prefetched}s{variant.sharers}{'w' if variant.by_warps else ''}"


def random_matrix(rows: int, columns: int) -> Int4Matrix:
    """Returns random codes in symmetric groups of 128."""
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device="cuda")
    scales = torch.randn(rows, columns // 128, device="cuda") * 0.02
    return Int4Matrix(pack_pairs(codes), scales.to(BF16), None, 128, columns)


class Work:
    """Copies of the matrices of an 8B model, and the tensors around them."""

    def __init__(self, layers: int) -> None:
        self.weights: dict[str, list[PackedInt4Matrix]] = {}
        for shape in SHAPES:
            weight = packed(random_matrix(shape.rows, shape.columns))
            assert weight is not None
            count = max(layers, round(600e6 / weight.tiles.numel()))
            self.weights[shape.name] = [replace(weight, tiles=weight.tiles.clone()) for _ in range(count)]
        self.x = torch.randn(MAX_ROWS, 14336, device="cuda").to(BF16)
        self.out = torch.empty(MAX_ROWS, 14336, device="cuda", dtype=BF16)
        self.residual = torch.zeros(MAX_ROWS, 4096, device="cuda", dtype=BF16)
        self.norm = torch.ones(4096, device="cuda", dtype=BF16)
        self.squares = torch.rand(128, MAX_ROWS, device="cuda")

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

    def product_time(self, shape: Shape, variant: Variant, tokens: int) -> float:
        """Returns microseconds of a product."""
        products = Int4Products(1e-5, "silu", lambda *sizes: variant, overlap=True)
        weights = self.weights[shape.name]

        def run() -> None:
            for weight in weights:
                self.launch(products, shape, weight, tokens)

        return median_microseconds(captured(run), repeats=7, warm_up=2) / len(weights)

    def layer_time(self, chosen: dict[str, Variant], tokens: int, layers: int) -> float:
        """Returns microseconds of a layer's four products, one after another."""
        by_size = {(shape.rows // 64, shape.columns // 128): chosen[shape.name] for shape in SHAPES}
        choose = lambda num_tokens, tiles, steps, *rest: by_size[tiles, steps]  # noqa: E731
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
        module.load(variant.kernel, product_defines(variant, epilogue, "silu", BF16, out, group, scale, zeros))
    except Exception as error:
        return f"{key}: {error}"
    return ""


def compile_all(keys: Sequence[Key]) -> None:
    """Compiles in parallel."""
    unique, begin = list(dict.fromkeys(keys)), time.monotonic()
    workers = max(1, min(14, (os.cpu_count() or 2) - 1))
    with ThreadPoolExecutor(workers) as pool:
        for error in pool.map(compile_one, unique):
            if error:
                print("COMPILE", error[:600], flush=True)
    print(f"compiled {len(unique)} kernels in {time.monotonic() - begin:.0f} s", flush=True)


def time_dequantization(work: Work) -> None:
    """Prints the time of writing the gate-up matrix as 16-bit numbers."""
    weights, write = work.weights["gate-up"], Dequantize(BF16)
    out = torch.empty(28672, 4096, device="cuda", dtype=BF16)

    def run() -> None:
        for weight in weights:
            write(torch.cuda.current_stream().cuda_stream, weight, out)

    microseconds = median_microseconds(captured(run), 5, 2) / len(weights)
    print(f"dequantized: {microseconds:.1f} us gate-up", flush=True)


def tune(rows: Sequence[int], layers: int) -> None:
    """Times all variants, and layers of the fastest."""
    begin = time.monotonic()
    work, bandwidth = Work(layers), copy_bandwidth()
    print(f"copy {bandwidth:.2f} TB/s, ready after {time.monotonic() - begin:.1f} s", flush=True)
    time_dequantization(work)
    for tokens in rows:
        chosen: dict[str, dict[str, Variant]] = {}
        box = next(box for box in FORMS if box >= tokens)
        for shape in SHAPES:
            weight, times = work.weights[shape.name][0], {}
            for variant in variants(shape, box, weight.tiles.shape[2]):
                try:
                    times[variant] = work.product_time(shape, variant, tokens)
                except Exception as error:
                    print("FAILED", variant, str(error)[:200], flush=True)
            ordered = sorted(times, key=lambda variant: times[variant])
            wide = [one for one in ordered if isinstance(one, WideVariant)]
            for kind, present in (("any", ordered), ("wide", wide or ordered)):
                chosen.setdefault(kind, {})[shape.name] = present[0]
            shown = " ".join(
                f"{label(one)} {us:.1f}" for one, us in sorted(times.items(), key=lambda item: item[1])[:10]
            )
            rate = weight.tiles.numel() / times[ordered[0]] / 1e6
            print(f"T {tokens:3} {shape.name:7} {rate:.2f} TB/s {rate / bandwidth:4.0%}: {shown}", flush=True)
        for kind, fewer in [(kind, fewer) for kind in chosen for fewer in ((1, 8) if tokens == 8 else (tokens,))]:
            try:
                print_layer(work, kind, chosen[kind], fewer, layers, bandwidth)
            except Exception as error:
                print("FAILED layer", str(error)[:200], flush=True)


def print_layer(work: Work, kind: str, chosen: dict[str, Variant], tokens: int, layers: int, bandwidth: float) -> None:
    """Prints the time of a layer's products."""
    microseconds = work.layer_time(chosen, tokens, layers)
    size = sum(work.weights[shape.name][0].tiles.numel() for shape in SHAPES)
    rate = size / microseconds / 1e6
    print(f"T {tokens:3} layer {kind} {microseconds:.1f} us {rate:.2f} TB/s {rate / bandwidth:4.0%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 64, 128, 16])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=600.0)
    arguments = parser.parse_args()
    require_gpu()
    faulthandler.dump_traceback_later(arguments.seconds, exit=True)
    boxes = [next(box for box in FORMS if box >= tokens) for tokens in arguments.rows]
    compile_all(
        [
            (one, shape.epilogue, BF16, 128, BF16, False)
            for box in boxes
            for shape in SHAPES
            for one in variants(shape, box, 4224)
        ]
    )
    tune(arguments.rows, arguments.layers)


if __name__ == "__main__":
    main()
