"""Times kernels of 4-bit matrices that leave something out, to find what they wait for: copies, conversion or products.

`python -m bench.products.int4_trials`. Microseconds of each matrix of an 8B model, alone and rotated as in
`bench.products.int4`; then of whole layers. Kernels that leave something out compute nothing useful.
"""

from __future__ import annotations

import argparse
import faulthandler
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.common.gpu_timing import captured, copy_bandwidth, median_microseconds
from bench.common.on_gpu import require_gpu
from bench.products.int4 import BF16, GATED, SHAPES, STORE, Form, Key, Shape, Work, compile_all, label, streams
from bench.products.trial import Change, Trial
from runner_svc.cuda.int4.few_rows import Int4Products, Variant
from runner_svc.cuda.int4.int4_variant import Int4Variant
from runner_svc.cuda.int4.packed_matrix import STEP, TILE_ROWS, PackedInt4Matrix
from runner_svc.cuda.int4.wide_variant import WideVariant
from runner_svc.interface.products.skinny_launchers import MAX_ROWS, ScaledRows

LAYERS = 12
TILE_BYTES = 4224
"""Of symmetric groups of 128 columns with scales in bfloat16."""


CONSUMER, STREAM = "int4_consumer.cuh", "int4_stream.cuh"
# What is left out is combined instead, for the compiler would leave out what nothing uses.
NO_WARPGROUP_PRODUCTS = Change(
    CONSUMER,
    "Product::multiply(sums, a[chunk % 2][f], x, !begins || f > 0);",
    "for (int i = 0; i < 4; i++) sums[f] = __uint_as_float(__float_as_uint(sums[f]) ^ a[chunk % 2][f][i] ^ x);",
)
NO_WARPGROUP_NUMBERS = Change(CONSUMER, "minus<SCALAR>(raised<SCALAR>(words[f] >> 4 * i), zero[i % 2])", "words[f]")
NO_PRODUCTS = Change(
    STREAM,
    "Tensor16<SCALAR>::mma(sums[s][chain], a, b[fragment / 2][fragment % 2 * 2],",
    "for (int i = 0; i < 4; i++) sums[s][chain][i] = __uint_as_float(__float_as_uint(sums[s][chain][i]) ^ a[i] ^ "
    "b[fragment / 2][fragment % 2 * 2] ^",
)
NO_NUMBERS = Change(STREAM, "minus<SCALAR>(raised<SCALAR>(word >> 4 * i), zero[i % 2])", "word")
NO_COPIES = Change(STREAM, "if (!units.has(copied_unit, i)) continue;", "continue;")
STREAM_TRIALS: Mapping[str, Sequence[Change]] = {
    "whole": (),
    "no products": (NO_PRODUCTS,),
    "no numbers": (NO_NUMBERS,),
    "copies alone": (NO_PRODUCTS, NO_NUMBERS),
    "no copies": (NO_COPIES,),
    "no copies, no numbers": (NO_COPIES, NO_NUMBERS),
    "no copies, no products": (NO_COPIES, NO_PRODUCTS),
}
TILE_TRIALS: Mapping[str, Sequence[Change]] = {
    "whole": (),
    "no products": (NO_WARPGROUP_PRODUCTS,),
    "no numbers": (NO_WARPGROUP_NUMBERS,),
    "copies alone": (NO_WARPGROUP_PRODUCTS, NO_WARPGROUP_NUMBERS),
}
WIDE = "int4_wide.cuh"
NO_WIDE_PRODUCTS = Change(
    WIDE,
    "Product::multiply(sums, a[chunk % 2][f], x + 2 * f, chunk > 0 || f > 0 || step > 0);",
    "for (int i = 0; i < 4; i++) sums[f] = __uint_as_float(__float_as_uint(sums[f]) ^ a[chunk % 2][f][i] ^ x);",
)
NO_WIDE_NUMBERS = Change(WIDE, "times<SCALAR>(pair, scales[i % 2])", "words[f]")
NO_X = (
    Change(WIDE, "barrier_expect(full, kInputBytes);", "barrier_expect(full, 0);"),
    Change(WIDE, "copy_tensor(shared.inputs(", "if (false) copy_tensor(shared.inputs("),
)
NO_CODES = (
    Change(WIDE, "kHalves * problem.present(steps.piece.tile) * kStripBytes);", "0);"),
    Change(WIDE, "if (bytes > 0) {", "if (false) {"),
)
WIDE_TRIALS: Mapping[str, Sequence[Change]] = {
    "whole": (),
    "unturned": (Change(WIDE, "tile * kOwnStrips / kTurnedStrips % length};", "0};"),),
    "no numbers": (NO_WIDE_NUMBERS,),
    "copies alone": (NO_WIDE_PRODUCTS, NO_WIDE_NUMBERS),
    "no x": NO_X,
    "no copies": (*NO_X, *NO_CODES),
    "no copies, no numbers": (*NO_X, *NO_CODES, NO_WIDE_NUMBERS),
    "no copies, no products": (*NO_X, *NO_CODES, NO_WIDE_PRODUCTS),
    "nothing": (*NO_X, *NO_CODES, NO_WIDE_PRODUCTS, NO_WIDE_NUMBERS),
}
DIVISIONS: Mapping[int, Mapping[str, Sequence[tuple[int, int, int, bool]]]] = {
    64: {
        "gate-up": ((64, 4, 1, False), (64, 4, 1, True)),
        "down": ((64, 4, 8, False), (64, 3, 6, False), (64, 4, 1, True)),
        "qkv": ((64, 3, 4, False), (64, 4, 1, True), (64, 2, 1, True)),
        "output": ((64, 2, 4, False), (64, 4, 1, True)),
    },
    256: {
        "gate-up": ((256, 2, 1, True), (256, 2, 1, False), (128, 2, 1, True)),
        "down": ((256, 2, 4, False), (256, 2, 1, True), (128, 2, 1, True)),
        "qkv": ((128, 2, 1, True), (128, 3, 2, False), (256, 2, 1, True), (128, 2, 1, False)),
        "output": ((128, 2, 2, False), (128, 2, 1, True), (256, 2, 4, False)),
    },
}
"""By rows of x: rows of x of a block, warpgroups and parts of the columns, and whether blocks have equal shares."""
MANY_ROWS = 256
WHOLE = "whole"
ROWS = 64
"""Rows of x of the tiles that are tried."""
FORMS = (Form(2, 1, 2), Form(4, 1, 1), Form(4, 1, 1, sharers=2), Form(2, 1, 2, sharers=2), Form(2, 2, 1))
TOTALS = {"gate-up": (1, 2), "down": (4, 8), "qkv": (2, 4), "output": (4, 8)}
"""Parts of the columns."""


