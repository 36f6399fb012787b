"""Times FP8 products, own kernels and torch's: `python -m bench.products.fp8 [--tune] [--output results.txt]`.

For each matrix of the 8B shape and each number of rows, one CUDA graph multiplies by several matrices in turn, so that
L2 holds none of them. Each result is compared with the format's definition. TB/s count the weights' bytes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.common.gpu_timing import card, copy_bandwidth, graph_microseconds
from bench.common.on_gpu import require_gpu
from bench.common.random_model import SHAPES
from bench.products.skinny import Matrix, matrices
from runner_svc.cuda.fp8.linear import Fp8Linear
from runner_svc.cuda.fp8.product import Fp8Products
from runner_svc.cuda.fp8.rows import Fp8Rows, RoundedRows, RoundingArguments, rounded_rows
from runner_svc.cuda.fp8.variant import Fp8Variant, num_steps, split_of
from runner_svc.cuda.module import load
from runner_svc.cuda.products.skinny_product import SkinnyProducts
from runner_svc.cuda.products.skinny_variant import SkinnyVariant
from runner_svc.interface.products.skinny_launchers import MAX_ROWS, ScaledRows, TileSums
from runner_svc.model.config import ModelConfig
from runner_svc.weights.activation_rounding import GroupRounding, TokenRounding
from runner_svc.weights.fp8_matrix import Fp8Matrix
from runner_svc.weights.plain_matrix import PlainMatrix

BF16 = torch.bfloat16
EPS = 1e-5
EPILOGUES = {"store": "EPILOGUE_STORE", "add": "EPILOGUE_RESIDUAL", "gated": "EPILOGUE_GATED"}
CHECKED = ("qkv", "down")
"""Matrices with which bits are compared."""
CHAINED = (1, 16, 64)
"""Rows of chains."""
FEW_SHAPES = [(1, 2, 1), (1, 2, 2), (1, 2, 3), (1, 4, 2), (2, 2, 1)]
MORE_SHAPES = [(2, 1, 1), (2, 2, 1), (1, 2, 2)]
"""Warpgroups, steps in flight and blocks a multiprocessor, of up to 32 rows and of more."""
STARTED = time.perf_counter()


def log(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:5.1f} s] {text}", flush=True)


def random_matrix(out: int, width: int, grouped: bool) -> Fp8Matrix:
    """Returns random codes with scales about 1e-3."""
    codes = (torch.randn(out, width, device="cuda", dtype=BF16) * 20).to(torch.float8_e4m3fn)
    shape = (-(-out // 128), num_steps(width)) if grouped else (out, 1)
    scales = torch.rand(shape, device="cuda") * 1e-3 + 1e-3
    return Fp8Matrix(codes, scales, GroupRounding() if grouped else TokenRounding(), (128, 128) if grouped else None)


class Case:
    """One matrix and one number of rows."""

    def __init__(self, matrix: Matrix, rows: int, weights: list[Fp8Matrix]) -> None:
        self.matrix, self.rows, self.weights = matrix, rows, weights
        outputs = matrix.out // 2 if matrix.kind == "gated" else matrix.out
        self.x = torch.randn(rows, matrix.width, device="cuda", dtype=BF16)
        self.out, self.residual = (torch.empty(rows, outputs, device="cuda", dtype=BF16) for _ in range(2))
        self.norm_weight = torch.ones(outputs, device="cuda", dtype=BF16)
        self.sums = TileSums.allocate(matrix.out, torch.device("cuda"))
        self.scaled = ScaledRows(self.x, torch.full((64, MAX_ROWS), matrix.width / 64, device="cuda"))

    def expected(self) -> Tensor:
        weight, x = self.weights[0], self.x
        product = (weight.rounded(x).double() @ weight.dequantized().double().t()).float()
        if self.matrix.kind == "gated":
            gate, up = product.chunk(2, dim=-1)
            return functional.silu(gate) * up
        return product

    def launch(self, products: Fp8Products, weights: Sequence[Fp8Matrix]) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for weight in weights:
            if self.matrix.kind == "gated":
                products.gated(stream, self.scaled, weight, self.out, self.sums)
            elif self.matrix.kind == "add":
                x = ScaledRows(self.x, None)
                products.add(stream, x, weight, self.residual, self.norm_weight, self.out, self.sums)
            else:
                products.store(stream, self.scaled, weight, self.out)

    def result(self, products: Fp8Products) -> Tensor:
        self.out.fill_(torch.nan)
        self.residual.zero_()
        self.launch(products, self.weights[:1])
        torch.cuda.synchronize()
        return self.out.float()


def always(variant: Fp8Variant, *sizes: int, grouped: bool) -> Fp8Variant:
    return variant


def variants(matrix: Matrix, rows: int, grouped: bool, tune: bool) -> list[Fp8Variant]:
    """Returns the variants to time: those chosen, or all that make sense."""
    chosen = [Fp8Variant.choose(blocks, rows, matrix.out, matrix.width, grouped=grouped) for blocks in (1, 2)]
    if not tune:
        return list(dict.fromkeys(chosen))
    found, steps = list(chosen), num_steps(matrix.width)
    for split in (1, 2, 4, 8):
        if not 96 <= matrix.out // 64 * split <= 600:
            continue
        base = replace(chosen[1], split=split, steps=-(-steps // split), resident=False)
        shapes = (
            [(1, 2, 1), (1, 2, 2), (1, 2, 3), (1, 4, 2), (2, 2, 1)] if rows <= 32 else [(2, 1, 1), (2, 2, 1), (1, 2, 2)]
        )
        for resident in (False, True) if split == 1 and rows <= 8 else (False,):
            for groups, batch, blocks in shapes:
                found.append(replace(base, groups=groups, batch=batch, blocks=blocks, resident=resident))
    return [each for each in dict.fromkeys(found) if each.stages >= max(3, each.batch)]


def product_defines(matrix: Matrix, variant: Fp8Variant) -> dict[str, int | str]:
    return variant.defines | {
        "STATIC": 0, "EPILOGUE": EPILOGUES[matrix.kind], "OUT": "__nv_bfloat16", "ACTIVATION": "silu"
    }  # fmt: skip


def jobs_of(plan: Sequence[tuple[Matrix, int, bool, list[Fp8Variant]]]) -> list[tuple[str, dict[str, int | str]]]:
    """Returns the kernels that the plan needs, with their macros."""
    jobs: dict[str, tuple[str, dict[str, int | str]]] = {}

    def add(name: str, defines: dict[str, int | str]) -> None:
        jobs[f"{name} {defines}"] = name, defines

    for matrix, rows, grouped, found in plan:
        for variant in found:
            add("fp8_product", product_defines(matrix, variant))
        if matrix.name in CHECKED:
            chosen = Fp8Variant.choose(2, rows, matrix.out, matrix.width, grouped=grouped)
            add("fp8_product", product_defines(matrix, chosen) | {"EPILOGUE": "EPILOGUE_STORE", "OUT": "float"})
        if rows in CHAINED and not grouped:
            old = SkinnyVariant.choose(2, rows, matrix.out, matrix.width)
            fixed: dict[str, int | str] = {
                "EPILOGUE": EPILOGUES[matrix.kind],
                "OUT": "__nv_bfloat16",
                "ACTIVATION": "silu",
            }
            add("skinny_product", old.defines | fixed)
        threads = min(512, matrix.width // 16)
        vectors = -(-matrix.width // 16 // threads)
        add("fp8_rows", {"WIDTH": matrix.width, "VECTORS": vectors, "GROUPED": int(grouped), "STATIC": 0, "GATED": 0})
    return list(jobs.values())


def compile_all(workers: int) -> None:
    """Fills the cache of kernels by several processes, each of which compiles its share."""
    command = [sys.executable, "-m", "bench.products.fp8", *sys.argv[1:]]
    processes = [subprocess.Popen([*command, "--share", str(index)]) for index in range(workers)]
    failed = sum(process.wait() != 0 for process in processes)
    log(f"compiled, {failed} processes failed")


@dataclass(frozen=True, slots=True)
class Time:
    """Microseconds of a variant and its relative error."""

    name: str
    microseconds: float
    error: float


def describe(variant: Fp8Variant) -> str:
    kind = "resident" if variant.resident else "rounded before"
    shape = f"S{variant.split} g{variant.groups} b{variant.batch} x{variant.blocks} st{variant.stages:2}"
    return f"{shape} {kind}"


def timed(case: Case, found: Sequence[Fp8Variant], lines: list[str]) -> None:
    """Times the variants of a case and prints the fastest."""
    times, expected = [], case.expected()
    for variant in found:
        products = Fp8Products(EPS, "silu", partial(always, variant), overlap=True)
        try:
            error = float((case.result(products) - expected).norm() / expected.norm())
            microseconds = graph_microseconds([partial(case.launch, products, case.weights)], repeats=7)
        except Exception as fault:
            log(f"{case.matrix.name} {case.rows} {describe(variant)}: {fault}")
            continue
        times.append(Time(describe(variant), microseconds / len(case.weights), error))
    size = case.matrix.out * case.matrix.width
    times.sort(key=lambda each: each.microseconds)
    for place, each in enumerate(times):
        flag = "" if each.error < 8e-3 else " WRONG"
        line = (
            f"{case.matrix.name:8} {case.rows:4} {each.name:40} {each.microseconds:7.2f} us "
            f"{size / each.microseconds / 1e6:5.2f} TB/s {each.error:.1e}{flag}"
        )
        lines.append(line)
        if place < 4 or flag:
            print(line, flush=True)


def check_bits(matrix: Matrix, weight: Fp8Matrix, products: Fp8Products) -> str:
    """Compares the first row's bits at several numbers of rows."""
    x = torch.randn(MAX_ROWS, matrix.width, device="cuda", dtype=BF16)
    outs = []
    for rows in (1, 8, 9, 16, 40, 64, 128):
        out = torch.empty(rows, matrix.out, device="cuda")
        squares = torch.full((64, MAX_ROWS), matrix.width / 60, device="cuda")
        products.store(torch.cuda.current_stream().cuda_stream, ScaledRows(x[:rows], squares), weight, out)
        outs.append(out[0])
    return " ".join(str(int((out != outs[0]).sum())) for out in outs)


