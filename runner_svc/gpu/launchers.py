"""The kernel launchers of one model, compiled for the current GPU on construction (seconds at first, then cached)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from runner_svc.attention.cuda import CudaAttention
from runner_svc.cuda.activation import ActivationMul
from runner_svc.cuda.canonical.log_softmax import CanonicalLogprobs
from runner_svc.cuda.canonical.products import CanonicalProducts
from runner_svc.cuda.copy import CopyWords
from runner_svc.cuda.drafts.accept import AcceptDrafts
from runner_svc.cuda.drafts.gather import GatherDrafted
from runner_svc.cuda.drafts.ngram import NgramDraft
from runner_svc.cuda.drafts.place import PlaceDrafts
from runner_svc.cuda.drafts.records import ExpandRecords
from runner_svc.cuda.embed import Embed
from runner_svc.cuda.experts.expert_entry import ExpertEntry, split_of
from runner_svc.cuda.experts.expert_product import ExpertProducts
from runner_svc.cuda.experts.expert_routing import ExpertRouting
from runner_svc.cuda.experts.expert_rows import ExpertRows
from runner_svc.cuda.experts.expert_variant import STEP, ExpertVariant, TilesVariant
from runner_svc.cuda.fp8.norm import Fp8Norm
from runner_svc.cuda.gather import GatherInputs
from runner_svc.cuda.module import is_hopper
from runner_svc.cuda.norm import AddRmsNorm, ResidualNorm
from runner_svc.cuda.products.by_class import FewRowProducts, GatedProducts, LinearProducts
from runner_svc.cuda.products.kernels import (
    ProductSettings,
    few_row_launchers,
    gated_launchers,
    linear_launchers,
)
from runner_svc.cuda.products.preparing import Preparing
from runner_svc.cuda.products.split_product import SplitProduct
from runner_svc.cuda.ranks.embed_part import EmbedPart
from runner_svc.cuda.rope_kv import RopeKvWrite
from runner_svc.cuda.sampling import CudaSampler
from runner_svc.cuda.scatter import ScatterSegments
from runner_svc.cuda.tiers.block_launches import CudaBlockCopies
from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.interface.draft_launchers import DraftLaunchers
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.launchers import LogprobsLauncher
from runner_svc.interface.layer_launchers import DecoderLaunchers, NormLauncher
from runner_svc.interface.products.expert_launchers import ExpertLaunchers
from runner_svc.interface.products.skinny_launchers import SkinnyLaunchers
from runner_svc.interface.served_config import ServedConfig
from runner_svc.model.config import ModelConfig
from runner_svc.model.families.description import NormKind
from runner_svc.model.families.experts_config import ExpertsConfig
from runner_svc.sampling.device_logprobs import torch_logprobs
from runner_svc.weights.matrix import Matrix

_TILES = TilesVariant(160, claims=True)
_ENTERING = TilesVariant(32, gathers=True)
"""Of some hundred rows, which are few for each expert."""


class StepLaunchers:
    """The kernels of steps around the forward pass of any model.

    `overlap`: a kernel may start while the previous one finishes. `canonical`: all computes in the order of
    docs/determinism.md.
    """

    def __init__(
        self, config: ServedConfig, dtype: torch.dtype, *, overlap: bool = True, canonical: bool = False
    ) -> None:
        self._served = config
        self._dtype = dtype
        self._overlap = overlap
        self._canonical = canonical

    def decoder(self, fp8_cache: bool) -> DecoderLaunchers:
        """Raises NotImplementedError: the kernels of layers are those of a `CudaLaunchers`."""
        raise NotImplementedError

    def skinny(self, matrices: Sequence[Matrix]) -> list[SkinnyLaunchers]:
        """Returns []."""
        return []

    def attention(
        self, cache: KVCache, tables: Tensor, max_batch: int, layers: Sequence[AttentionLayer]
    ) -> CudaAttention:
        """Attention over `cache`, whose layers attend as `layers` say. Raises ValueError for what the kernels lack."""
        arguments = (cache, tables, self._served.num_heads, layers, max_batch, self._dtype)
        if self._canonical:
            from runner_svc.attention.canonical_gpu.attention import CanonicalGpuAttention

            return CanonicalGpuAttention(*arguments)
        return CudaAttention(*arguments)

    def gather(self, tokens: Tensor, tables: Tensor, block_size: int) -> GatherInputs:
        """Gathers a step's inputs from the token buffer and the block tables."""
        return GatherInputs(tokens, tables, block_size, overlap=self._overlap)

    def copy(self) -> CopyWords:
        """Copies words between host and device."""
        return CopyWords(overlap=self._overlap)

    def scatter(self) -> ScatterSegments:
        """Applies changes to the slots."""
        return ScatterSegments()

    def blocks(self) -> CudaBlockCopies:
        """Copies KV blocks to and from a host pool."""
        return CudaBlockCopies()

    def sampling(self, tokens: Tensor, *, writes: bool = True) -> CudaSampler:
        """Samples from float32 logits; `writes` the drawn tokens into the token buffer `tokens`."""
        vocab_size = self._served.vocab_size
        return CudaSampler(vocab_size, torch.float32, tokens, writes=writes, canonical=self._canonical)

    def logprobs(self) -> LogprobsLauncher:
        """Computes log-probabilities from float32 logits."""
        return CanonicalLogprobs(self._served.vocab_size) if self._canonical else torch_logprobs

    def drafts(self, tokens: Tensor, counters: Tensor, tables: Tensor, block_size: int) -> DraftLaunchers:
        """Drafts and accepts tokens of the token buffer."""
        return DraftLaunchers(
            ngram=NgramDraft(tokens, counters, overlap=self._overlap),
            place=PlaceDrafts(tokens, counters, self._served.vocab_size, overlap=self._overlap),
            gather=GatherDrafted(tokens, tables, block_size, overlap=self._overlap),
            expand=ExpandRecords(),
            accept=AcceptDrafts(tokens, counters),
        )


