"""Times kernels of 4-bit matrices that leave something out, to find what they wait for: copies, conversion or products.

`python -m bench.products.int4_trials`. Microseconds of each matrix of an 8B model, alone and rotated as in
`bench.products.int4`; then of whole layers. Kernels that leave something out compute nothing useful.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from bench.common.gpu_timing import copy_bandwidth
from bench.common.on_gpu import require_gpu
from bench.products.int4 import BF16, SHAPES, Key, Work, compile_all, label, streams
from runner_svc.cuda import module
from runner_svc.cuda.int4.few_rows import Variant
from runner_svc.cuda.int4.int4_variant import Int4Variant
from runner_svc.cuda.int4.packed_matrix import STEP, TILE_ROWS

TILE_BYTES = 4224
"""Of symmetric groups of 128 columns with scales in bfloat16."""


class Change(NamedTuple):
    """A change of the one place in a header that has the old text."""

    header: str
    old: str
    new: str


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
# The first trial keeps a register that the compiler cannot know, so that it makes no shift of the product.
SHIFTS_BY_PRODUCTS = Change(
    STREAM,
    "a[i] = minus<SCALAR>(raised<SCALAR>(word >> 4 * i), zero[i % 2]);",
    '{ unsigned power = 1u << (32 - 4 * i) % 32, shifted = word; asm("" : "+r"(power)); '
    "if (i > 0) shifted = __umulhi(word, power); a[i] = minus<SCALAR>(raised<SCALAR>(shifted), zero[i % 2]); }",
)
STREAM_TRIALS: Mapping[str, Sequence[Change]] = {
    "whole": (),
    "no products": (NO_PRODUCTS,),
    "no numbers": (NO_NUMBERS,),
    "copies alone": (NO_PRODUCTS, NO_NUMBERS),
    "no copies": (NO_COPIES,),
    "no copies, no numbers": (NO_COPIES, NO_NUMBERS),
    "no copies, no products": (NO_COPIES, NO_PRODUCTS),
    "shifts by products": (SHIFTS_BY_PRODUCTS,),
}
TILE_TRIALS: Mapping[str, Sequence[Change]] = {
    "whole": (),
    "no products": (NO_WARPGROUP_PRODUCTS,),
    "no numbers": (NO_WARPGROUP_NUMBERS,),
    "copies alone": (NO_WARPGROUP_PRODUCTS, NO_WARPGROUP_NUMBERS),
}
TILE_FORMS: Mapping[int, Sequence[tuple[int, int, int]]] = {64: ((2, 2, 1), (4, 1, 1), (2, 1, 2)), 128: ((1, 2, 1),)}
"""Row groups, parts and blocks of `int4_product`'s gate-up, by rows of x."""


@contextmanager
def changed_kernels(changes: Sequence[Change]) -> Iterator[None]:
    """Compiles kernels with changed headers. Raises ValueError unless each old text is there once."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(shutil.copytree(module.kernel_folder(), Path(name, "kernels")))
        for change in changes:
            text = (folder / change.header).read_text("utf-8")
            if text.count(change.old) != 1:
                raise ValueError(f"{change.old!r} is in {change.header} {text.count(change.old)} times")
            (folder / change.header).write_text(text.replace(change.old, change.new), "utf-8")
        digest = hashlib.sha256("".join(change.new for change in changes).encode()).hexdigest()[:16]
        if changes:
            stack.enter_context(patch.object(module, "kernel_folder", lambda: folder))
            stack.enter_context(patch.object(module, "headers_hash", lambda: digest))
        yield


def keys(variants: Sequence[tuple[Variant, str]]) -> list[Key]:
    """Returns what is compiled for the variants and their epilogues."""
    return [(variant, epilogue, BF16, 128, BF16, False) for variant, epilogue in variants]


def tile_variants() -> list[tuple[int, Variant]]:
    """Returns the numbers of rows and the variants whose gate-up is tried."""
    return [
        (
            tokens,
            Int4Variant(tokens, row_groups, parts, 1, 2 if tokens == 64 and row_groups * parts < 3 else 1, TILE_BYTES),
        )
        for tokens, forms in TILE_FORMS.items()
        for row_groups, parts in forms
    ]


def try_streams(work: Work, rows: Sequence[int]) -> None:
    """Prints microseconds of the products of `rows` rows, and of layers with the fastest variants."""
    for name, changes in STREAM_TRIALS.items():
        with changed_kernels(changes):
            chosen = {(shape, tokens): streams(shape, tokens, TILE_BYTES) for shape in SHAPES for tokens in rows}
            compile_all(keys([(one, shape.epilogue) for (shape, _), found in chosen.items() for one in found]))
            for tokens in rows:
                fastest: dict[str, Variant] = {}
                for shape in SHAPES:
                    times = {one: work.product_time(shape, one, tokens) for one in chosen[shape, tokens]}
                    fastest[shape.name] = min(times, key=lambda one: times[one])
                    shown = " ".join(f"{label(one)} {us:.1f}" for one, us in times.items())
                    print(f"T {tokens} {shape.name:7} {name}: {shown}", flush=True)
                layer = work.layer_time(fastest, tokens, LAYERS)
                one_block = {shape.name: chosen[shape, tokens][0] for shape in SHAPES}
                alike = work.layer_time(one_block, tokens, LAYERS)
                print(f"T {tokens} layer {name}: {layer:.1f} us, one block each {alike:.1f} us", flush=True)


def try_tiles(work: Work) -> None:
    """Prints microseconds of `int4_product`'s gate-up."""
    for name, changes in TILE_TRIALS.items():
        with changed_kernels(changes):
            compile_all(keys([(one, SHAPES[0].epilogue) for _, one in tile_variants()]))
            for tokens, variant in tile_variants():
                microseconds = work.product_time(SHAPES[0], variant, tokens)
                print(f"T {tokens} gate-up {label(variant)} {name}: {microseconds:.1f} us", flush=True)


LAYERS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8], help="up to 8")
    parser.add_argument("--seconds", type=float, default=120.0)
    arguments = parser.parse_args()
    require_gpu()
    faulthandler.dump_traceback_later(arguments.seconds, exit=True)
    begin = time.monotonic()
    work = Work(LAYERS)
    print(f"copy {copy_bandwidth():.2f} TB/s, ready after {time.monotonic() - begin:.1f} s", flush=True)
    try_streams(work, arguments.rows)
    try_tiles(work)
    # The kernel of before, for comparison in the same process.
    compared: dict[str, Variant] = {
        shape.name: Int4Variant.timed(1, 8, shape.rows // TILE_ROWS, shape.columns // STEP, TILE_BYTES)
        for shape in SHAPES
    }
    compile_all(keys([(compared[shape.name], shape.epilogue) for shape in SHAPES]))
    print(f"T 8 layer of int4_product: {work.layer_time(compared, 8, LAYERS):.1f} us", flush=True)
    print(f"{time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