def multiply_all(codes: Tensor, weights: Sequence[Fp8Matrix], scales: Sequence[Tensor], fast: bool) -> Tensor:
    """Multiplies by torch with scales of x's rows and, if there are two, W's rows instead of one for all."""
    for weight in weights:
        columns = scales[0] if len(scales) == 1 else weight.scales.t()
        out = torch._scaled_mm(
            codes, weight.codes.t(), scales[-1], columns, out_dtype=BF16, use_fast_accum=fast
        )  # fmt: skip
    return out


def time_torch(matrix: Matrix, weights: list[Fp8Matrix], all_rows: Sequence[int], lines: list[str]) -> None:
    """Times torch's products with scales of one and with scales of rows."""
    one = torch.ones((), device="cuda")
    for rows in all_rows:
        x = torch.randn(rows, matrix.width, device="cuda", dtype=BF16)
        rounded = rounded_rows(rows, matrix.width, x.device)
        stream = torch.cuda.current_stream().cuda_stream
        Fp8Rows(EPS)(stream, ScaledRows(x, None), RoundingArguments.of(TokenRounding()), rounded)
        factors = rounded.factors.unsqueeze(1)
        exact = rounded.codes.float().double() @ weights[0].codes.float().double().t()
        scaled = exact * factors.double() * weights[0].scales.double().t()
        cells = []
        for fast in (False, True):
            for name, scales, wanted in (("tensor", [one], exact), ("row", [one, factors], scaled)):
                error = multiply_all(rounded.codes, weights[:1], scales, fast).double() - wanted
                launch = partial(multiply_all, rounded.codes, weights, scales, fast)
                spent = graph_microseconds([launch], repeats=7) / len(weights)  # type: ignore[list-item]
                cells.append(f"{name}{'+' if fast else ''} {spent:6.1f} ({float(error.norm() / wanted.norm()):.1e})")
        line = f"torch {matrix.name:8} {rows:5}: " + "  ".join(cells)
        print(line, flush=True)
        lines.append(line)


