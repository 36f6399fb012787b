"""A layer's mixture of experts on a GPU.

Per layer: the router's product with float32 logits; routing, which also sorts rows by expert; a copy of the rows in
that order, unless they are few, or gate-up products gather them; gate-up products with activation; down products; the
weighted sum, which adds up each row's experts in the order in which the router chose them. What depends on the routing
stays on the device, so that steps can be captured. The products are ours, which read each active expert's weights once,
or torch's grouped ones with a kernel for the activation. `mlp` is the counterpart on the CPU.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.decoder.cuda_linear import CudaLinear
from runner_svc.decoder.fusions import Activating
from runner_svc.decoder.hidden import Hidden
from runner_svc.interface.products.expert_launchers import (
    FEW_ROWS,
    ExpertLaunchers,
    ExpertPlan,
    ExpertProductLauncher,
    LoneRow,
    RowNorm,
)
from runner_svc.interface.products.linear_launchers import LinearLauncher
from runner_svc.interface.products.skinny_launchers import MAX_ROUTED, ProductLauncher, RouterParts, ScaledRows
from runner_svc.model.families.experts_config import ExpertsConfig
from runner_svc.weights.expert_weights import ExpertWeights
from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.matrix import Matrix
from runner_svc.weights.model_weights import LayerWeights
from runner_svc.weights.plain_matrix import PlainMatrix

# Rows of an expert, on average, from which tiles are faster.
_TILES_FROM = 16


class ExpertSpace:
    """Intermediate tensors of the experts of one model, for passes of up to `max_tokens` positions."""

    def __init__(
        self, config: ExpertsConfig, hidden_size: int, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def empty(rows: int, width: int) -> Tensor:
            return torch.empty(rows, width, dtype=dtype, device=device)

        pairs = max_tokens * config.top_k
        self.plan = ExpertPlan.allocate(config.num_experts, config.top_k, max_tokens, FEW_ROWS, device)
        columns = config.num_experts + (config.shared_width is not None and config.shared_gate)
        self.logits = torch.empty(max_tokens, columns, dtype=torch.float32, device=device)
        # Parts of a lone row's logits, of 64 columns of the row each.
        self.lone_logits = torch.empty(-(-hidden_size // 64), columns, dtype=torch.float32, device=device)
        self.rows = empty(pairs, hidden_size)  # sorted by expert; the products' input, then their output
        self.activated = empty(pairs, config.width)
        shared_width = config.shared_width or 0
        self.shared_gate_up = empty(max_tokens, 2 * shared_width)
        self.shared_activated = empty(max_tokens, shared_width)
        self.shared = empty(max_tokens if shared_width else 0, hidden_size)


class CudaExpertMlp:
    """The experts of one layer; as `runner_svc.decoder.cuda_mlp.CudaMlp`."""

    def __init__(
        self,
        config: ExpertsConfig,
        weights: ExpertWeights,
        launchers: ExpertLaunchers,
        space: ExpertSpace,
        linear: LinearLauncher,
    ) -> None:
        """`linear` multiplies with the router and the shared expert.

        Raises TypeError for experts that are quantized: see `with_plain_experts`.
        """
        self._config = config
        self._weights = weights
        self._gate_up, self._down = weights.gate_up.weight, weights.down.weight
        self._launchers = launchers
        self._space = space
        router = weights.router
        # The gate of a shared expert is one more column of the logits.
        self._gate = weights.shared.gate if weights.shared is not None else None
        self._router = PlainMatrix(
            router.weight if self._gate is None else torch.cat([router.weight, self._gate.to(router.weight.dtype)])
        )
        self._linear_router = CudaLinear(LinearWeights(self._router), linear)
        shared = weights.shared
        self._shared_gate_up = CudaLinear(shared.gate_up, linear) if shared is not None else None
        self._shared_down = CudaLinear(shared.down, linear) if shared is not None else None
        self._may_enter = shared is None and router.weight.dtype is self._gate_up.dtype
        # A router has biases or corrections, and its configuration says which.
        self._router_bias = router.bias.float() if router.bias is not None else weights.corrections

    def takes(self, rows: int) -> None:
        """Returns None."""

    @property
    def router(self) -> Matrix:
        """The router's matrix, with the gate of a shared expert behind it."""
        return self._router

    def add_and_norm(
        self,
        stream: int,
        x: ScaledRows,
        products: ProductLauncher,
        residual: Tensor,
        norm_weight: Tensor,
        out: Tensor,
        eps: float,
    ) -> ScaledRows:
        """Adds the experts of x [T, hidden_size] to `residual`, and returns `out` with the next norm's rows.

        The router's product is one of `products`, so T is at most their maximum, unless x has its logits. `out` may be
        the rows of x. There must be no shared expert.
        """
        rows, space, launchers = len(residual), self._space, self._launchers
        product, plan, logits = self._own_product(rows), space.plan.rows(rows), space.logits[:rows]
        norm = RowNorm(x.squares, x.rows.shape[1], eps) if x.squares is not None else None
        lone = None
        if rows > 1:
            products.store(stream, x, self._router, logits)
            launchers.routing(stream, logits, self._router_bias, plan, product.job_rows, norm)
        else:
            if x.logits is None:
                products.store(stream, ScaledRows(x.rows, None), self._router, logits)
            lone = LoneRow(logits if x.logits is None else x.logits, self._router_bias, norm)
        y = self._own(stream, product, x.rows, plan, scaled=norm is not None, lone=lone)
        launchers.rows.combine_norm(stream, y, self._weights.down_bias, plan, residual, norm_weight, out, eps)
        return ScaledRows(out, None)

    def add_in_order(self, stream: int, rows: Tensor, residual: Tensor) -> None:
        """Adds the experts of `rows` [T, hidden_size] to `residual`, with bits that depend on each row alone.

        The space has the rows' logits, and the plan the factors by which they are yet to be multiplied. There must be
        no shared expert.
        """
        count, space, launchers = len(rows), self._space, self._launchers
        product, plan = self._own_product(count), space.plan.rows(count)
        launchers.routing(stream, space.logits[:count], self._router_bias, plan, product.job_rows)
        y = self._own(stream, product, rows, plan, scaled=True)
        launchers.rows.combine(stream, y, self._weights.down_bias, plan, residual, adds=True)

    @property
    def router_parts(self) -> RouterParts | None:
        """The router for the product before a lone row's pass, or None if it has too many experts for that."""
        weight = self._router.weight
        return RouterParts(weight, self._space.lone_logits) if len(weight) <= MAX_ROUTED else None

    def __call__(self, stream: int, normed: Tensor, hidden: Hidden, activating: Activating) -> None:
        """Adds the experts of `normed` [T, hidden_size] to `hidden`; the products are ours where they activate."""
        y, plan, logits = self._outputs(stream, normed, activating)
        shared = self._shared(stream, normed)
        self._launchers.rows.combine(
            stream,
            y,
            self._weights.down_bias,
            plan,
            hidden.residual if hidden.last is None else hidden.last,
            adds=hidden.last is None,
            shared=shared,
            gates=logits[:, self._config.num_experts :] if self._gate is not None else None,
        )

    def add_to_normed(
        self,
        stream: int,
        normed: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        activating: Activating,
    ) -> None:
        """Adds the experts of `normed` [T, hidden_size] to `residual`, whose next norm `normed` becomes.

        There must be no shared expert.
        """
        y, plan, _ = self._outputs(stream, normed, activating)
        bias = self._weights.down_bias
        self._launchers.rows.combine_norm(stream, y, bias, plan, residual, norm_weight, normed, eps)

    def enters(self, rows: int, activating: Activating) -> bool:
        """Returns whether `enter_and_norm` is for a step of `rows` rows."""
        entry, products = self._launchers.entry, self._launchers.entering
        return (
            entry is not None
            and products is not None
            and self._may_enter
            and activating is Activating.GATHERING_PRODUCT
            and uses_tiles(self._config, rows)
            and entry.fits(rows)
            and products.job_rows >= 1.5 * self._share(rows)  # few experts have a second job
        )

    def enter_and_norm(
        self,
        stream: int,
        product: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        normed: Tensor,
        next_norm: Tensor,
        eps: float,
    ) -> None:
        """Adds `product`, then the experts of its norm, to `residual`, whose next norm `normed` becomes.

        Only for steps that it `enters`.
        """
        launchers, plan = self._launchers, self._space.plan.rows(len(residual))
        if launchers.entry is None or launchers.entering is None:
            raise TypeError("the model has no launcher for what is before its experts")
        router, bias = self._router.weight, self._router_bias
        launchers.entry(stream, product, residual, norm_weight, normed, router, bias, plan, self._gate_up, eps)
        y = self._own(stream, launchers.entering, normed, plan)
        launchers.rows.combine_norm(stream, y, self._weights.down_bias, plan, residual, next_norm, normed, eps)

    def _outputs(self, stream: int, normed: Tensor, activating: Activating) -> tuple[Tensor, ExpertPlan, Tensor]:
        """Returns the sorted rows [T * k, hidden_size] after both products, their plan, and the router's product."""
        rows, space, launchers = len(normed), self._space, self._launchers
        uses_grouped = activating is Activating.KERNEL and launchers.has_grouped
        product = None if uses_grouped else self._own_product(rows, gathers=activating is Activating.GATHERING_PRODUCT)
        logits, plan = space.logits[:rows], space.plan.rows(rows)
        self._linear_router.multiply(stream, normed, logits)
        job_rows = product.job_rows if product is not None else FEW_ROWS
        launchers.routing(stream, logits[:, : self._config.num_experts], self._router_bias, plan, job_rows)
        y = self._grouped(stream, normed, plan) if product is None else self._own(stream, product, normed, plan)
        return y, plan, logits

    def _own_product(self, rows: int, *, gathers: bool = False) -> ExpertProductLauncher:
        """Returns the variant whose jobs hold about twice an expert's share of the rows, or tiles for large shares."""
        products, share = self._launchers.products, self._share(rows)
        if uses_tiles(self._config, rows):
            return self._launchers.gathering if gathers else self._launchers.tiles
        return next((product for product in products if product.job_rows >= 2 * share), products[-1])

    def _share(self, rows: int) -> float:
        """Returns the rows of an expert, on average."""
        return rows * self._config.top_k / self._config.num_experts

    def _own(
        self,
        stream: int,
        product: ExpertProductLauncher,
        normed: Tensor,
        plan: ExpertPlan,
        *,
        scaled: bool = False,
        lone: LoneRow | None = None,
    ) -> Tensor:
        """Returns the sorted rows [T * k, hidden_size] after both products."""
        space, pairs = self._space, len(plan.pairs)
        x, is_sorted = normed, len(normed) > FEW_ROWS and not product.gathers
        if is_sorted:
            x = space.rows[:pairs]
            self._launchers.rows.gather(stream, normed, plan, x)
        activated = space.activated[:pairs]
        bias = self._weights.gate_up_bias
        product.gated(stream, x, self._gate_up, bias, plan, activated, is_sorted=is_sorted, scaled=scaled, lone=lone)
        product.store(stream, activated, self._down, plan, space.rows[:pairs], lone)
        return space.rows[:pairs]

    def _grouped(self, stream: int, normed: Tensor, plan: ExpertPlan) -> Tensor:
        """As `_own`, by torch's grouped products."""
        weights, pairs = self._weights, len(plan.pairs)
        x, activated = self._space.rows[:pairs], self._space.activated[:pairs]
        self._launchers.rows.gather(stream, normed, plan, x)
        gate_up = grouped_product(x, self._gate_up, plan.ends)
        self._launchers.rows.activate(stream, gate_up, weights.gate_up_bias, plan, activated)
        return grouped_product(activated, self._down, plan.ends)

    def _shared(self, stream: int, normed: Tensor) -> Tensor | None:
        """Returns the rows [T, hidden_size] of the expert that computes every row, without its gate; None without one.

        Raises TypeError without its activation.
        """
        if self._shared_gate_up is None or self._shared_down is None:
            return None
        activation, rows = self._launchers.shared_activation, len(normed)
        if activation is None:
            raise TypeError("the model has no launcher for its shared expert")
        gate_up, activated = self._space.shared_gate_up[:rows], self._space.shared_activated[:rows]
        self._shared_gate_up.multiply(stream, normed, gate_up)
        activation(stream, gate_up, activated)
        self._shared_down.multiply(stream, activated, self._space.shared[:rows])
        return self._space.shared[:rows]


def with_plain_experts(layer: LayerWeights, dtype: torch.dtype) -> LayerWeights:
    """Returns the layer with its quantized experts as plain ones, which the kernels read; itself if it has none.

    Activations that a format rounds are then not rounded.
    """
    if not isinstance(layer.mlp, ExpertWeights):
        return layer
    gate_up, down = layer.mlp.gate_up.dequantized(dtype), layer.mlp.down.dequantized(dtype)
    return replace(layer, mlp=replace(layer.mlp, gate_up=gate_up, down=down))


def uses_tiles(config: ExpertsConfig, rows: int) -> bool:
    """Returns whether the products of a step of `rows` rows are made for experts with many of them."""
    return rows * config.top_k >= _TILES_FROM * config.num_experts and rows > FEW_ROWS


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Returns [rows, out]: sorted rows x [rows, in], each with its expert's matrix of `weight` [experts, out, in].

    `ends`, int32 [experts], is where each expert's rows end.
    """
    multiply = getattr(functional, "grouped_mm", None) or torch._grouped_mm
    product: Tensor = multiply(x, weight.transpose(1, 2), offs=ends)
    return product