def keys(variants: Sequence[tuple[Variant, str]]) -> list[Key]:
    """Returns what is compiled for the variants and their epilogues."""
    return [(variant, epilogue, BF16, 128, BF16, False) for variant, epilogue in variants]


def tile_variants(shape: Shape) -> list[Variant]:
    """Returns the variants of `int4_product` for 64 rows."""
    found: list[Variant] = []
    for form in FORMS:
        for total in TOTALS[shape.name]:
            split = total // form.parts
            if total % form.parts or split * form.sharers > 8 or (split > 1 and shape is SHAPES[0]):
                continue
            one = Int4Variant(ROWS, form.row_groups, form.parts, split, form.blocks, TILE_BYTES, *form[3:])
            if one.stages >= 2:
                found.append(one)
    return found


def tile_trial(trial: Trial) -> list[tuple[Shape, Variant]]:
    """Returns what is timed: all of whole kernels, else gate-up."""
    shapes = SHAPES if trial.name == WHOLE else SHAPES[:1]
    return [(shape, one) for shape in shapes for one in tile_variants(shape)]


def stream_trial(trial: Trial) -> list[tuple[Shape, Variant]]:
    """Returns what is timed: all of whole kernels, else the large matrices."""
    shapes = SHAPES if trial.name == WHOLE else SHAPES[:2]
    return [(shape, one) for shape in shapes for one in streams(shape, TILE_BYTES)]


