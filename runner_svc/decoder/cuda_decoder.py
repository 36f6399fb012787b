"""The decoder on a GPU, by the launchers of `runner_svc.cuda`; plain matrices are multiplied by cuBLAS through torch.

Per layer, for a description like Llama's: add + RMSNorm; QKV product; QK-norm, RoPE and KV write in one; paged
attention; output product; add + RMSNorm; gate-up product; activation times up; down product. The residual stream is
updated in place by the norms or by the products before them, so that an addition never needs its own pass. The
activation may be fused into a custom product (`decoder.fusions`). A norm after a product is part of the launch that
adds it. `decoder.cpu_decoder` is the counterpart on a CPU.

Launches do not depend on values, and all intermediate tensors are in one workspace at fixed addresses. A forward pass
can therefore be captured in a CUDA graph, and tensor maps of the attention kernels remain valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from runner_svc.cuda.ranks.rank_exchanges import RankExchanges
from runner_svc.decoder.cuda_experts import CudaExpertMlp, ExpertSpace, with_plain_experts
from runner_svc.decoder.cuda_linear import CudaLinear
from runner_svc.decoder.cuda_mlp import CudaMlp, DenseCudaMlp, make_cuda_mlp
from runner_svc.decoder.cuda_norms import CudaNorms
from runner_svc.decoder.fusions import Activating, Adding, Fusions
from runner_svc.decoder.hidden import Hidden
from runner_svc.decoder.step_rotations import StepRotation, StepRotations, StepRows
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.layer_launchers import DecoderLaunchers, RopeKvLauncher
from runner_svc.interface.products.linear_launchers import LinearLauncher, QuantizedRows, Rows, Sums
from runner_svc.interface.ranks import Communicator
from runner_svc.model.config import ModelConfig
from runner_svc.sampling.logit_scaling import finish_logits
from runner_svc.weights.model_weights import LayerWeights, MlpWeights, ModelWeights


class StepAttention(Protocol):
    """Planned attention of a step."""

    def __call__(self, stream: int, layer: int, queries: Tensor, output: Tensor) -> None:
        """Fills `output` from `queries`, both [T, num_heads * head_dim]; the row stride of queries is free."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceInputs:
    """A step's T positions on the device, int32 [T] each."""

    tokens: Tensor
    positions: Tensor
    # Cache position of each position's keys and values: block * block_size + offset.
    slot_mapping: Tensor
    # Of each rotary embedding of the model.
    rotations: Sequence[StepRotation]


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
        self.gate_up = empty(max((1 + layer.mlp.gated) * layer.mlp.width for layer in config.layers))
        self.activated = empty(config.intermediate_size)
        self.experts: ExpertSpace | None = None
        if config.experts is not None:
            self.experts = ExpertSpace(config.experts, config.hidden_size, max_tokens, dtype, device)


@dataclass(frozen=True, slots=True, eq=False)
class LayerLinears:
    """The linear layers of all layers, in their order."""

    qkv: Sequence[CudaLinear]
    output: Sequence[CudaLinear]
    mlps: Sequence[CudaMlp]


