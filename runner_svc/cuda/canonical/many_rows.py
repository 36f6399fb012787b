"""Launches kernels/canonical_product.cu: many rows in the canonical order, with the bits of few. Only for Hopper."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from runner_svc.cuda.activation import ACTIVATIONS
from runner_svc.cuda.canonical.many_variant import SQUARES_COLUMNS, ManyVariant, kept_floats
from runner_svc.cuda.kernel import Kernel, address_of
from runner_svc.cuda.module import DTYPE_DEFINES, load, num_multiprocessors
from runner_svc.cuda.products.gated_variant import STEP, VECTOR
from runner_svc.cuda.products.skinny_variant import canonical_parts, num_tiles
from runner_svc.cuda.tensor_map import PLANE, heads_map
from runner_svc.interface.products.canonical_launchers import NormedRows

Choose = Callable[[str, int, int, int, int], ManyVariant]
"""Returns the variant for ends, rows of x, rows of the matrix's first half, columns of x, and their parts."""

Key = tuple[ManyVariant, str, torch.dtype, bool]
"""A kernel: its variant, ends, type of outputs, and whether there are biases."""

_GATED, _STORE, _RESIDUAL = "ENDS_GATED", "ENDS_STORE", "ENDS_RESIDUAL"
_MAX_KEPT = 16384
_MOST_CONSUMERS = 3


class ManyRows:
    """Products of one model, for any number of rows of x; they pay off above 128."""

    def __init__(
        self, eps: float, activation: str, choose: Choose, device: torch.device, *, overlap: bool = False
    ) -> None:
        """`choose` selects variants. Raises KeyError for an unknown activation."""
        self._eps, self._overlap = eps, overlap
        self._activation = ACTIVATIONS[activation]
        self._choose = lru_cache(_MAX_KEPT)(choose)
        self._kernel = lru_cache(None)(self._compile)
        self._map = lru_cache(_MAX_KEPT)(_matrix_map)
        # Sums of parts, and flags of tiles whose sums are there: zero between launches.
        self._room = torch.empty(kept_floats(num_multiprocessors()), dtype=torch.float32, device=device)
        self._flags = torch.zeros(num_multiprocessors() * _MOST_CONSUMERS, dtype=torch.int32, device=device)

    def fits(self, weight: Tensor) -> bool:
        """Returns whether the kernel supports this matrix [n, width], which it reads in two halves of rows."""
        return weight.is_contiguous() and weight.shape[0] % (2 * VECTOR) == 0 and weight.shape[1] % STEP == 0

    def gated(self, stream: int, x: NormedRows, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """Computes out = activation(norm(x) G^T) * (norm(x) U^T), [T, n]; the weight is G above U.

        Here and in the other products, `bias` is added to norm(x) W^T.
        """
        self._launch(stream, _GATED, x, weight, out, bias=bias)

    def store(self, stream: int, x: NormedRows, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """Computes out = norm(x) W^T, bfloat16 or float32 [T, n]."""
        self._launch(stream, _STORE, x, weight, out, bias=bias)

    def add(
        self,
        stream: int,
        x: NormedRows,
        weight: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        out: Tensor,
        squares: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """Computes residual += norm(x) W^T and out = residual * norm_weight, [T, n].

        `squares` [row tiles, tiles, 128] gets the residual's sums of squares.
        """
        self._launch(stream, _RESIDUAL, x, weight, out, residual, norm_weight, squares, bias)

    def key(self, ends: str, num_tokens: int, size: tuple[int, int], out: torch.dtype, has_bias: bool) -> Key:
        """Returns the key of the kernel for `num_tokens` rows and a matrix of this size."""
        return self._chosen(ends, num_tokens, size), ends, out, has_bias

    def compile(self, key: Key) -> None:
        """Compiles a kernel; may be called from any thread."""
        self._kernel(*key)

    def _chosen(self, ends: str, num_tokens: int, size: tuple[int, int]) -> ManyVariant:
        return self._choose(ends, num_tokens, _half(ends, size[0]), size[1], canonical_parts(*size))

    def _launch(
        self,
        stream: int,
        ends: str,
        x: NormedRows,
        weight: Tensor,
        out: Tensor,
        residual: Tensor | None = None,
        norm_weight: Tensor | None = None,
        new_squares: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        (num_tokens, width), outputs = x.rows.shape, weight.shape[0]
        variant, half = self._chosen(ends, num_tokens, (outputs, width)), _half(ends, outputs)
        tile = variant.tile
        rows, columns = tile.tiles(num_tokens, half)
        clusters = min(rows * columns * variant.split, num_multiprocessors() // tile.cluster)
        self._kernel(variant, ends, out.dtype, bias is not None)(
            stream,
            clusters * tile.cluster,
            self._map(x.rows.data_ptr(), num_tokens, width, tile.input_rows),
            self._map(weight.data_ptr(), outputs, width, tile.columns),
            out.data_ptr(),
            width // STEP,
            num_tokens,
            half,
            outputs,
            rows,
            columns,
            tile.group,
            address_of(x.squares),
            num_tiles(width),
            1.0 / width,
            self._eps,
            address_of(residual),
            address_of(norm_weight),
            address_of(new_squares),
            self._room.data_ptr(),
            self._flags.data_ptr(),
            address_of(bias),
        )

    def _compile(self, variant: ManyVariant, ends: str, dtype: torch.dtype, has_bias: bool) -> Kernel:
        defines = variant.defines | {
            "SCALAR": DTYPE_DEFINES[torch.bfloat16],
            "OUT": DTYPE_DEFINES[dtype],
            "ACTIVATION": self._activation,
            "CANONICAL": 1,
            "ENDS": ends,
            "BIAS": int(has_bias),
        }
        return Kernel(
            load("canonical_product", defines),
            "canonical_product",
            # maps of x and weights; out; steps, rows, half, outputs; rows, columns and group of clusters; squares,
            # tiles, 1 / width, eps; residual, norm, new squares; sums of parts, flags; biases
            "128s128sPiiiiiiiPiffPPPPPP",
            variant.tile.threads,
            shared_bytes=variant.shared_bytes,
            overlap=self._overlap,
        )


def _half(ends: str, outputs: int) -> int:
    """Returns how many of a matrix's rows are in its first half."""
    multiple = {_GATED: 1, _STORE: VECTOR, _RESIDUAL: SQUARES_COLUMNS}[ends]
    return -(-outputs // (2 * multiple)) * multiple


def _matrix_map(address: int, rows: int, width: int, box_rows: int) -> bytes:
    return heads_map(address, width // PLANE, PLANE, rows, width, (box_rows, 1))
