"""The residual stream of a forward pass on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from runner_svc.decoder.cuda_linear import CudaLinear
from runner_svc.interface.products.linear_launchers import Rows, Sums


@dataclass(slots=True, eq=False)
class Hidden:
    """The residual stream and, if the norms do the addition, the last product, which is not yet added."""

    residual: Tensor  # [T, hidden_size]
    last: Tensor | None  # [T, hidden_size]
    # Factor of all products that are added; norms that add have it too.
    multiplier: float = 1.0
    # Whether the next norm takes sums; then `sums` has them in place of `last`, until it has taken them.
    leaves_sums: bool = False
    sums: Sums | None = None
    # Replaces the last product by its sum over all ranks; None: there is one rank.
    add_up: Callable[[Tensor], None] | None = None

    def add(self, stream: int, x: Rows, linear: CudaLinear) -> None:
        """Adds the product of x, or leaves the addition to the next norm."""
        if self.last is not None and self.leaves_sums:
            self.sums = linear.sums(stream, x, self.last)
        elif self.last is not None:
            linear.multiply(stream, x, self.last)
            self.has_last()
        else:
            self.add_now(stream, x, linear)

    def has_last(self) -> None:
        """Sums the last product, which was just written, over all ranks."""
        if self.add_up is not None and self.last is not None:
            self.add_up(self.last)

    def add_now(self, stream: int, x: Rows, linear: CudaLinear) -> None:
        """Adds the product of x. With several ranks, `last` is overwritten."""
        if self.add_up is None or self.last is None:
            linear.add(stream, x, self.residual, self.multiplier)
            return
        linear.multiply(stream, x, self.last)
        self.add_up(self.last)
        self.residual.add_(self.last, alpha=self.multiplier)

    def take_last(self, last: Tensor) -> Sums:
        """Returns the last product, `last` or what took its place, and forgets that."""
        sums, self.sums = self.sums, None
        return sums or Sums(last)

    def select(self, index: Tensor) -> Hidden:
        """Returns a copy of the positions at `index`, int32 [L]."""
        last = self.last.index_select(0, index) if self.last is not None else None
        return Hidden(self.residual.index_select(0, index), last, self.multiplier)

    def slice(self, begin: int, end: int) -> Hidden:
        """Returns a copy of the positions from `begin` to `end`."""
        last = self.last[begin:end].clone() if self.last is not None else None
        return Hidden(self.residual[begin:end].clone(), last, self.multiplier)
