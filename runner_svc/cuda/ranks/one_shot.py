"""Launches kernels/one_shot_reduce.cu and one_shot_gather.cu: exchanges in one launch, over windows of all ranks."""

from __future__ import annotations

from torch import Tensor

from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import DTYPE_DEFINES, load
from runner_svc.cuda.ranks.exchange_state import DATA_BYTES, MOST_BLOCKS, MOST_RANKS, ExchangeState
from runner_svc.interface.ranks import Shard

_THREADS = 512
_VECTOR_BYTES = 16


class OneShot:
    """Exchanges of one rank. More than `half_bytes` are exchanged by several launches."""

    def __init__(
        self,
        shard: Shard,
        state: ExchangeState,
        half_bytes: int,
        *,
        threads: int = _THREADS,
        most_blocks: int = MOST_BLOCKS,
        overlap: bool = True,
    ) -> None:
        """Compiles nothing yet. Raises ValueError for more ranks than a window has flags for."""
        if shard.size > MOST_RANKS:
            raise ValueError(f"at most {MOST_RANKS} ranks exchange over shared GPU memory, not {shard.size}")
        self.half_bytes = half_bytes // _VECTOR_BYTES * _VECTOR_BYTES
        self.window_bytes = DATA_BYTES + 2 * self.half_bytes
        self._shard, self._state = shard, state
        self._threads, self._most_blocks, self._overlap = threads, most_blocks, overlap
        self._kernels: dict[tuple[str, str | int], Kernel] = {}

    def reduce(self, stream: int, x: Tensor, out: Tensor) -> None:
        """Fills `out` with the sum of all ranks' x, of one shape and type and contiguous; `out` may be x.

        Raises ValueError unless x has a multiple of 16 bytes.
        """
        size, scalar = x.element_size(), DTYPE_DEFINES[x.dtype]
        num_bytes = x.numel() * size
        if num_bytes % _VECTOR_BYTES:
            raise ValueError(f"exchanges are of multiples of {_VECTOR_BYTES} bytes, not {num_bytes}")
        kernel = self._kernel("reduce", scalar)
        for begin in range(0, num_bytes, self.half_bytes):
            vectors = min(self.half_bytes, num_bytes - begin) // _VECTOR_BYTES
            kernel(stream, self._grid(vectors), x.data_ptr() + begin, out.data_ptr() + begin, vectors, *self._places)

    def gather(self, stream: int, x: Tensor, out: Tensor) -> None:
        """Fills `out` [rows, width] with all ranks' x [rows, columns] side by side, cut to `width` columns.

        Both are contiguous, of elements of 4 bytes. Raises ValueError for a row that is wider than a window's half.
        """
        rows, columns = x.shape
        width = out.shape[1]
        vector = next(each for each in (4, 2, 1) if columns % each == 0 and width % each == 0)
        most = self.half_bytes // (4 * columns)
        if not most:
            raise ValueError(f"a row of {4 * columns} bytes does not fit into a window's {self.half_bytes}")
        kernel = self._kernel("gather", vector)
        for begin in range(0, rows, most):
            some = min(most, rows - begin)
            grid = self._grid(some * columns // vector)
            kernel(stream, grid, x[begin].data_ptr(), out[begin].data_ptr(), some, columns, width, *self._places)

    def compile(self, *scalars: str) -> None:
        """Compiles the kernels that sum these types, so that no launch waits for it."""
        for scalar in scalars:
            self._kernel("reduce", scalar)

    def _grid(self, vectors: int) -> int:
        return max(1, min(self._most_blocks, -(-vectors // self._threads)))

    @property
    def _places(self) -> tuple[int, ...]:
        state = self._state
        tensors = (state.windows, state.turns, state.broken, state.abort, state.fault)
        return (self._shard.rank, *(each.data_ptr() for each in tensors), self.half_bytes, state.limit_ns)

    def _kernel(self, kind: str, of: str | int) -> Kernel:
        kernel = self._kernels.get((kind, of))
        if kernel is None:
            defines: dict[str, int | str] = {"RANKS": self._shard.size, "THREADS": self._threads}
            defines["SCALAR" if kind == "reduce" else "VECTOR"] = of
            arguments = ("PPii" if kind == "reduce" else "PPiiii") + "PPPPPqq"
            module = load(f"one_shot_{kind}", defines)
            kernel = Kernel(module, f"one_shot_{kind}", arguments, self._threads, overlap=self._overlap)
            self._kernels[kind, of] = kernel
        return kernel
