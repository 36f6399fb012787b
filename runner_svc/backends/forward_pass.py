"""A model's forward pass on the CPU, with the paged KV cache that it writes and reads."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.attention.canonical import CanonicalAttention
from runner_svc.attention.cpu import CpuAttention
from runner_svc.backends.determinism import Determinism
from runner_svc.decoder.cpu_decoder import DecoderInputs
from runner_svc.decoder.served_decoder import ServedDecoder
from runner_svc.interface.kv_cache import KVCache, int64
from runner_svc.interface.step import StepBatch


class ForwardPass:
    """A decoder and its cache of float32, on the CPU."""

    def __init__(
        self, decoder: ServedDecoder, num_blocks: int, block_size: int, determinism: Determinism | None = None
    ) -> None:
        """`determinism` has made the parts of a deterministic decoder."""
        config = decoder.config
        self.decoder = decoder
        self.cache = KVCache(config, num_blocks, block_size, torch.float32, torch.device("cpu"))
        self._attention: CpuAttention | CanonicalAttention
        if determinism is None:
            self._attention = CpuAttention(self.cache, config.num_heads, config.num_kv_heads, config.attention_layers)
        else:
            self._attention = determinism.attention(self.cache, config.attention_layers)
        self._by_length = config.prefix_positions is not None

    def hidden(self, batch: StepBatch) -> Tensor:
        """Writes the KV of every position; returns the residual stream [T, hidden_size] after all layers."""
        run = self._attention.planned(batch.starts, batch.counts, batch.block_tables, batch.drafts)
        inputs = DecoderInputs(
            tokens=int64(batch.tokens),
            positions=int64(batch.positions),
            slot_mapping=int64(batch.slot_mapping),
            prompt_lens=int64(np.repeat(batch.params["prompt_len"], batch.counts)) if self._by_length else None,
        )
        return self.decoder.forward(inputs, self.cache, run)

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copies whole blocks; all sources are read before any target is written."""
        self.cache.copy_blocks(int64(sources), int64(targets))
