"""The kernel launchers of one model, compiled for the current GPU on construction (seconds at first, then cached)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from runner_svc.attention.cuda import CudaAttention
from runner_svc.cuda.activation import ActivationMul
from runner_svc.cuda.copy import CopyWords
from runner_svc.cuda.embed import Embed
from runner_svc.cuda.experts.expert_product import ExpertProducts
from runner_svc.cuda.experts.expert_routing import ExpertRouting
from runner_svc.cuda.experts.expert_rows import ExpertRows
from runner_svc.cuda.experts.expert_variant import STEP, ExpertVariant, TilesVariant
from runner_svc.cuda.gather import GatherInputs
from runner_svc.cuda.module import is_hopper, num_multiprocessors
from runner_svc.cuda.norm import AddRmsNorm, ResidualNorm
from runner_svc.cuda.products.gated_product import GatedProduct
from runner_svc.cuda.products.gated_variant import GatedVariant
from runner_svc.cuda.products.skinny_product import SkinnyProducts, fits
from runner_svc.cuda.products.skinny_variant import SkinnyVariant
from runner_svc.cuda.rope_kv import RopeKvWrite
from runner_svc.cuda.sampling import CudaSampler
from runner_svc.cuda.scatter import ScatterSegments
from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.interface.expert_launchers import ExpertLaunchers
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.layer_launchers import DecoderLaunchers, NormLauncher
from runner_svc.interface.served_config import ServedConfig
from runner_svc.interface.skinny_launchers import SkinnyLaunchers
from runner_svc.model.config import ModelConfig
from runner_svc.model.families.description import NormKind
from runner_svc.model.families.experts_config import ExpertsConfig

_TILES_JOB_ROWS = 160


class StepLaunchers:
    """The kernels of steps around the forward pass of any model.

    `overlap`: a kernel may start while the previous one finishes.
    """

    def __init__(self, config: ServedConfig, dtype: torch.dtype, *, overlap: bool = True) -> None:
        self._served = config
        self._dtype = dtype
        self._overlap = overlap

    def decoder(self, fp8_cache: bool) -> DecoderLaunchers:
        """Raises NotImplementedError: the kernels of layers are those of a `CudaLaunchers`."""
        raise NotImplementedError

    def skinny(self, matrices: Sequence[Tensor]) -> list[SkinnyLaunchers]:
        """Returns []."""
        return []

    def attention(
        self, cache: KVCache, tables: Tensor, max_batch: int, layers: Sequence[AttentionLayer]
    ) -> CudaAttention:
        """Attention over `cache`, whose layers attend as `layers` say. Raises ValueError for what the kernels lack."""
        return CudaAttention(cache, tables, self._served.num_heads, layers, max_batch, self._dtype)

    def gather(self, tokens: Tensor, tables: Tensor, block_size: int) -> GatherInputs:
        """Gathers a step's inputs from the token buffer and the block tables."""
        return GatherInputs(tokens, tables, block_size, overlap=self._overlap)

    def copy(self) -> CopyWords:
        """Copies words between host and device."""
        return CopyWords(overlap=self._overlap)

    def scatter(self) -> ScatterSegments:
        """Applies changes to the slots."""
        return ScatterSegments()

    def sampling(self, tokens: Tensor) -> CudaSampler:
        """Samples from float32 logits and writes the tokens into the token buffer `tokens`."""
        return CudaSampler(self._served.vocab_size, torch.float32, tokens)


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
        skinny_blocks: Sequence[int] = (1, 2),
        expert_variants: Sequence[tuple[int, int]] = ((32, 2), (64, 2)),
    ) -> None:
        super().__init__(config, dtype, overlap=overlap)
        self._config = config
        self._skinny_blocks = skinny_blocks
        self._expert_variants = [ExpertVariant(rows, blocks) for rows, blocks in expert_variants]

    def decoder(self, fp8_cache: bool) -> DecoderLaunchers:
        """Compiles the kernels of the layers. Raises ValueError for sizes that the kernels do not support."""
        config = self._config
        return DecoderLaunchers(
            norm=self._norm(),
            activation=ActivationMul(
                config.intermediate_size,
                self._dtype,
                config.activation,
                gated=config.layers[0].mlp.gated,
                overlap=self._overlap,
            ),
            gated=self._gated() if is_hopper() and config.experts is None else None,
            rotating=[self._rope(rope.rotary_dim, fp8_cache) for rope in config.ropes],
            plain=self._rope(0, fp8_cache),
            experts=self._experts(config.experts) if config.experts is not None else None,
        )

    def skinny(self, matrices: Sequence[Tensor]) -> list[SkinnyLaunchers]:
        """Returns the variants for decode passes of few rows over `matrices`; [] if GPU or sizes are unsupported."""
        config = self._config
        if not is_hopper() or not fits(*matrices):
            return []
        embed = Embed(config.hidden_size, self._dtype, overlap=self._overlap)
        return [
            SkinnyLaunchers(
                f"{blocks} a multiprocessor",
                embed,
                SkinnyProducts(
                    config.norm_eps,
                    config.activation,
                    partial(SkinnyVariant.choose, blocks),
                    overlap=self._overlap,
                ),
            )
            for blocks in self._skinny_blocks
        ]

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
            [ExpertProducts(experts, self._dtype, variant, overlap=self._overlap) for variant in self._expert_variants],
            self._tiles(experts, gathers=False),
            self._tiles(experts, gathers=True),
            # Torch's grouped products of float16 wait for the host.
            has_grouped=self._dtype is torch.bfloat16,
            shared_activation=ActivationMul(shared, self._dtype, experts.activation, overlap=self._overlap)
            if shared is not None
            else None,
        )

    def _tiles(self, experts: ExpertsConfig, *, gathers: bool) -> ExpertProducts:
        return ExpertProducts(experts, self._dtype, TilesVariant(_TILES_JOB_ROWS, gathers), overlap=self._overlap)

    def _gated(self) -> GatedProduct:
        choose = partial(GatedVariant.choose, num_multiprocessors())
        return GatedProduct(self._dtype, self._config.activation, choose, overlap=self._overlap)

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
        )
