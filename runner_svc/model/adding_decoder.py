"""Decode passes on a GPU whose output and down products add to the residual stream themselves.

`model.cuda_decoder` adds in its norms, which read two tensors and write two. Here cuBLAS adds in its epilogue, where a
product is still in registers, and the norms read one and write one: at 256 rows 0.2 to 0.4% of a replay on an H200. For
few rows `model.skinny_decoder` fuses more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner_svc.kv_cache import KVCache
from runner_svc.model.cuda_decoder import CudaDecoder, DeviceInputs, StepAttention, multiply


class AddingDecoder:
    """Decode passes over the weights and the workspace of a `CudaDecoder`, which has no biases."""

    def __init__(self, decoder: CudaDecoder) -> None:
        self._decoder = decoder

    def decode(
        self, stream: int, inputs: DeviceInputs, cache: KVCache, attention: StepAttention, logits: Tensor
    ) -> None:
        """Writes the KV of all T positions and fills `logits`, float32 [T, vocab_size]."""
        decoder, norm = self._decoder, self._decoder.norm
        space, num_tokens = decoder.workspace, inputs.tokens.shape[0]
        residual, normed = space.residual[:num_tokens], space.normed[:num_tokens]
        attended, qkv = space.attended[:num_tokens], space.qkv[:num_tokens]
        torch.index_select(decoder.embeddings, 0, inputs.tokens, out=residual)
        for index, layer in enumerate(decoder.layers):
            norm.norm(stream, residual, layer.attention_norm, normed)
            multiply(normed, layer.qkv, None, qkv)
            decoder.attend(stream, index, qkv, inputs, cache, attention, attended)
            residual.addmm_(attended, layer.output.t())
            norm.norm(stream, residual, layer.mlp_norm, normed)
            residual.addmm_(decoder.activate(stream, layer, normed), layer.down.t())
        norm.norm(stream, residual, decoder.norm_weight, normed)
        decoder.multiply_head(normed, logits)