def try_variants(work: Work, trial: Trial, tried: Sequence[tuple[Shape, Variant]], tokens: int) -> None:
    """Prints microseconds of the products, and of a layer with the fastest variants of whole kernels."""
    times: dict[Shape, dict[Variant, float]] = {}
    for shape, variant in tried:
        times.setdefault(shape, {})[variant] = work.product_time(shape, variant, tokens)
    for shape, found in times.items():
        shown = " ".join(f"{label(one)} {us:.1f}" for one, us in sorted(found.items(), key=lambda pair: pair[1]))
        print(f"T {tokens:2} {shape.name:7} {trial.name}: {shown}", flush=True)
    if trial.name == WHOLE:
        fastest = {shape.name: min(found, key=found.__getitem__) for shape, found in times.items()}
        print(f"T {tokens:2} layer: {work.layer_time(fastest, tokens, LAYERS):.1f} us", flush=True)


def try_streams(work: Work, trial: Trial) -> None:
    """Prints microseconds of products of 8 rows; of whole kernels, of 1 row too."""
    for tokens in (1, 8) if trial.name == WHOLE else (8,):
        try_variants(work, trial, stream_trial(trial), tokens)


def try_tiles(work: Work, trial: Trial) -> None:
    """Prints microseconds of products of 64 rows; of whole kernels, those of layers too."""
    if trial.name == WHOLE:
        time_tile_layers(work)
    try_variants(work, trial, tile_trial(trial), ROWS)


def wide_trial(trial: Trial) -> list[tuple[Shape, Variant, int]]:
    """Returns what is timed, with its rows of x: all of whole kernels, else the first of the large matrices."""
    found: list[tuple[Shape, Variant, int]] = []
    for tokens, by_name in DIVISIONS.items():
        for shape in SHAPES if trial.name == WHOLE else SHAPES[:2]:
            kept = shape if shape.epilogue == GATED or tokens <= MAX_ROWS else replace(shape, epilogue=STORE)
            divisions = by_name[shape.name][: None if trial.name == WHOLE else 1]
            for rows, groups, split, shares in divisions:
                variant = WideVariant(rows, groups, split, TILE_BYTES, shape.epilogue == GATED, shares)
                found.append((kept, variant, tokens))
    return found


def try_wide(work: Work, trial: Trial) -> None:
    """Prints microseconds of the products, and of a layer of few rows with the fastest variants of whole kernels."""
    times: dict[tuple[int, str], dict[Variant, float]] = {}
    for shape, variant, tokens in wide_trial(trial):
        if tokens <= MAX_ROWS:
            microseconds = work.product_time(shape, variant, tokens)
        else:
            microseconds = many_rows_time(work, shape, variant)
        times.setdefault((tokens, shape.name), {})[variant] = microseconds
    for (tokens, name), found in times.items():
        shown = " ".join(f"{label(one)} {us:.1f}" for one, us in sorted(found.items(), key=lambda pair: pair[1]))
        print(f"T {tokens} {name:7} {trial.name}: {shown}", flush=True)
    if trial.name == WHOLE:
        print(f"T {MANY_ROWS} sum: {sum(min(times[MANY_ROWS, shape.name].values()) for shape in SHAPES):.1f} us")
        fastest = {name: min(found, key=found.__getitem__) for (rows, name), found in times.items() if rows == ROWS}
        print(f"T {ROWS} layer of int4_wide: {work.layer_time(fastest, ROWS, LAYERS):.1f} us", flush=True)


