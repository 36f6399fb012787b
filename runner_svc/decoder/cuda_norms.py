"""The norms of a forward pass on a GPU, which also add the product before them."""

from __future__ import annotations

from torch import Tensor

from runner_svc.decoder.hidden import Hidden
from runner_svc.interface.layer_launchers import DecoderLaunchers, RoundingNormLauncher
from runner_svc.interface.products.linear_launchers import Rows
from runner_svc.weights.activation_rounding import Rounding


class CudaNorms:
    """Launches norms of the residual stream."""

    def __init__(self, launchers: DecoderLaunchers, *, ranks_add: bool) -> None:
        """`ranks_add`: products are added up over ranks before a norm adds them."""
        self._launchers = launchers
        self._ranks_add = ranks_add

    def first(self, stream: int, hidden: Hidden, weight: Tensor | None, out: Tensor, takes: Rounding | None) -> Rows:
        """Returns the next product's input: `out` with the normed residual stream, or that itself without a norm.

        If the product `takes` it rounded, and there is such a norm, the input is that.
        """
        if weight is None:
            return hidden.residual
        rounding_norm = self._rounding(takes)
        if takes is not None and rounding_norm is not None:
            return rounding_norm(stream, None, hidden.residual, weight, takes)
        self._launchers.norm.norm(stream, hidden.residual, weight, out)
        return out

    def add(
        self,
        stream: int,
        hidden: Hidden,
        post_norm: Tensor | None,
        weight: Tensor | None,
        out: Tensor,
        takes: Rounding | None = None,
    ) -> Rows:
        """Adds the last product, normed with `post_norm`, to the residual stream; then as `first`."""
        if hidden.last is None:
            return self.first(stream, hidden, weight, out, takes)
        rounding_norm = self._rounding(takes) if post_norm is None else None
        if takes is not None and rounding_norm is not None and weight is not None:
            return rounding_norm(stream, hidden.take_last(hidden.last), hidden.residual, weight, takes)
        if post_norm is not None:
            self._launchers.norm.add_normed(stream, hidden.last, hidden.residual, post_norm, weight, out)
        elif weight is not None:
            self._launchers.norm.add(stream, hidden.last, hidden.residual, weight, out)
        else:
            raise ValueError("a layer without norms has no kernel")
        return out if weight is not None else hidden.residual

    def takes_sums(self, post_norm: Tensor | None, weight: Tensor | None, takes: Rounding | None) -> bool:
        """Returns whether `add` with these scales the sums of the product that it adds."""
        if self._ranks_add:  # products, which their scales are part of
            return False
        return post_norm is None and weight is not None and self._rounding(takes) is not None

    def _rounding(self, takes: Rounding | None) -> RoundingNormLauncher | None:
        launcher = self._launchers.rounding_norm
        return launcher if launcher is not None and takes is not None and launcher.rounds(takes) else None
