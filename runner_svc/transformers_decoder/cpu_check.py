"""The start check's steps on a CPU."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from runner_svc.attention.cpu import CpuAttention
from runner_svc.decoder.cpu_decoder import DecoderInputs
from runner_svc.interface.kv_cache import KVCache
from runner_svc.transformers_decoder.decoder import TransformersDecoder
from runner_svc.transformers_decoder.start_check import SMALL_BLOCKS, CheckStep, check_model


def check_on_cpu(decoder: TransformersDecoder) -> None:
    """Raises UnsupportedModel if `decoder` does not compute what its model does alone (see `start_check`)."""
    config = decoder.config
    cache = KVCache(config, SMALL_BLOCKS.num_blocks, SMALL_BLOCKS.block_size, torch.float32, torch.device("cpu"))
    cache.data.fill_(torch.nan)  # nothing may be read that was not written
    attention = CpuAttention(cache, config.num_heads, config.num_kv_heads, config.attention_layers)

    @torch.inference_mode()
    def compute(step: CheckStep) -> Tensor:
        plan = attention.plan(step.starts, step.counts, step.block_tables)
        inputs = DecoderInputs(
            tokens=torch.from_numpy(step.tokens),
            positions=torch.from_numpy(step.positions),
            slot_mapping=torch.from_numpy(step.slot_mapping),
            prompt_lens=torch.from_numpy(step.prompt_lens),
        )
        return decoder.logits(decoder.forward(inputs, cache, partial(attention.run, plan)))

    check_model(decoder.model, compute, config.vocab_size)