def many_rows_time(work: Work, shape: Shape, variant: Variant) -> float:
    """Returns microseconds of a product of 256 rows."""
    products = Int4Products(1e-5, "silu", lambda *sizes: variant, overlap=True)
    x = torch.randn(MANY_ROWS, shape.columns, device="cuda").to(BF16)
    out = torch.empty(MANY_ROWS, shape.rows // (1 + (shape.epilogue == GATED)), device="cuda", dtype=BF16)
    weights = work.weights[shape.name]
    launch = partial(launch_all, products, shape.epilogue, x, weights, out)
    return median_microseconds(captured(launch), 15, 5) / len(weights)


def launch_all(
    products: Int4Products, epilogue: str, x: Tensor, weights: Sequence[PackedInt4Matrix], out: Tensor
) -> None:
    """Multiplies by each of the matrices."""
    for weight in weights:
        products.launch(torch.cuda.current_stream().cuda_stream, epilogue, ScaledRows(x, None), weight, out)


def tile_layers() -> dict[tuple[int, int], dict[str, Variant]]:
    """Returns what `int4_product` is timed as at start, by rows of x and blocks of a multiprocessor."""
    return {
        (tokens, blocks): {
            shape.name: Int4Variant.timed(blocks, tokens, shape.rows // TILE_ROWS, shape.columns // STEP, TILE_BYTES)
            for shape in SHAPES
        }
        for tokens in (8, 64)
        for blocks in (1, 2)
    }


def time_tile_layers(work: Work) -> None:
    """Prints microseconds of layers of `int4_product`, and of their products."""
    for (tokens, blocks), chosen in tile_layers().items():
        shown = " ".join(f"{shape.name} {work.product_time(shape, chosen[shape.name], tokens):.1f}" for shape in SHAPES)
        layer = work.layer_time(chosen, tokens, LAYERS)
        print(f"T {tokens} layer of int4_product, {blocks} a multiprocessor: {layer:.1f} us; {shown}", flush=True)


def layers_of_tiles() -> list[tuple[Shape, Variant]]:
    """Returns the variants of `tile_layers`."""
    return [(shape, chosen[shape.name]) for chosen in tile_layers().values() for shape in SHAPES]


@dataclass(frozen=True, slots=True)
class Kind:
    """Trials of one kernel, and what each of them times."""

    trials: Mapping[str, Sequence[Change]]
    timed: Callable[[Trial], list[tuple[Shape, Variant]]]
    run: Callable[[Work, Trial], None]


KINDS = {
    "wide": Kind(WIDE_TRIALS, lambda trial: [(shape, one) for shape, one, _ in wide_trial(trial)], try_wide),
    "streams": Kind(STREAM_TRIALS, stream_trial, try_streams),
    "tiles": Kind(
        TILE_TRIALS, lambda trial: tile_trial(trial) + (layers_of_tiles() if trial.name == WHOLE else []), try_tiles
    ),
}


def compile_kernels(kind: str, name: str, folder: str, digest: str) -> None:
    """Compiles a trial's kernels into CuPy's cache, in a process of its own: the folder is that of a process."""
    trial = Trial(name, Path(folder), digest)
    with trial.used():
        compile_all(keys([(one, shape.epilogue) for shape, one in KINDS[kind].timed(trial)]))


def compiling(kind: str, trial: Trial) -> subprocess.Popen[bytes]:
    """Starts a process that compiles a trial's kernels."""
    call = f"import sys; from {__spec__.name} import compile_kernels; compile_kernels(*sys.argv[1:])"
    return subprocess.Popen([sys.executable, "-c", call, kind, trial.name, str(trial.folder), trial.digest])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--whole", action="store_true", help="leaves nothing out")
    arguments = parser.parse_args()
    require_gpu()
    faulthandler.dump_traceback_later(arguments.seconds, exit=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        trials: dict[str, list[Trial]] = {}
        for kind in arguments.kinds:
            Path(name, kind).mkdir()
            tried = [trial for trial in KINDS[kind].trials.items() if not (arguments.whole and trial[1])]
            trials[kind] = [Trial.prepared(Path(name, kind), *trial) for trial in tried]
        processes = [compiling(kind, trial) for kind, of_kind in trials.items() for trial in of_kind]
        work = Work(LAYERS)
        print(f"copy {copy_bandwidth():.2f} TB/s, ready after {time.monotonic() - begin:.1f} s", flush=True)
        for process in processes:
            process.wait()
        print(f"compiled after {time.monotonic() - begin:.1f} s", flush=True)
        for kind, of_kind in trials.items():
            for trial in of_kind:
                with trial.used():
                    KINDS[kind].run(work, trial)
    print(f"{time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