CHAIN_SHAPES = [(6144, 4096, "store"), (4096, 4096, "add"), (28672, 4096, "gated"), (4096, 14336, "add")]


def time_chains(all_rows: Sequence[int], lines: list[str]) -> None:
    """Times the four products of layers one after another, as in a step: bf16 and FP8, us a layer."""
    layers, (qkv_width, hidden, _), inner = 8, CHAIN_SHAPES[0], CHAIN_SHAPES[3][1]
    quantized = [[random_matrix(out, width, grouped=False) for out, width, _ in CHAIN_SHAPES] for _ in range(layers)]
    plain = [
        [PlainMatrix(torch.randn(out, width, device="cuda", dtype=BF16) * 0.02) for out, width, _ in CHAIN_SHAPES]
        for _ in range(layers)
    ]
    for rows in all_rows:
        qkv = torch.empty(rows, qkv_width, device="cuda", dtype=BF16)
        attended, normed, residual = (torch.randn(rows, hidden, device="cuda", dtype=BF16) for _ in range(3))
        activated, norm = (
            torch.empty(rows, inner, device="cuda", dtype=BF16),
            torch.ones(hidden, device="cuda").to(BF16),
        )
        sums = TileSums.allocate(inner, torch.device("cuda"))
        buffers = attended, normed, residual, norm, qkv, activated, sums

        def run(
            products: Fp8Products | SkinnyProducts, weights: Sequence[Sequence[Any]], buffers: Any = buffers
        ) -> None:
            attended, normed, residual, norm, qkv, activated, sums = buffers
            stream = torch.cuda.current_stream().cuda_stream
            x = ScaledRows(normed, sums.squares[:64])
            for four in weights:
                products.store(stream, x, four[0], qkv)
                x = products.add(stream, ScaledRows(attended, None), four[1], residual, norm, normed, sums)
                x = products.gated(stream, x, four[2], activated, sums)
                x = products.add(stream, x, four[3], residual, norm, normed, sums)

        cells = []
        for blocks in (1, 2):
            own = Fp8Products(EPS, "silu", partial(Fp8Variant.choose, blocks), overlap=True)
            cells.append(f"x{blocks} {graph_microseconds([partial(run, own, quantized)], repeats=7) / layers:5.1f}")
        old = SkinnyProducts(EPS, "silu", partial(SkinnyVariant.choose, 2), overlap=True)
        cells.append(f"bf16 x2 {graph_microseconds([partial(run, old, plain)], repeats=7) / layers:6.1f}")
        line = f"layer of four products, {rows:3} rows, us: " + "  ".join(cells)
        print(line, flush=True)
        lines.append(line)


