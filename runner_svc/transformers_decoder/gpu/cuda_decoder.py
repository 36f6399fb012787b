"""A model of transformers as the decoder of `CudaSteps`: its own forward over the paged cache and the GPU's attention.

What of its forward pass can be captured is captured, as with `runner_svc.decoder.cuda_decoder`: hidden states and
attention outputs lie at fixed addresses, and nothing else outlives a pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runner_svc.decoder.cuda_decoder import DeviceInputs, StepAttention
from runner_svc.decoder.cuda_mlp import CudaMlp
from runner_svc.decoder.fusions import Adding, Fusions
from runner_svc.decoder.hidden import Hidden
from runner_svc.decoder.step_rotations import StepRows
from runner_svc.interface.kv_cache import KVCache
from runner_svc.transformers_decoder.decoder import TransformersConfig, TransformersDecoder
from runner_svc.transformers_decoder.paged_attention import PagedStep
from runner_svc.transformers_decoder.step_attention import serving, without_packing

HEAD_STEP = 16
"""The attention kernels have heads of multiples of this; narrower ones are padded with zeros."""


def gpu_config(config: TransformersConfig) -> TransformersConfig:
    """Returns the configuration with heads that the attention kernels have."""
    return replace(config, head_dim=-(-config.head_dim // HEAD_STEP) * HEAD_STEP)


class TransformersCudaDecoder:
    """Computes the passes of `runner_svc.gpu.steps.CudaSteps` with a `TransformersDecoder` on the GPU."""

    may_not_be_captured = True
    """A forward pass may wait for the GPU, which no CUDA graph can hold."""

    def __init__(self, decoder: TransformersDecoder, max_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        """`max_tokens` is the maximum number of positions of a forward pass."""
        self.config = gpu_config(decoder.config)
        self.device = device
        self.dtype = dtype
        self._decoder = decoder
        self._max_tokens = max_tokens
        self._hidden: Tensor | None = None  # [max_tokens, hidden_size]; allocated by the first pass
        width = self.config.num_heads * self.config.head_dim
        self._attended = torch.zeros(max_tokens, width, dtype=dtype, device=device)  # padding rows stay 0
        self._indexes = torch.arange(max_tokens, dtype=torch.int32, device=device)
        self._prompt_lens: Tensor | None = None

    @property
    def model(self) -> Any:
        """The model of transformers."""
        return self._decoder.model

    @property
    def fusions(self) -> list[Fusions]:
        """As `CudaDecoder.fusions`: there are none."""
        return [Fusions()]

    def expert_variants(self) -> Mapping[str, Sequence[CudaMlp]]:
        """As `CudaDecoder.expert_variants`: there are none."""
        return {}

    def compile_products(self, max_tokens: int) -> None:
        """As `CudaDecoder.compile_products`: there are none."""

    @torch.inference_mode()
    def inputs(self, tokens: Tensor, positions: Tensor, slot_mapping: Tensor, rows: StepRows) -> DeviceInputs:
        """Returns the inputs for T positions of `rows`; tensors are int32 [T]."""
        if self.config.prefix_positions is not None:
            self._prompt_lens = rows.prompt_lens_of(self._indexes[: len(positions)]).long()
        return DeviceInputs(tokens, positions, slot_mapping, ())

    @torch.inference_mode()
    def forward(
        self,
        stream: int,
        inputs: DeviceInputs,
        cache: KVCache,
        attention: StepAttention,
        fusions: Fusions,
        mlps: Sequence[CudaMlp] | None = None,
    ) -> Hidden:
        """Writes the KV of all positions; returns the input of `logits`, valid until the next forward pass."""
        num_tokens = len(inputs.tokens)
        attended = self._attended[:num_tokens]

        def attend(layer: int, queries: Tensor) -> Tensor:
            attention(stream, layer, queries.reshape(num_tokens, -1), attended)
            return attended

        step = PagedStep(self._decoder.calls, cache, inputs.slot_mapping.long(), attend)
        with without_packing(), serving(step):
            computed = self._decoder.hidden(inputs.tokens.long(), inputs.positions.long(), self._prompt_lens)
        step.finish()
        if self._hidden is None:
            self._hidden = computed.new_zeros(self._max_tokens, computed.shape[-1])
        self._hidden[:num_tokens] = computed
        return self.hidden(num_tokens, fusions.adding)

    def hidden(self, num_tokens: int, adding: Adding) -> Hidden:
        """Returns the hidden states that the last `forward`, of `num_tokens` positions, left."""
        assert self._hidden is not None, "`forward` comes first"
        return Hidden(self._hidden[:num_tokens], None)

    @torch.inference_mode()
    def logits(self, stream: int, hidden: Hidden, out: Tensor) -> None:
        """Fills `out`, float32 [L, vocab_size]."""
        out.copy_(self._decoder.logits(hidden.residual))