class CudaDecoder:
    """Embeddings, layers, final norm, head; weights are on one device, and all but linear layers' are in one dtype."""

    may_not_be_captured = False

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        launchers: DecoderLaunchers,
        max_tokens: int,
        ranks: Communicator | None = None,
    ) -> None:
        """`max_tokens` is the maximum number of positions of a forward pass.

        `ranks`: which compute the model together; `config`, weights and launchers are then of this rank's part.
        """
        self.device = weights.embeddings.device
        self.dtype = weights.embeddings.dtype
        self.embeddings = weights.embeddings
        self.layers: Sequence[LayerWeights] = [
            with_plain_experts(layer.mapped(launchers.prepare), self.dtype) for layer in weights.layers
        ]
        self.config = replace(config, sinks=tuple(layer.sinks for layer in self.layers))
        self.norm_weight = weights.norm
        self.head = weights.head.mapped(launchers.prepare)
        self.workspace = Workspace(config, max_tokens, self.dtype, self.device)
        self._launchers = launchers
        self.exchanges = _exchanges(ranks, config, launchers)
        """None: one rank computes the model."""
        self._norms = CudaNorms(launchers, ranks_add=self.exchanges is not None)
        self._linears = self._split_linears = self._linears_by(launchers.linear)
        if launchers.splitting is not None and config.experts is None:
            self._split_linears = self._linears_by(launchers.splitting)
        elif launchers.splitting is not None:
            output = [CudaLinear(layer.output, launchers.splitting) for layer in self.layers]
            self._split_linears = replace(self._linears, output=output)
        self._linear_head = CudaLinear(self.head, launchers.linear)
        self._positions, self.kv_scales = weights.positions, weights.kv_scales
        self.taps: dict[int, Tensor] = {}
        """By layer, where its input is kept in each pass, [max_tokens, hidden_size]; nothing is kept of others."""
        self._no_table = torch.empty(0, device=self.device)  # for models that do not rotate
        self._ropes = [StepRotations(rope, config.context_length, max_tokens, self.device) for rope in config.ropes]

    def _linears_by(self, launcher: LinearLauncher) -> LayerLinears:
        """Returns the linear layers; `launcher` launches the products of QKV, output and down."""
        return LayerLinears(
            [CudaLinear(layer.qkv, launcher) for layer in self.layers],
            [CudaLinear(layer.output, launcher) for layer in self.layers],
            [
                make_cuda_mlp(described.mlp, layer.mlp, self._launchers, self.workspace, launcher)
                for described, layer in zip(self.config.layers, self.layers, strict=True)
            ],
        )

    def linears_of(self, launcher: LinearLauncher) -> LayerLinears:
        """Returns linear layers whose QKV and output products are the launcher's."""
        qkv = [CudaLinear(layer.qkv, launcher) for layer in self.layers]
        return replace(self._linears, qkv=qkv, output=[CudaLinear(layer.output, launcher) for layer in self.layers])

    @property
    def fusions(self) -> list[Fusions]:
        """Fusions that this model supports, starting with none."""
        adding, experts = self._adding, self._launchers.experts
        if experts is None:
            return [Fusions(each, activating) for activating in self._activating for each in adding]
        # Torch's grouped products, and where rows are gathered, are tried in one way each: timing takes a second.
        return [
            *([Fusions()] if experts.has_grouped else []),
            *(Fusions(each, Activating.PRODUCT) for each in adding),
            Fusions(adding[-1], Activating.GATHERING_PRODUCT),
        ]

    @property
    def _adding(self) -> Sequence[Adding]:
        if self.exchanges is not None:  # products are sums over ranks before they are added
            return [Adding.NORMS]
        down = [mlp.down for mlp in self._linears.mlps if isinstance(mlp, DenseCudaMlp)]
        adds = all(linear.adds for linear in (*self._linears.output, *down))
        norms_only = any(described.post_norms for described in self.config.layers)
        return list(Adding) if adds and not norms_only else [Adding.NORMS]

    @property
    def _activating(self) -> Sequence[Activating]:
        gated = self._launchers.gated
        fits = gated is not None and all(
            isinstance(layer.mlp, MlpWeights)
            and described.mlp.gated
            and layer.mlp.gate_up.bias is None
            and gated.fits(layer.mlp.gate_up.matrix)
            for described, layer in zip(self.config.layers, self.layers, strict=True)
        )
        return [Activating.KERNEL, Activating.PRODUCT] if fits else [Activating.KERNEL]

    def splits(self, rows: int) -> bool:
        """Returns whether output products of a step of that number of rows can be those whose blocks share tiles."""
        splitting = self._launchers.splitting
        if splitting is None:
            return False
        outputs = [layer.output for layer in self.layers]
        return all(linear.bias is None and splitting.fits(linear.matrix, rows) for linear in outputs)

    @property
    def mlps(self) -> Sequence[CudaMlp]:
        """The layers' MLPs."""
        return self._linears.mlps

    def compile_products(self, max_tokens: int) -> None:
        """Compiles the custom gate-up products for up to `max_tokens` positions, so that no step waits for it."""
        for layer in self.layers:
            if self._launchers.gated is not None and isinstance(layer.mlp, MlpWeights):
                self._launchers.gated.prepare(max_tokens, layer.mlp.gate_up.matrix)

    @property
    def weights(self) -> ModelWeights:
        """The weights, from which another decoder of the same model can be made."""
        layers = iter(self.layers)
        return ModelWeights(self.embeddings, self.head, self.norm_weight, layers, self._positions, self.kv_scales)

    def inputs(self, tokens: Tensor, positions: Tensor, slot_mapping: Tensor, rows: StepRows) -> DeviceInputs:
        """Returns the inputs for T positions of `rows`; tensors are int32 [T]."""
        rotations = [rope(positions, rows) for rope in self._ropes] or [StepRotation(self._no_table, positions)]
        return DeviceInputs(tokens, positions, slot_mapping, rotations)

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
        """Writes the KV of all positions; returns the input of `logits`, valid until the next forward pass.

        `fusions` is one of `self.fusions`. `mlps` and `linears` replace the layers' own.
        """
        num_tokens = inputs.tokens.shape[0]
        space, hidden = self.workspace, self.hidden(num_tokens, fusions.adding)
        qkv, attended = space.qkv[:num_tokens], space.attended[:num_tokens]
        self._embed(stream, inputs, hidden.residual)
        last_post_norm: Tensor | None = None
        is_normed = False
        linears = linears or (self._split_linears if fusions.splitting else self._linears)
        for index, (layer, mlp) in enumerate(zip(self.layers, mlps or linears.mlps, strict=True)):
            parallel, out = self.config.layers[index].parallel, space.normed[:num_tokens]
            takes = linears.qkv[index].takes(num_tokens) if not parallel else None
            if index == 0:
                normed = self._norms.first(stream, hidden, layer.attention_norm, out, takes)
            elif not is_normed:
                normed = self._norms.add(stream, hidden, last_post_norm, layer.attention_norm, out, takes)
            self.tap(index, hidden.residual)
            sums = self._qkv_sums(stream, index, linears.qkv[index], normed, qkv)
            self.attend(stream, index, sums, inputs, cache, attention, attended)
            if parallel:
                hidden.add_now(stream, attended, linears.output[index])
            else:
                takes = mlp.takes(num_tokens)
                hidden.leaves_sums = self._norms.takes_sums(layer.attention_post_norm, layer.mlp_norm, takes)
                hidden.add(stream, attended, linears.output[index])
                is_normed = self._enter_experts_and_norm(stream, index, mlp, hidden, out, fusions.activating)
                if is_normed:
                    normed = out
                    continue
                normed = self._norms.add(stream, hidden, layer.attention_post_norm, layer.mlp_norm, out, takes)
            hidden.leaves_sums = self._next_norm_takes_sums(index, num_tokens)
            is_normed = self._add_experts_and_norm(stream, index, mlp, normed, hidden, fusions.activating)
            if not is_normed:
                mlp(stream, normed, hidden, fusions.activating)
            last_post_norm = layer.mlp_post_norm
        return hidden

    def _add_experts_and_norm(
        self, stream: int, index: int, mlp: CudaMlp, normed: Rows, hidden: Hidden, activating: Activating
    ) -> bool:
        """Adds a layer's experts and makes `normed` the next layer's; returns False where that is impossible."""
        if self.exchanges is not None:
            return False
        if not isinstance(mlp, CudaExpertMlp) or not self.config.is_plain or index + 1 == len(self.layers):
            return False
        weight = self.layers[index + 1].attention_norm
        if weight is None or isinstance(normed, QuantizedRows):
            return False
        mlp.add_to_normed(stream, normed, hidden.residual, weight, self.config.norm_eps, activating)
        return True

    def _enter_experts_and_norm(
        self, stream: int, index: int, mlp: CudaMlp, hidden: Hidden, normed: Tensor, activating: Activating
    ) -> bool:
        """Adds the last product and a layer's experts, and makes `normed` the next layer's.

        Does nothing and returns False where that is impossible in few launches.
        """
        if self.exchanges is not None:
            return False
        if not isinstance(mlp, CudaExpertMlp) or not self.config.is_plain or index + 1 == len(self.layers):
            return False
        weight, next_weight = self.layers[index].mlp_norm, self.layers[index + 1].attention_norm
        if weight is None or next_weight is None or hidden.last is None or not mlp.enters(len(normed), activating):
            return False
        mlp.enter_and_norm(stream, hidden.last, hidden.residual, weight, normed, next_weight, self.config.norm_eps)
        return True

    def tap(self, index: int, residual: Tensor) -> None:
        """Keeps the input of a layer, [T, hidden_size], if it is in `taps`."""
        kept = self.taps.get(index)
        if kept is not None:
            kept[: len(residual)].copy_(residual)

    def hidden(self, num_tokens: int, adding: Adding) -> Hidden:
        """Returns the residual stream that the last `forward`, of `num_tokens` positions, left."""
        space = self.workspace
        last = space.product[:num_tokens] if adding is Adding.NORMS else None
        add_up = self.exchanges.add_up if self.exchanges is not None else None
        return Hidden(space.residual[:num_tokens], last, self.config.multiplier, add_up=add_up)

    def logits(self, stream: int, hidden: Hidden, out: Tensor) -> None:
        """Fills `out`, float32 [L, vocab_size]; overwrites the residual stream of `hidden`."""
        self.head_logits(stream, self.normed(stream, hidden), out)

    def normed(self, stream: int, hidden: Hidden) -> Tensor:
        """Returns the final norm's output [L, hidden_size]; overwrites the residual stream of `hidden`."""
        normed = torch.empty_like(hidden.residual)
        self._norms.add(stream, hidden, self.layers[-1].mlp_post_norm, self.norm_weight, normed)
        return normed

    def head_logits(self, stream: int, states: Tensor, out: Tensor) -> None:
        """Fills `out`, float32 [L, vocab_size], from outputs of the final norm [L, hidden_size]."""
        if self.exchanges is None:
            self._linear_head.multiply(stream, states, out)
        else:
            self.exchanges.logits(partial(self._linear_head.multiply, stream, states), out)
        finish_logits(out, self.config.model)

    def _embed(self, stream: int, inputs: DeviceInputs, out: Tensor) -> None:
        """Fills `out` [T, hidden_size] with the embeddings of tokens and of learned positions."""
        if self.exchanges is None:
            torch.index_select(self.embeddings, 0, inputs.tokens, out=out)
        else:
            self.exchanges.embed(stream, inputs.tokens, self.embeddings, out)
        if self.config.model.embedding_scale != 1.0:
            out.mul_(self.config.model.embedding_scale)
        if self._positions is not None:
            positions = self.workspace.product[: len(out)]
            torch.index_select(self._positions, 0, inputs.positions, out=positions)
            out.add_(positions)

    def _qkv_sums(self, stream: int, index: int, product: CudaLinear, normed: Rows, out: Tensor) -> Sums:
        """Returns the input of `attend`."""
        if self._rope(index).scales:
            return product.sums(stream, normed, out)
        product.multiply(stream, normed, out)
        return Sums(out)

    def _next_norm_takes_sums(self, index: int, num_tokens: int) -> bool:
        """Returns the same of the norm after a layer's MLP; that of the last layer is not rounded."""
        if index + 1 == len(self.layers) or self.config.layers[index + 1].parallel:
            return False
        takes, weight = self._linears.qkv[index + 1].takes(num_tokens), self.layers[index + 1].attention_norm
        return self._norms.takes_sums(self.layers[index].mlp_post_norm, weight, takes)

    def _rope(self, index: int) -> RopeKvLauncher:
        rope = self.config.layers[index].rope
        return self._launchers.plain if rope is None else self._launchers.rotating[rope]

    def attend(
        self,
        stream: int,
        index: int,
        qkv: Sums,
        inputs: DeviceInputs,
        cache: KVCache,
        attention: StepAttention,
        attended: Tensor,
    ) -> None:
        """Does a layer's work between QKV product and output product; fills `attended`, the output product's input."""
        config, layer = self.config, self.layers[index]
        queries = self.workspace.qkv[: len(attended), : config.num_heads * config.head_dim]
        rotation = inputs.rotations[config.layers[index].rope or 0]
        self._rope(index)(
            stream,
            qkv.sums,
            queries,
            cache.data[index],
            rotation.table,
            rotation.rows,
            inputs.slot_mapping,
            layer.q_norm,
            layer.k_norm,
            cache.layer_scales(index),
            qkv.scaling,
        )
        attention(stream, index, queries, attended)


def _exchanges(ranks: Communicator | None, config: ModelConfig, launchers: DecoderLaunchers) -> RankExchanges | None:
    if ranks is None:
        return None
    if launchers.embed_part is None:
        raise TypeError("the model has no launcher for a part of its embeddings")
    return RankExchanges(ranks, config.vocabulary, launchers.embed_part)