class CudaLaunchers(StepLaunchers):
    """Implements `runner_svc.interface.launchers.Launchers`.

    `overlap`: a kernel may start while the previous one finishes. `skinny_blocks`: the variants of products of few
    rows, by their blocks per multiprocessor. `expert_variants`: those of experts' products, by the most rows of a job
    and their blocks per multiprocessor.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        overlap: bool = True,
        canonical: bool = False,
        skinny_blocks: Sequence[int] = (1, 2),
        expert_variants: Sequence[tuple[int, int]] = ((32, 2), (64, 2)),
    ) -> None:
        super().__init__(config, dtype, overlap=overlap, canonical=canonical)
        self.preparing = Preparing(dtype)
        self._config = config
        self._skinny_blocks = skinny_blocks
        self._expert_variants = [ExpertVariant(rows, blocks) for rows, blocks in expert_variants]

    def decoder(self, fp8_cache: bool) -> DecoderLaunchers:
        """Compiles the kernels of the layers. Raises ValueError for sizes that the kernels do not support."""
        config, linear = self._config, LinearProducts(linear_launchers(self._products))
        return DecoderLaunchers(
            norm=self._norm(),
            activation=self._activation(),
            linear=linear,
            splitting=SplitProduct(self._dtype, linear, overlap=self._overlap) if is_hopper() else None,
            gated=GatedProducts(gated_launchers(self._products)) if config.experts is None else None,
            rotating=[self._rope(rope.rotary_dim, fp8_cache) for rope in config.ropes],
            plain=self._rope(0, fp8_cache),
            experts=self._experts(config.experts) if config.experts is not None else None,
            prepare=self.preparing,
            rounding_norm=self._rounding_norm(),
            embed_part=self._embed_part(),
        )

    def _embed_part(self) -> EmbedPart | None:
        if self._config.shard.size == 1:
            return None
        return EmbedPart(self._config.hidden_size, self._dtype, overlap=self._overlap)

    def canonical(self, max_tokens: int) -> CanonicalProducts:
        """Returns the products of a `CanonicalDecoder` for passes of up to `max_tokens` positions."""
        config = self._config
        return CanonicalProducts(
            config.norm_eps,
            config.activation,
            config.hidden_size,
            max_tokens,
            torch.device("cuda"),
            overlap=self._overlap,
        )

    def skinny(self, matrices: Sequence[Matrix]) -> list[SkinnyLaunchers]:
        """Returns the variants for decode passes of few rows over `matrices`; [] if GPU or sizes are unsupported.

        A canonical pass has no variants.
        """
        if self._canonical:
            return []
        variants = {
            f"{blocks} a multiprocessor": FewRowProducts(few_row_launchers(self._products, blocks), self._activation())
            for blocks in self._skinny_blocks
        }
        fitting = {name: products for name, products in variants.items() if all(map(products.fits, matrices))}
        if not fitting:
            return []
        embed = Embed(self._config.hidden_size, self._dtype, overlap=self._overlap)
        return [SkinnyLaunchers(name, embed, products) for name, products in fitting.items()]

    @property
    def _products(self) -> ProductSettings:
        return ProductSettings(self._dtype, self._config.norm_eps, self._config.activation, self._overlap)

    def _activation(self) -> ActivationMul:
        config, gated = self._config, self._config.layers[0].mlp.gated
        width, name = config.intermediate_size, config.activation
        return ActivationMul(width, self._dtype, name, gated=gated, overlap=self._overlap)

    def _norm(self) -> NormLauncher:
        config = self._config
        post_norms = any(layer.post_norms for layer in config.layers)
        if config.norm is NormKind.RMS and config.multiplier == 1.0 and not post_norms:
            return AddRmsNorm(config.hidden_size, self._dtype, config.norm_eps, overlap=self._overlap)
        return ResidualNorm(
            config.hidden_size,
            self._dtype,
            config.norm_eps,
            config.norm,
            multiplier=config.multiplier,
            post_norms=post_norms,
            overlap=self._overlap,
        )

    def _rounding_norm(self) -> Fp8Norm | None:
        config = self._config
        if not is_hopper() or self._dtype is not torch.bfloat16 or config.norm is not NormKind.RMS:
            return None
        if config.multiplier != 1.0 or any(layer.post_norms for layer in config.layers):
            return None
        return Fp8Norm(config.hidden_size, config.norm_eps, overlap=self._overlap)

    def _experts(self, experts: ExpertsConfig) -> ExpertLaunchers:
        """Raises ValueError for another GPU than Hopper, and for sizes that the kernels lack."""
        if not is_hopper():
            raise ValueError(
                "mixtures of experts need one of compute capability 9.0 (Hopper); --device cpu serves them"
            )
        sizes = (self._config.hidden_size, experts.width)
        if any(size % STEP for size in sizes):
            raise ValueError(f"experts need sizes that are multiples of {STEP}, not {sizes[0]} and {sizes[1]}")
        shared = experts.shared_width
        return ExpertLaunchers(
            ExpertRouting(experts, overlap=self._overlap),
            ExpertRows(experts, self._config.hidden_size, self._dtype, overlap=self._overlap),
            [self._expert_products(experts, variant) for variant in self._expert_variants],
            self._tiles(experts, gathers=False),
            self._tiles(experts, gathers=True),
            # Torch's grouped products of float16 wait for the host.
            has_grouped=self._dtype is torch.bfloat16,
            shared_activation=ActivationMul(shared, self._dtype, experts.activation, overlap=self._overlap)
            if shared is not None
            else None,
            entry=self._entry(experts),
            entering=self._expert_products(experts, _ENTERING),
        )

    def _entry(self, experts: ExpertsConfig) -> ExpertEntry | None:
        hidden_size = self._config.hidden_size
        if split_of(experts, hidden_size) is None:
            return None
        return ExpertEntry(experts, hidden_size, self._dtype, _ENTERING, overlap=self._overlap)

    def _tiles(self, experts: ExpertsConfig, *, gathers: bool) -> ExpertProducts:
        return self._expert_products(experts, replace(_TILES, gathers=gathers))

    def _expert_products(self, experts: ExpertsConfig, variant: ExpertVariant | TilesVariant) -> ExpertProducts:
        return ExpertProducts(experts, self._dtype, variant, overlap=self._overlap, canonical=self._canonical)

    def _rope(self, rotary_dim: int, fp8_cache: bool) -> RopeKvWrite:
        config = self._config
        return RopeKvWrite(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=rotary_dim,
            dtype=self._dtype,
            eps=config.norm_eps,
            qk_norm=config.layers[0].qk_norm,
            plus_one=config.norm is NormKind.RMS_PLUS_ONE,
            fp8_cache=fp8_cache,
            overlap=self._overlap,
            canonical=self._canonical,
        )
