"""Products of 129 to 1,024 rows with plain matrices by the algorithm of cuBLASLt that is the fastest on this GPU.

The candidates of a shape are timed at its first use outside of a capture, each alone with weights that are not in L2,
which takes about 10 ms; passes run once before they are captured. torch's own product is one of the candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from runner_svc.cuda.products.cublas_lt import (
    WORKSPACE_BYTES,
    Algorithm,
    CublasError,
    LtProduct,
    ProductShape,
    product_shapes,
)
from runner_svc.interface.products.linear_launchers import QuantizedRows, Rows
from runner_svc.weights.matrix import Matrix
from runner_svc.weights.plain_matrix import plain_tensor

FEWEST_ROWS, MOST_ROWS = 129, 1024
_CANDIDATES = 24
_TIMED = 4
_FLUSHED_BYTES = 128 << 20
"""Written between timed products: more than L2 holds."""
_BUSY = 12
"""Writes before the first product, which take longer than the host's launches of those that are timed."""
_WORTH = 0.99
"""Largest share of the time of torch's product with which another is taken."""


class TunedLinear:
    """A `LinearLauncher` of plain matrices."""

    def __init__(self) -> None:
        self._chosen: dict[ProductShape, tuple[LtProduct, Algorithm] | None] = {}
        self._workspace: Tensor | None = None
        self.microseconds: dict[ProductShape, list[float]] = {}
        """Of each timed shape: torch's product, then the candidates."""

    def adds(self, matrix: Matrix) -> bool:
        """Returns True."""
        return True

    def takes(self, matrix: Matrix, rows: int) -> None:
        """Returns None."""

    def multiply(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, out: Tensor) -> None:
        """Fills `out` [T, out]. Raises TypeError for quantized rows."""
        x, weight = _numbers(x), plain_tensor(matrix)
        plain = partial(matrix.multiply, x, bias)
        chosen = self._choice(x, weight, out, plain, adding=False) if bias is None else None
        if chosen is None:
            plain(out)
        else:
            chosen[0].launch(stream, x, weight, out, chosen[1], self._space(x))

    def add(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, total: Tensor, factor: float) -> None:
        """Adds to `total` [T, out]. Raises TypeError for quantized rows."""
        x, weight = _numbers(x), plain_tensor(matrix)
        plain = partial(_add, matrix, x, bias, factor)
        chosen = self._choice(x, weight, total, plain, adding=True) if bias is None else None
        if chosen is None:
            plain(total)
        else:
            chosen[0].launch(stream, x, weight, total, chosen[1], self._space(x), factor)

    def _space(self, x: Tensor) -> Tensor:
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=x.device)
        return self._workspace

    def _choice(
        self, x: Tensor, weight: Tensor, out: Tensor, plain: Callable[[Tensor], None], *, adding: bool
    ) -> tuple[LtProduct, Algorithm] | None:
        """Returns what is faster than torch's product `plain`, if anything is."""
        if not FEWEST_ROWS <= len(x) <= MOST_ROWS or not x.is_contiguous() or not weight.is_contiguous():
            return None
        if x.dtype is not weight.dtype or out.stride(1) != 1:
            return None
        shape = product_shapes(x, weight, out, adding=adding)
        if shape not in self._chosen:
            if torch.cuda.is_current_stream_capturing():
                return None
            self._chosen[shape] = self._tuned(shape, x, weight, out, plain)
        return self._chosen[shape]

    def _tuned(
        self, shape: ProductShape, x: Tensor, weight: Tensor, out: Tensor, plain: Callable[[Tensor], None]
    ) -> tuple[LtProduct, Algorithm] | None:
        flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=x.device)
        scratch = torch.zeros(shape.rows, shape.stride, dtype=out.dtype, device=x.device)[:, : shape.outputs]
        usual = _seconds(partial(plain, scratch), flushed)
        try:
            product = LtProduct(shape)
            candidates = product.algorithms(_CANDIDATES)
        except (CublasError, OSError):
            return None
        times: dict[Algorithm, float] = {}
        for algorithm in candidates:
            launch = partial(self._try, product, x, weight, scratch, algorithm)
            try:
                times[algorithm] = _seconds(launch, flushed)
            except CublasError:
                continue
        self.microseconds[shape] = [1e6 * each for each in (usual, *times.values())]
        if not times:
            return None
        best = min(times, key=times.__getitem__)
        return (product, best) if times[best] < _WORTH * usual else None

    def _try(self, product: LtProduct, x: Tensor, weight: Tensor, out: Tensor, algorithm: Algorithm) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        product.launch(stream, x, weight, out, algorithm, self._space(x))


def _add(matrix: Matrix, x: Tensor, bias: Tensor | None, factor: float, total: Tensor) -> None:
    matrix.add(x, bias, total, factor)


def _seconds(launch: Callable[[], None], flushed: Tensor) -> float:
    """Returns the least time of a launch. The GPU is kept busy until all launches wait for it."""
    times = []
    for _ in range(_BUSY):
        flushed.zero_()
    for _ in range(1 + _TIMED):
        flushed.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        launch()
        end.record()
        times.append((begin, end))
    times[-1][1].synchronize()
    return min(begin.elapsed_time(end) for begin, end in times[1:]) / 1000


def _numbers(x: Rows) -> Tensor:
    if isinstance(x, QuantizedRows):
        raise TypeError("these products take no quantized rows")
    return x
