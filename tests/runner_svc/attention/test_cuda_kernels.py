"""The variants of the attention kernels fit the shared memory of their GPUs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from runner_svc.attention.cuda_kernels import (
    AttentionShape,
    DecodeVariant,
    HopperPrefillVariant,
    PrefillVariant,
    SharedMemory,
)
from tests.support.gpu_limits import A10, A100, H100

# compute capability 8.0, 8.6 and 9.0
GPUS = {"A100": A100, "A10": A10, "H100": H100}
SHAPES = ((64, 9, 3), (96, 32, 32), (128, 32, 8), (128, 28, 4), (128, 40, 2), (256, 8, 4), (256, 16, 1))


POSITIONS = (0, 1, 2, 3, 4, 6, 8)


def shape_of(head_dim: int, num_heads: int, num_kv_heads: int, fp8_cache: bool = False) -> AttentionShape:
    return AttentionShape("__half", head_dim, num_heads, num_kv_heads, 16, None, fp8_cache)


@pytest.mark.parametrize("small_batch", [True, False])
@pytest.mark.parametrize("shared", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_fits(shape: tuple[int, int, int], shared: SharedMemory, small_batch: bool) -> None:
    for positions in POSITIONS:
        variant = DecodeVariant.choose(shape_of(*shape), shared, small_batch, positions)
        assert variant.stages >= 2
        assert variant.shared_bytes <= shared.block
        assert variant.blocks * (variant.shared_bytes + 1024) <= shared.multiprocessor
        assert variant.end_cost < variant.min_cost
        assert variant.teams * variant.sharers == variant.warps
        # Every query is in one unit.
        assert variant.units * variant.sharers * variant.columns >= shape[1] * max(positions, 1)


def test_plans_of_one_position_have_the_size_of_decodes() -> None:
    """A mixed step has room for either."""
    for shape, shared, small_batch in itertools.product(SHAPES, GPUS.values(), (True, False)):
        decode, verify = (DecodeVariant.choose(shape_of(*shape), shared, small_batch, each) for each in (0, 1))
        assert replace(verify, positions=0) == decode


@pytest.mark.parametrize(("positions", "sharers", "columns"), [(2, 1, 8), (4, 1, 16), (6, 2, 16), (8, 2, 16)])
def test_a_group_of_four_reads_its_keys_once(positions: int, sharers: int, columns: int) -> None:
    variant = DecodeVariant.choose(shape_of(128, 32, 8), H100, False, positions)
    assert (variant.units, variant.sharers, variant.columns) == (8, sharers, columns)


@pytest.mark.parametrize("fp8_cache", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_fits(shape: tuple[int, int, int], fp8_cache: bool) -> None:
    variant = PrefillVariant(shape_of(*shape, fp8_cache))
    assert variant.shared_bytes <= GPUS["A10"].block
    if HopperPrefillVariant.fits(shape_of(*shape, fp8_cache)):
        assert HopperPrefillVariant(shape_of(*shape, fp8_cache)).shared_bytes <= GPUS["H100"].block


def test_heads_of_hoppers_prefill() -> None:
    heads = [(head_dim, fp8_cache) for head_dim in range(32, 257, 32) for fp8_cache in (False, True)]
    fits = [head for head in heads if HopperPrefillVariant.fits(shape_of(head[0], 8, 8, head[1]))]
    assert fits == [(64, False), (64, True), (96, False), (96, True), (128, False), (128, True), (256, False)]


def test_shapes_that_no_kernel_serves_are_refused() -> None:
    with pytest.raises(ValueError, match="72 elements: must be a multiple of 16"):
        shape_of(72, 8, 8)
    with pytest.raises(ValueError, match="80 elements with an FP8 cache: must be a multiple of 32"):
        shape_of(80, 8, 8, True)
    with pytest.raises(ValueError, match="blocks of 8 tokens"):
        AttentionShape("__half", 64, 8, 8, 8, None)
