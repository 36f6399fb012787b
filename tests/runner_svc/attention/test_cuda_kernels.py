"""The variants of the attention kernels fit the shared memory of the GPUs that they are meant for."""

from __future__ import annotations

import pytest

from runner_svc.attention.cuda_kernels import (
    AttentionShape,
    DecodeVariant,
    HopperPrefillVariant,
    PrefillVariant,
    SharedMemory,
)
from runner_svc.cuda.skinny_variant import SkinnyVariant

# compute capability 8.0, 8.6 and 9.0
GPUS = {"A100": SharedMemory(167936, 166912), "A10": SharedMemory(102400, 101376), "H100": SharedMemory(233472, 232448)}
SHAPES = ((64, 9, 3), (96, 32, 32), (128, 32, 8), (128, 28, 4), (128, 40, 2), (256, 8, 4), (256, 16, 1))


def shape_of(head_dim: int, num_heads: int, num_kv_heads: int) -> AttentionShape:
    return AttentionShape("__half", head_dim, num_heads, num_kv_heads, 16, None)


@pytest.mark.parametrize("small_batch", [True, False])
@pytest.mark.parametrize("shared", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_fits(shape: tuple[int, int, int], shared: SharedMemory, small_batch: bool) -> None:
    variant = DecodeVariant.choose(shape_of(*shape), shared, small_batch)
    together = DecodeVariant.choose(shape_of(*shape), shared, small_batch, detached_merges=False)
    assert variant.stages >= 2
    # Another way to merge costs no stage.
    assert (variant.warps, variant.blocks, variant.stages) == (together.warps, together.blocks, together.stages)
    assert not (together.detached_merges or (small_batch and variant.detached_merges))
    assert variant.shared_bytes <= shared.block
    assert variant.blocks * (variant.shared_bytes + 1024) <= shared.multiprocessor
    assert variant.end_cost < variant.min_cost
    # Every query head is in one unit.
    assert variant.units * variant.columns >= shape[1]


def test_blocks_of_the_usual_shapes_merge_detached() -> None:
    for num_heads in (16, 32):
        assert DecodeVariant.choose(shape_of(128, num_heads, 8), GPUS["H100"], small_batch=False).detached_merges


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_beside_a_product_leaves_room_for_one_of_its_blocks(shape: tuple[int, int, int]) -> None:
    shared = GPUS["H100"]
    variant = DecodeVariant.beside_product(shape_of(*shape), shared)
    assert variant is not None and variant.stages >= 2
    for tokens in (8, 16):
        product = SkinnyVariant(tokens, split=2, blocks=2)
        assert variant.shared_bytes + product.shared_bytes + 2 * 1024 <= shared.multiprocessor
    # Both kernels take the same plans.
    alone = DecodeVariant.choose(shape_of(*shape), shared, small_batch=True)
    assert (variant.blocks, variant.units, variant.heads) == (alone.blocks, alone.units, alone.heads)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_fits(shape: tuple[int, int, int]) -> None:
    variant = PrefillVariant(shape_of(*shape))
    assert variant.shared_bytes <= GPUS["A10"].block
    if shape[0] in HopperPrefillVariant.HEAD_DIMS:
        assert HopperPrefillVariant(shape_of(*shape)).shared_bytes <= GPUS["H100"].block


def test_shapes_that_no_kernel_serves_are_refused() -> None:
    with pytest.raises(ValueError, match="80 elements"):
        shape_of(80, 8, 8)
    with pytest.raises(ValueError, match="blocks of 8 tokens"):
        AttentionShape("__half", 64, 8, 8, 8, None)
