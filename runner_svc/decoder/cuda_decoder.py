"""The decoder on a GPU: matrix products by cuBLAS through torch, everything else by the launchers of `runner_svc.cuda`.

Per layer: add + RMSNorm; QKV product; QK-norm, RoPE and KV write in one; paged attention; output product; add +
RMSNorm; gate-up product; activation times up; down product. The residual stream is updated in place by the norms or by
the products before them, so that an addition never needs its own pass. The activation may be fused into a custom
product (`decoder.fusions`). `decoder.cpu_decoder` is the counterpart on a CPU.

Launches do not depend on values, and all intermediate tensors are in one workspace at fixed addresses. A forward pass
can therefore be captured in a CUDA graph, and tensor maps of the attention kernels remain valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from runner_svc.decoder.fusions import Activating, Adding, Fusions
from runner_svc.decoder.step_rotations import StepRotations, StepRows
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.layer_launchers import DecoderLaunchers
from runner_svc.model.config import ModelConfig
from runner_svc.model.weights import LayerWeights, ModelWeights


class StepAttention(Protocol):
    """Planned attention of a step."""

    def __call__(self, stream: int, layer: int, queries: Tensor, output: Tensor) -> None:
        """Fills `output` from `queries`, both [T, num_heads * head_dim]; the row stride of queries is free."""


class Mlp(Protocol):
    """An MLP of a layer."""

    def __call__(self, stream: int, layer: LayerWeights, normed: Tensor, hidden: Hidden) -> None:
        """Adds the MLP of `normed` [T, hidden_size] to `hidden`."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceInputs:
    """A step's T positions on the device, int32 [T] each."""

    tokens: Tensor
    positions: Tensor
    # Cache position of each position's keys and values: block * block_size + offset.
    slot_mapping: Tensor
    # float32 [rows, rotary_dim], cosines of the pairs, then their sines; and each position's row in it, int32 [T].
    rotations: Tensor
    rotation_rows: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Hidden:
    """The residual stream and, if the norms do the addition, the last product, which is not yet added."""

    residual: Tensor  # [T, hidden_size]
    last: Tensor | None  # [T, hidden_size]

    def add(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Adds x W^T + b, or leaves it to the next norm."""
        if self.last is not None:
            multiply(x, weight, bias, self.last)
            return
        self.residual.addmm_(x, weight.t())
        if bias is not None:
            self.residual.add_(bias)

    def select(self, index: Tensor) -> Hidden:
        """Returns a copy of the positions at `index`, int32 [L]."""
        last = self.last.index_select(0, index) if self.last is not None else None
        return Hidden(self.residual.index_select(0, index), last)

    def slice(self, begin: int, end: int) -> Hidden:
        """Returns a copy of the positions from `begin` to `end`."""
        return Hidden(self.residual[begin:end].clone(), self.last[begin:end].clone() if self.last is not None else None)


class Workspace:
    """Intermediate tensors of forward passes of up to `max_tokens` positions."""

    def __init__(self, config: ModelConfig, max_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        def empty(width: int) -> Tensor:
            return torch.empty(max_tokens, width, dtype=dtype, device=device)

        query_width = config.num_heads * config.head_dim
        self.residual = empty(config.hidden_size)
        self.normed = empty(config.hidden_size)
        self.product = empty(config.hidden_size)  # of the output or down matrix
        self.qkv = empty(query_width + 2 * config.num_kv_heads * config.head_dim)
        self.attended = empty(query_width).zero_()  # attention does not write padding rows
        self.gate_up = empty(2 * config.intermediate_size)
        self.activated = empty(config.intermediate_size)


class CudaDecoder:
    """Embeddings, layers, final norm, head; weights are [out, in] on one device, in one dtype."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, launchers: DecoderLaunchers, max_tokens: int
    ) -> None:
        """`max_tokens` is the maximum number of positions of a forward pass."""
        self.config = config
        self.device = weights.embeddings.device
        self.dtype = weights.embeddings.dtype
        self.embeddings = weights.embeddings
        self.layers: Sequence[LayerWeights] = list(weights.layers)
        self.norm_weight = weights.norm
        self.head = weights.head
        self.workspace = Workspace(config, max_tokens, self.dtype, self.device)
        self._launchers = launchers
        self._rope = StepRotations(config, max_tokens, self.device)

    @property
    def fusions(self) -> list[Fusions]:
        """Fusions that this model supports, starting with none."""
        gated = self._launchers.gated
        fits = gated is not None and all(
            layer.gate_up_bias is None and gated.fits(layer.gate_up) for layer in self.layers
        )
        return [
            Fusions(adding, activating)
            for activating in (Activating if fits else [Activating.KERNEL])
            for adding in Adding
        ]

    def compile_products(self, max_tokens: int) -> None:
        """Compiles the custom gate-up products for up to `max_tokens` positions, so that no step waits for it."""
        if self._launchers.gated is not None:
            self._launchers.gated.prepare(max_tokens, self.layers[0].gate_up)

    @property
    def weights(self) -> ModelWeights:
        """The weights, from which another decoder of the same model can be made."""
        return ModelWeights(self.embeddings, self.head, self.norm_weight, iter(self.layers))

    def inputs(self, tokens: Tensor, positions: Tensor, slot_mapping: Tensor, rows: StepRows) -> DeviceInputs:
        """Returns the inputs for T positions of `rows`; tensors are int32 [T]."""
        return DeviceInputs(tokens, positions, slot_mapping, *self._rope(positions, rows))

    def forward(
        self,
        stream: int,
        inputs: DeviceInputs,
        cache: KVCache,
        attention: StepAttention,
        fusions: Fusions,
        mlp: Mlp | None = None,
    ) -> Hidden:
        """Writes the KV of all positions; returns the input of `logits`, valid until the next forward pass.

        `fusions` is one of `self.fusions`. `mlp` replaces the layers' MLP.
        """
        num_tokens = inputs.tokens.shape[0]
        space, hidden = self.workspace, self.hidden(num_tokens, fusions.adding)
        normed, qkv = space.normed[:num_tokens], space.qkv[:num_tokens]
        attended, mlp = space.attended[:num_tokens], mlp or partial(self._mlp, fusions.activating)
        torch.index_select(self.embeddings, 0, inputs.tokens, out=hidden.residual)
        for index, layer in enumerate(self.layers):
            if index == 0:
                self._launchers.norm.norm(stream, hidden.residual, layer.attention_norm, normed)
            else:
                self._norm(stream, hidden, layer.attention_norm, normed)
            multiply(normed, layer.qkv, layer.qkv_bias, qkv)
            self.attend(stream, index, qkv, inputs, cache, attention, attended)
            hidden.add(attended, layer.output, layer.output_bias)
            self._norm(stream, hidden, layer.mlp_norm, normed)
            mlp(stream, layer, normed, hidden)
        return hidden

    def hidden(self, num_tokens: int, adding: Adding) -> Hidden:
        """Returns the residual stream that the last `forward`, of `num_tokens` positions, left."""
        space = self.workspace
        last = space.product[:num_tokens] if adding is Adding.NORMS else None
        return Hidden(space.residual[:num_tokens], last)

    def logits(self, stream: int, hidden: Hidden, out: Tensor) -> None:
        """Fills `out`, float32 [L, vocab_size]; overwrites the residual stream of `hidden`."""
        normed = torch.empty_like(hidden.residual)
        self._norm(stream, hidden, self.norm_weight, normed)
        self.multiply_head(normed, out)

    def _norm(self, stream: int, hidden: Hidden, weight: Tensor, out: Tensor) -> None:
        """Fills `out` with the norm of the residual stream, after adding the last product to it."""
        if hidden.last is None:
            self._launchers.norm.norm(stream, hidden.residual, weight, out)
        else:
            self._launchers.norm.add(stream, hidden.last, hidden.residual, weight, out)

    def multiply_head(self, normed: Tensor, out: Tensor) -> None:
        """Fills `out`, float32 [L, vocab_size], from the last norm's rows."""
        if normed.dtype is torch.float32:
            torch.mm(normed, self.head.t(), out=out)
        else:  # the sums are float32 anyway, and rounding them to 16 bits would create ties
            torch.mm(normed, self.head.t(), out_dtype=torch.float32, out=out)

    def attend(
        self,
        stream: int,
        index: int,
        qkv: Tensor,
        inputs: DeviceInputs,
        cache: KVCache,
        attention: StepAttention,
        attended: Tensor,
    ) -> None:
        """Does a layer's work between QKV product and output product; fills `attended`, the output product's input."""
        config, layer = self.config, self.layers[index]
        queries = qkv[:, : config.num_heads * config.head_dim]
        launcher = self._launchers.rotating if config.rotary_layers[index] else self._launchers.plain
        launcher(
            stream,
            qkv,
            queries,
            cache.data[index],
            inputs.rotations,
            inputs.rotation_rows,
            inputs.slot_mapping,
            layer.q_norm,
            layer.k_norm,
            cache.layer_scales(index),
        )
        attention(stream, index, queries, attended)

    def _mlp(self, activating: Activating, stream: int, layer: LayerWeights, normed: Tensor, hidden: Hidden) -> None:
        activated = self.workspace.activated[: len(normed)]
        if activating is Activating.PRODUCT and self._launchers.gated is not None:
            self._launchers.gated(stream, normed, layer.gate_up, activated)
        else:
            gate_up = self.workspace.gate_up[: len(normed)]
            multiply(normed, layer.gate_up, layer.gate_up_bias, gate_up)
            self._launchers.activation(stream, gate_up, activated)
        hidden.add(activated, layer.down, layer.down_bias)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Computes out = x W^T + b, with W [out, in]."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
