"""What the kernels' benchmark times, as far as that needs no GPU: names, bytes and arithmetic, and that kernels fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.kernels.attention_cases import (
    DECODE_CASES,
    DECODE_OF_OTHERS,
    OTHER_SHAPES,
    PREFILL_CASES,
    PREFILL_OF_OTHERS,
    Shape,
)
from bench.kernels.measurement import Measurement, as_json, reference_of
from bench.kernels.sampling_cases import BIASED_IDS, SAMPLING, sample_records
from runner_svc.attention.cuda_kernels import AttentionShape, DecodeVariant, HopperPrefillVariant, SharedMemory
from tests.support.attention_cases import AttentionBatch, AttentionCase

HOPPER = SharedMemory(233472, 232448)


@pytest.mark.parametrize("shape", OTHER_SHAPES, ids=str)
def test_the_kernels_have_every_shape(shape: Shape) -> None:
    compiled = AttentionShape(
        "__half", shape.head_dim, shape.num_heads, shape.num_kv_heads, shape.block_size, shape.soft_cap
    )
    for small_batch in (True, False):
        assert DecodeVariant.choose(compiled, HOPPER, small_batch).shared_bytes <= HOPPER.block
    if shape.head_dim in HopperPrefillVariant.HEAD_DIMS:
        assert HopperPrefillVariant(compiled).shared_bytes <= HOPPER.block


def test_every_shape_has_a_name_of_its_own_and_only_one_is_held_against_others() -> None:
    names = [str(shape) for shape in (*OTHER_SHAPES, Shape(32, 8, 128, fp8_cache=True))]
    assert len(set(names)) == len(names)
    assert {str(shape) for shape in OTHER_SHAPES} >= {
        "32+8 heads of 96",
        "32+8 heads of 256",
        "32+8 heads of 128, blocks of 32",
        "32+8 heads of 128, fp16",
        "32+8 heads of 128, window of 1024",
        "32+8 heads of 128, soft-cap of 50.0",
    }
    found = {}
    for name in names:
        for kind, case in (("decode", DECODE_OF_OTHERS[0]), ("prefill", PREFILL_OF_OTHERS[0])):
            one = Measurement(f"{kind}, {name}", case, 10.0, 2.0, "TB/s", "read")
            assert as_json(one, {"read": 4.0})["share"] == 0.5
            found[name, kind] = reference_of(one) is not None
    assert {name for (name, _), is_known in found.items() if is_known} == {"32+8 heads of 128"}


def test_cases_of_other_shapes_are_cases() -> None:
    assert set(DECODE_OF_OTHERS) <= set(DECODE_CASES) and set(PREFILL_OF_OTHERS) <= set(PREFILL_CASES)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize(("rows", "count", "length"), [(1, 9, 9), (3, 4, 11), (2, 1, 7)])
def test_work_is_that_of_what_rows_see(window: int | None, rows: int, count: int, length: int) -> None:
    shape = Shape(4, 2, 64, window=window)
    case = AttentionCase((length,), (count,), head_dim=64, num_heads=4, num_kv_heads=2, window=window)
    batch = AttentionBatch(case, 0, torch.device("cpu"))
    seen = np.zeros((count, length), bool)
    for position in range(length):  # a key is seen where the twin's output changes with its value
        before = batch.expected()
        block = batch.block_tables[0, position // case.block_size]
        batch.cache.data[0, 1, block, position % case.block_size] += 1e6
        seen[:, position] = ((batch.expected() - before).abs() > 0).any(-1).any(-1)
    assert shape.prefill_operations(rows, count, length) == rows * int(seen.sum()) * 4 * 4 * 64
    assert shape.decode_bytes([length] * rows) == rows * int(seen[-1].sum()) * 2 * 2 * 64 * 2


def test_records_are_those_of_requests_with_these_parameters() -> None:
    for parameters in SAMPLING.values():
        assert len(sample_records(3, parameters)) == 3
    min_p = sample_records(2, SAMPLING["min_p 0.1"])
    assert np.exp(min_p["least_scaled"]) == pytest.approx([0.1, 0.1]) and not min_p["adjusted"].any()
    biased = sample_records(2, SAMPLING[f"logit bias of {BIASED_IDS} ids"])
    assert biased["bias_count"].tolist() == [BIASED_IDS] * 2 and biased["adjusted"].all()
    plain = sample_records(2, SAMPLING["temperature"])
    assert not plain["adjusted"].any() and not plain["bias_count"].any() and np.isneginf(plain["least_scaled"]).all()
