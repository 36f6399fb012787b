"""The paged cache: writes of positions, and copies of whole blocks."""

from __future__ import annotations

import torch

from runner_svc.interface.kv_cache import KVCache
from runner_svc.model.config import ModelConfig

CONFIG = ModelConfig.from_hugging_face(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
)


def make_cache() -> KVCache:
    cache = KVCache(CONFIG, 6, 4, torch.float32, torch.device("cpu"))
    cache.data.normal_()
    return cache


def test_block_zero_is_extra() -> None:
    cache = make_cache()
    assert cache.data.shape == (3, 2, 7, 4, 2, 4)
    assert KVCache.block_bytes(CONFIG, 4, torch.float32) == cache.data[:, :, 0].numel() * 4


def test_write_touches_its_positions_only() -> None:
    cache = make_cache()
    expected = cache.data.clone()
    keys, values = torch.randn(3, 8), torch.randn(3, 8)
    cache.write(1, keys, values, torch.tensor([5 * 4 + 3, 2 * 4, 6 * 4 + 1]))
    for index, (block, offset) in enumerate([(5, 3), (2, 0), (6, 1)]):
        expected[1, 0, block, offset] = keys[index].view(2, 4)
        expected[1, 1, block, offset] = values[index].view(2, 4)
    assert torch.equal(cache.data, expected)


def test_blocks_are_keys_then_values() -> None:
    cache = make_cache()
    assert torch.equal(cache.blocks[2][4].view(4, 2, 4), cache.data[2, 0, 4])
    assert torch.equal(cache.blocks[2][7 + 4].view(4, 2, 4), cache.data[2, 1, 4])


def test_copies_read_all_sources_first() -> None:
    cache = make_cache()
    before = cache.data.clone()
    cache.copy_blocks(torch.tensor([1, 2, 3]), torch.tensor([2, 3, 6]))
    for source, target in ((1, 2), (2, 3), (3, 6)):
        assert torch.equal(cache.data[:, :, target], before[:, :, source])
    assert torch.equal(cache.data[:, :, [0, 1, 4, 5]], before[:, :, [0, 1, 4, 5]])