def time_linear(matrix: Matrix, weights: list[Fp8Matrix], all_rows: Sequence[int], lines: list[str]) -> None:
    """Times the launcher of any number of rows, rounding and scaling included."""
    linear = Fp8Linear(EPS, "silu", torch.device("cuda"), overlap=True)
    cells = []
    for rows in all_rows:
        x = torch.randn(rows, matrix.width, device="cuda", dtype=BF16)
        is_gated = matrix.kind == "gated" and linear.fits(weights[0])
        out = torch.empty(rows, matrix.out // (1 + is_gated), device="cuda", dtype=BF16)

        def run(x: Tensor = x, out: Tensor = out, is_gated: bool = is_gated) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for weight in weights:
                if is_gated:
                    linear(stream, x, weight, out, weight.rounding)
                else:
                    linear.multiply(stream, x, weight, None, out)

        cells.append(f"{rows} {graph_microseconds([run], repeats=7) / len(weights):.1f}")
    line = f"linear {matrix.name} {'grouped ' if weights[0].block else ''}us by rows: " + "  ".join(cells)
    print(line, flush=True)
    lines.append(line)


def _round_ten_times(launcher: Fp8Rows, x: Tensor, told: RoundingArguments, out: RoundedRows) -> None:
    for _ in range(10):
        launcher(torch.cuda.current_stream().cuda_stream, ScaledRows(x, None), told, out)


def time_rounding(lines: list[str]) -> None:
    """Times the rounding of rows alone."""
    for width in (4096, 14336):
        for rows in (16, 64, 256, 4096):
            x, out = (
                torch.randn(rows, width, device="cuda").to(BF16),
                rounded_rows(max(rows, 16), width, torch.device("cuda")),
            )
            launcher, told = Fp8Rows(EPS, overlap=True), RoundingArguments.of(TokenRounding())
            assert told is not None

            run = partial(_round_ten_times, launcher, x, told, out)

            line = f"rounding {rows} x {width}: {graph_microseconds([run], repeats=7) / 10:.2f} us"
            print(line, flush=True)
            lines.append(line)


def cases(all_rows: Sequence[int], grouped: bool, tune: bool) -> Iterator[tuple[Matrix, int, bool, list[Fp8Variant]]]:
    for matrix in matrices(ModelConfig.from_hugging_face(SHAPES["llama-3.1-8b"]))[:4]:
        for rows in all_rows:
            yield matrix, rows, grouped, variants(matrix, rows, grouped, tune)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 8, 16, 64, 128))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--grouped", action="store_true")
    parser.add_argument("--torch", nargs="*", type=int, default=())
    parser.add_argument("--linear", nargs="*", type=int, default=())
    parser.add_argument("--share", type=int, help="compile this share of the kernels, by the number of workers")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    require_gpu()
    lines: list[str] = []
    kinds = [False, True] if arguments.grouped else [False]
    plan = [case for grouped in kinds for case in cases(arguments.rows, grouped, arguments.tune and not grouped)]
    if arguments.share is not None:
        for name, defines in jobs_of(plan)[arguments.share :: arguments.workers]:
            load(name, defines)
        return
    if arguments.workers:
        compile_all(arguments.workers)
    if arguments.compile_only:
        return
    log(f"{card()}, copy {copy_bandwidth():.2f} TB/s")
    shown: dict[tuple[str, bool], list[Fp8Matrix]] = {}
    for matrix, rows, grouped, found in plan:
        key = matrix.name, grouped
        if key not in shown:
            shown.clear()
            count = max(3, round(300_000_000 / matrix.out / matrix.width))
            shown[key] = [random_matrix(matrix.out, matrix.width, grouped) for _ in range(count)]
            products = Fp8Products(EPS, "silu", overlap=True)
            split = split_of(matrix.out, matrix.width, grouped=grouped)
            log(f"{matrix.name}{' grouped' if grouped else ''}, split {split}")
            if matrix.name in CHECKED:
                log(f"bits that differ from one row's: {check_bits(matrix, shown[key][0], products)}")
            if arguments.linear:
                time_linear(matrix, shown[key][:4], arguments.linear, lines)
            if arguments.torch and not grouped:
                time_torch(matrix, shown[key][:6], arguments.torch, lines)
        timed(Case(matrix, rows, shown[key]), found, lines)
    shown.clear()
    time_rounding(lines)
    time_chains(CHAINED, lines)
    log("done")
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
