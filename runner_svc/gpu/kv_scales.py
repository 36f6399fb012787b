"""The scales of an FP8 (e4m3) KV cache: one for the keys and one for the values of each head of each layer.

An element is stored in units of its head's scale. e4m3 is a floating-point type, so a scale adds no precision: it only
has to keep what a head produces between 448, beyond which values are clipped, and 2^-6, below which they lose bits.
Scales are therefore powers of two, found once at start-up from the largest keys and values of a prompt of random
tokens, with room for prompts that reach further. They depend on the weights alone, so that every runner has the same.
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
# What prompts may reach, as a multiple of what calibration saw.
HEADROOM = 2.0

_PROMPT_TOKENS = 512
_BLOCK_SIZE = 32
_TAIL_WORDS = 1 << 10


def scales_for(largest: Tensor) -> Tensor:
    """The least powers of two with which `largest` magnitudes (of any shape), and HEADROOM, fit; 1 where one is 0."""
    usable = torch.where(largest.isfinite() & (largest > 0), largest.float(), LARGEST_E4M3 / HEADROOM)
    return torch.exp2(torch.ceil(torch.log2(usable * (HEADROOM / LARGEST_E4M3))))


def calibrated_scales(model: CudaDecoder, launchers: Launchers, device: Device, max_tokens: int) -> Tensor:
    """float32 [layers, 2, kv_heads], from one prompt of at most `max_tokens` random tokens over a 16-bit cache."""
    config = model.config
    num_tokens = min(max_tokens, _PROMPT_TOKENS)
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    cache = KVCache(config, num_blocks, _BLOCK_SIZE, model.dtype, device.device)
    decoder = CudaDecoder(config, model.weights, launchers.decoder(fp8_cache=False), num_tokens)
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
