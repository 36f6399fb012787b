"""A forward pass whose bits depend on each position alone: see docs/determinism.md.

It is one pass for any number of positions, and has the launches of `runner_svc.decoder.skinny_decoder`: RMSNorm is
split between the products around it. Logits are computed from the residual stream, 128 rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from runner_svc.decoder.cuda_decoder import CudaDecoder, DeviceInputs, LayerLinears, StepAttention
from runner_svc.decoder.cuda_experts import CudaExpertMlp
from runner_svc.decoder.cuda_mlp import CudaMlp
from runner_svc.decoder.fusions import Adding, Fusions
from runner_svc.decoder.hidden import Hidden
from runner_svc.gpu.canonical.check import Checked, ProductCheck
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.layer_launchers import DecoderLaunchers
from runner_svc.interface.products.canonical_launchers import CanonicalLauncher, NormedRows
from runner_svc.interface.products.linear_launchers import Sums
from runner_svc.interface.ranks import Communicator
from runner_svc.model.config import ModelConfig
from runner_svc.model.families.description import LayerDescription
from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.matrix import Matrix
from runner_svc.weights.model_weights import MlpWeights, ModelWeights
from runner_svc.weights.plain_matrix import PlainMatrix

_ROWS = 8


class CanonicalDecoder(CudaDecoder):
    """A model with Llama's norms in bfloat16; matrices are plain or in FP8, experts plain."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        launchers: DecoderLaunchers,
        products: CanonicalLauncher,
        max_tokens: int,
        ranks: Communicator | None = None,
    ) -> None:
        """`max_tokens` is the maximum number of positions of a forward pass. Raises ValueError for other models.

        `ranks`, if there are several, add up in an order that depends on no row.
        """
        super().__init__(config, weights, launchers, max_tokens, ranks)
        self._padded_head = _padded(self.head.matrix)
        if not has_order(config) or not all(products.fits(matrix) for matrix in self.matrices):
            raise ValueError(
                "canonical products need matrices whose columns are a multiple of 64 and whose rows (experts of a "
                "router, too) are a multiple of 8, plain or in FP8"
            )
        self._products = products
        self.workspace.gate_up = torch.empty(0, dtype=self.dtype, device=self.device)  # no pass uses it
        self._experts = [mlp if isinstance(mlp, CudaExpertMlp) else None for mlp in self.mlps]

    @property
    def matrices(self) -> list[Matrix]:
        """All matrices but the experts'."""
        mlps = [layer.mlp for layer in self.layers if isinstance(layer.mlp, MlpWeights)]
        layers = [linear.matrix for layer in self.layers for linear in (layer.qkv, layer.output)]
        layers += [mlp.router for mlp in self.mlps if isinstance(mlp, CudaExpertMlp)]
        return [*layers, *(linear.matrix for mlp in mlps for linear in (mlp.gate_up, mlp.down)), self._padded_head]

    @property
    def rotations(self) -> list[Tensor]:
        """Cosines and sines of each rotary embedding."""
        return [rope.table for rope in self._ropes]

    def check(self, max_tokens: int) -> bytes:
        """Compiles the products of passes of up to `max_tokens` positions; returns a digest of their bits.

        Raises UnusableSettings if they depend on the number of rows.
        """
        layer = self.layers[0]
        stream = torch.cuda.current_stream(self.device).cuda_stream
        check = ProductCheck(self._products, stream, max_tokens, self.device)
        mlp = next((layer.mlp for layer in self.layers if isinstance(layer.mlp, MlpWeights)), None)
        router = next((experts.router for experts in self._experts if experts is not None), None)
        gate_up, down = (mlp.gate_up, mlp.down) if mlp is not None else (None, None)
        head = LinearWeights(self._padded_head)
        router_weights = LinearWeights(router) if router is not None else None
        divided = self.exchanges is not None
        return check.digest(Checked(layer.qkv, layer.output, gate_up, down, head, router_weights, divided))

    @property
    def fusions(self) -> list[Fusions]:
        """One: products add and activate as their order says."""
        return [Fusions()]

    def forward(
        self,
        stream: int,
        inputs: DeviceInputs,
        cache: KVCache,
        attention: StepAttention,
        fusions: Fusions,
        mlps: Sequence[CudaMlp] | None = None,
        linears: LayerLinears | None = None,
    ) -> Hidden:
        """Writes the KV of all positions; returns the input of `logits`, valid until the next forward pass."""
        products, space, num_tokens = self._products, self.workspace, inputs.tokens.shape[0]
        residual, normed = space.residual[:num_tokens], space.normed[:num_tokens]
        attended, activated = space.attended[:num_tokens], space.activated[:num_tokens]
        qkv = space.qkv[:num_tokens]
        firsts = [layer.attention_norm for layer in self.layers]
        for index, layer in enumerate(self.layers):
            first, second = firsts[index], layer.mlp_norm
            following = firsts[index + 1] if index + 1 < len(firsts) else self.norm_weight
            assert first is not None and second is not None and following is not None
            if index == 0:
                x = self._embedded(stream, inputs.tokens, first, residual, normed)
            products.store(stream, x, layer.qkv.matrix, qkv, layer.qkv.bias)
            self.attend(stream, index, Sums(qkv), inputs, cache, attention, attended)
            x = self._added(stream, NormedRows(attended, None), layer.output, residual, second, normed)
            experts = self._experts[index]
            if experts is not None:
                self._add_experts(stream, x, experts, residual)
                x = products.take(stream, residual, None, following, None, normed)
            elif isinstance(layer.mlp, MlpWeights):
                gate_up, down = layer.mlp.gate_up, layer.mlp.down
                x = products.gated(stream, x, gate_up.matrix, activated, gate_up.bias)
                x = self._added(stream, x, down, residual, following, normed)
        return self.hidden(num_tokens, fusions.adding)

    def _embedded(self, stream: int, tokens: Tensor, norm: Tensor, residual: Tensor, normed: Tensor) -> NormedRows:
        """Fills `residual` with embeddings; returns the input of the first product, in `normed`."""
        if self.exchanges is None:
            return self._products.take(stream, self.embeddings, tokens, norm, residual, normed)
        self.exchanges.embed(stream, tokens, self.embeddings, residual)
        return self._products.take(stream, residual, None, norm, None, normed)

    def _added(
        self, stream: int, x: NormedRows, linear: LinearWeights, residual: Tensor, norm: Tensor, normed: Tensor
    ) -> NormedRows:
        """Adds a product to `residual`; returns the next one's input, in `normed`."""
        if self.exchanges is None:
            return self._products.add(stream, x, linear.matrix, residual, norm, normed, linear.bias)
        product = self.workspace.product[: len(residual)]
        self._products.store(stream, x, linear.matrix, product, linear.bias)
        self.exchanges.add_up(product)
        residual.add_(product)
        return self._products.take(stream, residual, None, norm, None, normed)

    def _add_experts(self, stream: int, x: NormedRows, experts: CudaExpertMlp, residual: Tensor) -> None:
        """Adds the experts of x to `residual`."""
        space, count = self.workspace.experts, len(x.rows)
        assert space is not None
        self._products.store(stream, x, experts.router, space.logits[:count])
        self._products.scales(stream, x, space.plan.rows(count).scales)
        experts.add_in_order(stream, x.rows, residual)

    def hidden(self, num_tokens: int, adding: Adding) -> Hidden:
        """Returns the residual stream that the last `forward`, of `num_tokens` positions, left."""
        return Hidden(self.workspace.residual[:num_tokens], None)

    def logits(self, stream: int, hidden: Hidden, out: Tensor) -> None:
        """Fills `out`, float32 [L, vocab_size]; L may be more than the positions of a pass."""
        width, most = self._padded_head.size[0], len(self.workspace.normed)
        is_padded = width != out.shape[1]
        for begin in range(0, len(out), most):
            rows, own = hidden.residual[begin : begin + most], out[begin : begin + most]
            normed = torch.empty_like(rows)
            x = self._products.take(stream, rows, None, self.norm_weight, None, normed)
            if self.exchanges is not None:  # whose parts of the head need no padding
                self.exchanges.logits(partial(self._store_head, stream, x), own)
                continue
            stored = torch.empty(len(rows), width, device=self.device) if is_padded else own
            self._products.store(stream, x, self._padded_head, stored)
            if is_padded:
                own.copy_(stored[:, : out.shape[1]])

    def _store_head(self, stream: int, x: NormedRows, out: Tensor) -> None:
        self._products.store(stream, x, self._padded_head, out)

    def compile_products(self, max_tokens: int) -> None:
        """Does nothing: they were compiled when the decoder was made."""


def has_order(config: ModelConfig) -> bool:
    """Returns whether all of the model's layers have a canonical order: Llama's, and Llama's with biases."""

    def plain(layer: LayerDescription) -> bool:
        mlp = replace(layer.mlp, bias=False)
        return replace(layer, qkv_bias=False, output_bias=False, mlp=mlp).is_plain

    return config.model.is_plain and all(plain(layer) for layer in config.layers)


def _padded(matrix: Matrix) -> Matrix:
    """Returns the matrix with rows of zeros up to a multiple of 8, which products need; itself if it has as many."""
    if not isinstance(matrix, PlainMatrix) or matrix.size[0] % _ROWS == 0:
        return matrix
    return PlainMatrix(torch.nn.functional.pad(matrix.weight, (0, 0, 0, -matrix.size[0] % _ROWS)))
