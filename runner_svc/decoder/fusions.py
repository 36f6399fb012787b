"""What products of a forward pass on a GPU do beside multiplying. Which is faster depends on the model and the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Adding(Enum):
    """Who adds output and down products to the residual stream."""

    NORMS = "norms"
    """The norm behind a product, which reads two tensors and writes two."""
    PRODUCTS = "products"
    """cuBLAS, where a product is still in registers; the norm reads one tensor and writes one."""


class Activating(Enum):
    """Who computes the activation between the gate-up and the down product."""

    KERNEL = "kernel"
    """A kernel of its own, which reads what cuBLAS wrote: gate and up."""
    PRODUCT = "product"
    """An own gate-up product, where both are still in registers."""


@dataclass(frozen=True, slots=True)
class Fusions:
    """One of each."""

    adding: Adding = Adding.NORMS
    activating: Activating = Activating.KERNEL

    @property
    def count(self) -> int:
        """How much is fused."""
        return (self.adding is Adding.PRODUCTS) + (self.activating is Activating.PRODUCT)

    @property
    def name(self) -> str:
        """As logs have it."""
        adding = ", adding" if self.adding is Adding.PRODUCTS else ""
        return f"cuBLAS{adding}" + (", own gate-up" if self.activating is Activating.PRODUCT else "")
