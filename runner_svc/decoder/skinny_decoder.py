"""Decode passes of few rows on a GPU, six launches per layer: products that read weights at full memory bandwidth.

`cuda_decoder` is the same pass with cuBLAS's products, for any number of positions. Here RMSNorm is split between the
products around it. The first adds to the residual stream, multiplies by the norm's weight and stores sums of squares.
The next multiplies by 1 / rms, which commutes with a product. Per layer: QKV product; QK-norm, RoPE and KV write;
attention; output product with addition; gate-up product with activation; down product with addition. In a layer with
experts, the last two are the router's product; routing; the experts' products; weighted sum, addition and norm in one.
For one row, the router's product is part of the output product, and the experts' products route.
"""

from __future__ import annotations

from torch import Tensor

from runner_svc.decoder.cuda_decoder import CudaDecoder, DeviceInputs, StepAttention
from runner_svc.decoder.cuda_experts import CudaExpertMlp
from runner_svc.decoder.cuda_mlp import DenseCudaMlp
from runner_svc.decoder.fusions import Activating
from runner_svc.decoder.hidden import Hidden
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.products.linear_launchers import Rows, Sums
from runner_svc.interface.products.skinny_launchers import ProductLauncher, ScaledRows, SkinnyLaunchers, TileSums
from runner_svc.model.families.description import MlpDescription
from runner_svc.weights.matrix import Matrix
from runner_svc.weights.model_weights import MlpWeights


class SkinnyDecoder:
    """Decode passes with the weights and the workspace of a `CudaDecoder` of a plain model."""

    def __init__(self, decoder: CudaDecoder, launchers: SkinnyLaunchers) -> None:
        self._decoder = decoder
        self._launchers = launchers
        self._attention_norms = [layer.attention_norm for layer in decoder.layers if layer.attention_norm is not None]
        self._eps = decoder.config.norm_eps
        self._mlp_norms = [layer.mlp_norm for layer in decoder.layers if layer.mlp_norm is not None]
        self._sums = TileSums.allocate(decoder.config.hidden_size, decoder.device)
        self._activated_sums = TileSums.allocate(decoder.config.intermediate_size, decoder.device)

    def decode(
        self, stream: int, inputs: DeviceInputs, cache: KVCache, attention: StepAttention, logits: Tensor
    ) -> None:
        """Writes the KV of all positions, at most MAX_ROWS, and fills `logits`, float32 [T, vocab_size]."""
        decoder, products, sums = self._decoder, self._launchers.products, self._sums
        space, num_tokens = decoder.workspace, inputs.tokens.shape[0]
        residual, normed = space.residual[:num_tokens], space.normed[:num_tokens]
        attended, activated = space.attended[:num_tokens], space.activated[:num_tokens]
        qkv = space.qkv[:num_tokens]
        first_norm = self._attention_norms[0]
        x = self._launchers.embed(stream, inputs.tokens, decoder.embeddings, first_norm, residual, normed, sums)
        norms = zip(self._mlp_norms, (*self._attention_norms[1:], decoder.norm_weight), strict=True)
        for index, (layer, mlp, (mlp_norm, next_norm)) in enumerate(
            zip(decoder.layers, decoder.mlps, norms, strict=True)
        ):
            decoder.tap(index, residual)
            products.store(stream, x, layer.qkv.matrix, qkv)
            decoder.attend(stream, index, Sums(qkv), inputs, cache, attention, attended)
            x, ends = ScaledRows(attended, None), (layer.output.matrix, residual, mlp_norm, normed, sums)
            router = mlp.router_parts if isinstance(mlp, CudaExpertMlp) and num_tokens == 1 else None
            if router is None:
                x = products.add(stream, x, *ends)
            else:
                x = products.add_and_route(stream, x, *ends, router)
            if isinstance(mlp, CudaExpertMlp):
                x = mlp.add_and_norm(stream, x, products, residual, next_norm, normed, self._eps)
            elif isinstance(layer.mlp, MlpWeights):
                x = products.gated(stream, x, layer.mlp.gate_up.matrix, activated, self._activated_sums)
                x = products.add(stream, x, layer.mlp.down.matrix, residual, next_norm, normed, sums)
        products.store(stream, x, decoder.head.matrix, logits)


class SkinnyMlp:
    """MLP with the skinny gate-up product, activation included, and optionally the skinny down product.

    For large matrices cuBLAS uses the memory's bandwidth as well, and attention is faster between cuBLAS's products.
    The only gain is then the saved launch.
    """

    def __init__(self, decoder: CudaDecoder, mlp: DenseCudaMlp, products: ProductLauncher, *, own_down: bool) -> None:
        self._workspace = decoder.workspace
        self._gate_up, self._down = mlp.gate_up, mlp.down
        self._products = products
        self._own_down = own_down
        self._sums = TileSums.allocate(mlp.down.matrix.size[1], decoder.device)

    def takes(self, rows: int) -> None:
        """Returns None."""

    def __call__(self, stream: int, normed: Tensor, hidden: Hidden, activating: Activating) -> None:
        """Like `CudaMlp`, for at most MAX_ROWS positions. The next norm adds a skinny down product."""
        activated = self._workspace.activated[: len(normed)]
        rows = ScaledRows(normed, None)
        rows = self._products.gated(stream, rows, self._gate_up.matrix, activated, self._sums)
        if self._own_down and hidden.last is not None:
            self._products.store(stream, rows, self._down.matrix, hidden.last)
            hidden.has_last()
        else:
            hidden.add(stream, activated, self._down)


class FewRowLinears:
    """A `LinearLauncher` of these products, for at most MAX_ROWS rows and matrices without biases."""

    def __init__(self, products: ProductLauncher) -> None:
        self._products = products

    def adds(self, matrix: Matrix) -> bool:
        """Returns False."""
        return False

    def takes(self, matrix: Matrix, rows: int) -> None:
        """Returns None."""

    def multiply(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, out: Tensor) -> None:
        """Fills `out` [T, out]. Raises TypeError for a bias or quantized rows."""
        if bias is not None or not isinstance(x, Tensor):
            raise TypeError("products of few rows have no biases, and take numbers")
        self._products.store(stream, ScaledRows(x, None), matrix, out)

    def add(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, total: Tensor, factor: float) -> None:
        """Raises TypeError: these products add in a norm."""
        raise TypeError("products of few rows do not add by themselves")


def skinny_mlps(decoder: CudaDecoder, products: ProductLauncher, *, own_down: bool) -> list[SkinnyMlp]:
    """Returns the MLPs of all layers."""
    return [
        SkinnyMlp(decoder, mlp, products, own_down=own_down) for mlp in decoder.mlps if isinstance(mlp, DenseCudaMlp)
    ]


def matrices(decoder: CudaDecoder) -> list[Matrix] | None:
    """Returns the matrices that these products would multiply with, or None where they support none.

    That is all matrices of a plain model, and of another those of its MLPs, if they have gates and no biases.
    """
    config = decoder.config
    dense = all(
        isinstance(layer.mlp, MlpDescription) and layer.mlp.gated and not layer.mlp.bias for layer in config.layers
    )
    if not dense and not config.is_plain:
        return None
    mlps = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, MlpWeights)]
    found = [linear.matrix for mlp in mlps for linear in (mlp.gate_up, mlp.down)]
    if config.is_plain:
        found += [linear.matrix for layer in decoder.layers for linear in (layer.qkv, layer.output)]
        found += [mlp.router for mlp in decoder.mlps if isinstance(mlp, CudaExpertMlp)]
        found.append(decoder.head.matrix)
    return found
