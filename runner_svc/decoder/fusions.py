"""Operations fused into the products of a forward pass on a GPU. The fastest set depends on the model and the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Adding(Enum):
    """Where output and down products are added to the residual stream."""

    NORMS = "norms"
    """In the norm after a product; the norm then reads two tensors and writes two."""
    PRODUCTS = "products"
    """In cuBLAS, while a product is in registers; the norm then reads one tensor and writes one."""


class Activating(Enum):
    """Where the activation between the gate-up and the down product is computed."""

    KERNEL = "kernel"
    """In a separate kernel, which reads the gate and up that cuBLAS wrote."""
    PRODUCT = "product"
    """In a custom gate-up product, while both are in registers."""
    GATHERING_PRODUCT = "gathering product"
    """In one that also reads the rows of experts where they are. Only for mixtures of experts."""


_ACTIVATING_NAMES = {
    Activating.KERNEL: "",
    Activating.PRODUCT: ", own gate-up",
    Activating.GATHERING_PRODUCT: ", own gathering gate-up",
}


@dataclass(frozen=True, slots=True)
class Fusions:
    """A choice of where to add and where to activate."""

    adding: Adding = Adding.NORMS
    activating: Activating = Activating.KERNEL
    splitting: bool = False
    """Whether output products, and without experts QKV and down, are ours, whose blocks share tiles, where they fit."""

    @property
    def count(self) -> int:
        """Number of fused operations; of own products without one, none."""
        return (self.adding is Adding.PRODUCTS) + (self.activating is not Activating.KERNEL)

    @property
    def name(self) -> str:
        """Name in logs."""
        adding = ", adding" if self.adding is Adding.PRODUCTS else ""
        return f"cuBLAS{adding}" + _ACTIVATING_NAMES[self.activating] + (", split products" if self.splitting else "")
