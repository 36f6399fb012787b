"""Products of few rows with random 4-bit matrices, and their definition in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runner_svc.cuda.int4.few_rows import Int4Products, Variant
from runner_svc.cuda.int4.int4_variant import Int4Variant
from runner_svc.cuda.int4.packed_matrix import STEP, TILE_ROWS, PackedInt4Matrix, packed
from runner_svc.cuda.int4.stream_variant import StreamVariant
from runner_svc.cuda.int4.wide_variant import WideVariant
from runner_svc.interface.products.skinny_launchers import MAX_ROWS, ScaledRows
from runner_svc.weights.int4_matrix import Int4Matrix
from runner_svc.weights.int4_packing import pack_pairs

EPS = 1e-5
STORE, GATED, ADD = "EPILOGUE_STORE", "EPILOGUE_GATED", "EPILOGUE_RESIDUAL"


@dataclass(frozen=True, slots=True)
class MatrixCase:
    """A matrix's size and format."""

    rows: int
    columns: int
    group: int = 128
    has_zeros: bool = False
    scale: torch.dtype = torch.bfloat16
    has_order: bool = False

    def matrix(self, device: str) -> Int4Matrix:
        """Returns random codes, with scales of which some are outliers, some negative and some zero."""
        groups = -(-self.columns // self.group)
        codes = torch.randint(0, 16, (self.rows, self.columns), dtype=torch.uint8, device=device)
        scales = torch.randn(self.rows, groups, device=device) * 0.02
        scales[::7, 0] = 1.5
        scales[::5, groups // 2] = 0.0
        zeros = None
        if self.has_zeros:
            zeros = torch.randint(0, 16, (self.rows, groups), dtype=torch.uint8, device=device)
        order = torch.randperm(self.columns, device=device) if self.has_order else None
        return Int4Matrix(pack_pairs(codes), scales.to(self.scale), zeros, self.group, self.columns, order)

    def packed(self, device: str) -> tuple[Int4Matrix, PackedInt4Matrix]:
        """Returns the matrix in both layouts."""
        matrix = self.matrix(device)
        in_tiles = packed(matrix)
        assert in_tiles is not None
        return matrix, in_tiles


@dataclass(frozen=True, slots=True)
class ProductCase:
    """A product; `form` is row groups, parts, split and blocks of its variant.

    With `wide`, the kernel is that of many rows, for this number of multiprocessors, or as `division` says: rows of x,
    warpgroups and split, in equal shares with `shares`. With `stream`, it is that of streams.
    """

    tokens: int
    case: MatrixCase
    epilogue: str
    form: tuple[int, int, int, int] = (1, 1, 1, 1)
    sharers: int = 1
    by_warps: bool = False
    prefetched: int = 0
    wide: int = 0
    division: tuple[int, int, int] | None = None
    shares: bool = False
    stream: int = 0

    @property
    def is_wide(self) -> bool:
        """Whether the kernel is that of many rows, which rounds weights."""
        return self.wide > 0 or self.division is not None

    @property
    def variant(self) -> Variant:
        bytes_of_group = 64 * (self.case.scale.itemsize + self.case.has_zeros)
        tile_bytes = 4096 + 128 // min(self.case.group, 128) * bytes_of_group
        sizes = (self.tokens, -(-self.case.rows // TILE_ROWS), -(-self.case.columns // STEP), tile_bytes, self.epilogue)
        if self.division:
            return WideVariant(*self.division, tile_bytes, self.epilogue == GATED, self.shares)
        if self.wide:
            return WideVariant.choose(self.wide, *sizes)
        if self.stream:
            return StreamVariant.choose(self.stream, *sizes[1:])
        tokens = next(tokens for tokens in (8, 16, 32, 64, 128) if tokens >= self.tokens)
        return Int4Variant(
            tokens,
            *self.form,
            tile_bytes,
            sharers=self.sharers,
            prefetched=self.prefetched,
            by_warps=self.by_warps,
        )

    def check(self, device: str, stream: int) -> None:
        """Runs the product into poisoned outputs and compares with float64."""
        matrix, in_tiles = self.case.packed(device)
        assert in_tiles.tiles.shape[2] == self.variant.tile_bytes
        x = torch.randn(self.tokens, self.case.columns, device=device).to(torch.bfloat16)
        x[:, 3] *= 50
        bias = torch.randn(self.case.rows, device=device).to(torch.bfloat16)
        weights = matrix.dequantized()
        if self.is_wide:
            weights = weights.to(torch.bfloat16)
        product = x.double() @ weights.double().t()
        products = Int4Products(EPS, "silu", lambda *sizes: self.variant)
        if self.epilogue == ADD:
            self._check_addition(products, stream, x, in_tiles, bias, product)
        else:
            self._check_output(products, stream, x, in_tiles, bias, product)

    def _check_output(
        self,
        products: Int4Products,
        stream: int,
        x: Tensor,
        matrix: PackedInt4Matrix,
        bias: Tensor,
        product: Tensor,
    ) -> None:
        squares, scale = None, torch.ones(1, device=x.device).double()
        if self.tokens <= MAX_ROWS:
            squares = torch.rand(3, MAX_ROWS, device=x.device) * self.case.columns
            scale = torch.rsqrt(squares.sum(dim=0)[: self.tokens] / self.case.columns + EPS).double()
        limit = 2e-5 if self.is_wide else 2e-6  # sums of all columns are longer chains than those of groups
        expected = product * scale.unsqueeze(1) + bias.double()
        if self.epilogue == GATED:
            gate, up = expected.chunk(2, dim=-1)
            expected, limit = torch.nn.functional.silu(gate) * up, 4e-3
        width = expected.shape[1]
        dtype = torch.bfloat16 if self.epilogue == GATED else torch.float32
        out = torch.full((self.tokens + 1, width + 64), torch.nan, dtype=dtype, device=x.device)
        products.launch(stream, self.epilogue, ScaledRows(x, squares), matrix, out[:-1, :width], bias)
        assert relative_error(out[:-1, :width], expected) < limit
        assert out[-1].isnan().all()
        assert out[:, width:].isnan().all()

    def _check_addition(
        self,
        products: Int4Products,
        stream: int,
        x: Tensor,
        matrix: PackedInt4Matrix,
        bias: Tensor,
        product: Tensor,
    ) -> None:
        rows, poison = self.case.rows, torch.full((self.tokens + 1, self.case.rows), torch.nan, device=x.device)
        residual = torch.randn(self.tokens, rows, device=x.device).to(torch.bfloat16)
        norm_weight = torch.randn(rows, device=x.device).to(torch.bfloat16)
        squares = torch.full((-(-rows // self.variant.outputs) + 1, MAX_ROWS), torch.nan, device=x.device)
        out = poison.to(torch.bfloat16)
        expected = residual.double() + product + bias.double()
        given = ScaledRows(x, None)
        products.launch(stream, ADD, given, matrix, out[:-1], bias, residual, norm_weight, squares)
        assert relative_error(residual, expected) < 4e-3
        assert torch.equal(out[:-1], (residual.float() * norm_weight.float()).to(torch.bfloat16))
        assert out[-1].isnan().all()
        sums = squares[:-1, : self.tokens].sum(dim=0)
        torch.testing.assert_close(sums, residual.float().square().sum(dim=1), rtol=1e-4, atol=0.0)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference over that of `expected`."""
    return float((actual.double() - expected).norm() / expected.norm())
