"""Decode passes of few rows on a GPU, six launches per layer: products that read weights at full memory bandwidth.

`cuda_decoder` is the same pass with cuBLAS's products, for any number of positions. Here RMSNorm is split between the
products around it. The first adds to the residual stream, multiplies by the norm's weight and stores sums of squares.
The next multiplies by 1 / rms, which commutes with a product. Per layer: QKV product; QK-norm, RoPE and KV write;
attention; output product with addition; gate-up product with activation; down product with addition.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from runner_svc.decoder.cuda_decoder import CudaDecoder, DeviceInputs, Hidden, StepAttention
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.skinny_launchers import MAX_ROWS, ProductLauncher, ScaledRows, SkinnyLaunchers
from runner_svc.model.weights import LayerWeights


class SkinnyDecoder:
    """Decode passes with the weights and the workspace of a `CudaDecoder` without biases."""

    def __init__(self, decoder: CudaDecoder, launchers: SkinnyLaunchers) -> None:
        self._decoder = decoder
        self._launchers = launchers
        # One row for each tile of an output or down matrix; tiles have at least 64 rows.
        tiles = -(-decoder.config.hidden_size // 64)
        self._squares = torch.zeros(tiles, MAX_ROWS, dtype=torch.float32, device=decoder.device)

    def decode(
        self, stream: int, inputs: DeviceInputs, cache: KVCache, attention: StepAttention, logits: Tensor
    ) -> None:
        """Writes the KV of all positions, at most MAX_ROWS, and fills `logits`, float32 [T, vocab_size]."""
        decoder, products, squares = self._decoder, self._launchers.products, self._squares
        space, num_tokens = decoder.workspace, inputs.tokens.shape[0]
        residual, normed = space.residual[:num_tokens], space.normed[:num_tokens]
        attended, activated = space.attended[:num_tokens], space.activated[:num_tokens]
        qkv = space.qkv[:num_tokens]
        first_norm = decoder.layers[0].attention_norm
        x = self._launchers.embed(stream, inputs.tokens, decoder.embeddings, first_norm, residual, normed, squares)
        for index, (layer, next_norm) in enumerate(zip(decoder.layers, self._next_norms(), strict=True)):
            products.store(stream, x, layer.qkv, qkv)
            decoder.attend(stream, index, qkv, inputs, cache, attention, attended)
            x = products.add(stream, attended, layer.output, residual, layer.mlp_norm, normed, squares)
            products.gated(stream, x, layer.gate_up, activated)
            x = products.add(stream, activated, layer.down, residual, next_norm, normed, squares)
        products.store(stream, x, decoder.head, logits)

    def _next_norms(self) -> Iterator[Tensor]:
        """Yields the weight of the norm after each layer."""
        for following in self._decoder.layers[1:]:
            yield following.attention_norm
        yield self._decoder.norm_weight


class SkinnyMlp:
    """MLP with the skinny gate-up product, activation included, and optionally the skinny down product.

    For large matrices cuBLAS uses the memory's bandwidth as well, and attention is faster between cuBLAS's products.
    The only gain is then the saved launch.
    """

    def __init__(self, decoder: CudaDecoder, products: ProductLauncher, *, own_down: bool) -> None:
        self._workspace = decoder.workspace
        self._products = products
        self._own_down = own_down

    def __call__(self, stream: int, layer: LayerWeights, normed: Tensor, hidden: Hidden) -> None:
        """Like `cuda_decoder.Mlp`, for at most MAX_ROWS positions. The next norm adds a skinny down product."""
        activated = self._workspace.activated[: len(normed)]
        self._products.gated(stream, ScaledRows(normed, None), layer.gate_up, activated)
        if self._own_down and hidden.last is not None:
            self._products.store(stream, ScaledRows(activated, None), layer.down, hidden.last)
        else:
            hidden.add(activated, layer.down, None)


def matrices(decoder: CudaDecoder) -> list[Tensor] | None:
    """Returns all matrices of a pass, or None for a model with biases, which these products do not support."""
    found = [decoder.head]
    for layer in decoder.layers:
        biases = (layer.qkv_bias, layer.output_bias, layer.gate_up_bias, layer.down_bias)
        if any(bias is not None for bias in biases):
            return None
        found += [layer.qkv, layer.output, layer.gate_up, layer.down]
    return found
