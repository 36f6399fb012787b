"""The scales of an FP8 (e4m3) KV cache: one for the keys and one for the values of each head of each layer.

An element is stored in units of its head's scale. e4m3 is a floating-point type, so a scale adds no precision: it only
keeps a head's values between 2^-6, below which they lose bits, and 448, above which they are clipped. Scales are
therefore powers of two. They are computed once at start-up from the largest keys and values of a prompt of random
tokens, with headroom for larger ones. They depend only on the weights, so all runners of a model use the same scales.
A checkpoint may state scales, one for the keys and one for the values of a layer: these are used as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.gpu.profiling_batch import largest_batch
from runner_svc.gpu.step_buffers import PackedStep
from runner_svc.gpu.steps import CudaSteps
from runner_svc.interface.device import Device
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.launchers import Launchers

LARGEST_E4M3 = 448.0
# Largest magnitude that a prompt may reach, relative to the calibration's.
HEADROOM = 2.0

_PROMPT_TOKENS = 512
_BLOCK_SIZE = 32
_TAIL_WORDS = 1 << 10


def scales_for(largest: Tensor) -> Tensor:
    """Returns the least powers of two with which HEADROOM * `largest` (of any shape) fits; 1 where `largest` is 0."""
    usable = torch.where(largest.isfinite() & (largest > 0), largest.float(), LARGEST_E4M3 / HEADROOM)
    return torch.exp2(torch.ceil(torch.log2(usable * (HEADROOM / LARGEST_E4M3))))


def stated_scales(scales: Tensor, num_kv_heads: int) -> Tensor:
    """Returns a checkpoint's scales, float32 [layers, 2], for each head: [layers, 2, kv_heads]."""
    return scales.unsqueeze(-1).expand(-1, -1, num_kv_heads).contiguous()


def calibrated_scales(model: CudaDecoder, launchers: Launchers, device: Device, max_tokens: int) -> Tensor:
    """Computes scales, float32 [layers, 2, kv_heads], from up to `max_tokens` random tokens over a 16-bit cache."""
    config = model.config
    num_tokens = min(max_tokens, _PROMPT_TOKENS)
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    cache = KVCache(config, num_blocks, _BLOCK_SIZE, model.dtype, device.device)
    ranks = model.exchanges.ranks if model.exchanges is not None else None
    decoder = CudaDecoder(config, model.weights, launchers.decoder(fp8_cache=False), num_tokens, ranks)
    tables = torch.arange(1, num_blocks + 1, dtype=torch.int32, device=device.device).unsqueeze(0)
    ids = torch.randint(config.vocab_size, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    prompt = DeviceSlots(1, num_tokens, num_blocks, device.device)
    prompt.tokens[:1], prompt.tables[:1] = ids.int().to(device.device), tables
    steps = CudaSteps(
        decoder, cache, prompt, launchers, num_slots=1, max_step_tokens=num_tokens, tail_words=_TAIL_WORDS
    )
    words = device.pinned(steps.layout.words)
    mixed = steps.pack_mixed(PackedStep(steps.layout, words.numpy()), largest_batch(1, num_tokens, num_tokens))
    steps.packed.copy_(words)
    steps.run_mixed(device.current_stream(), mixed)
    positions = cache.data[:, :, 1:].flatten(2, 3)[:, :, :num_tokens]
    scales = scales_for(positions.abs().amax((2, 4)))
    device.synchronize()
    return scales
