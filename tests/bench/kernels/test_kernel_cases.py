"""Cases of the kernels' benchmark, as far as that needs no GPU: names, bytes, arithmetic, and whether kernels fit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from bench.kernels import __main__ as command
from bench.kernels.attention_cases import DECODE_CASES, PARTS, PREFILL_CASES, Shape
from bench.kernels.measurement import Measurement, as_json, reference_of
from bench.kernels.sampling_cases import BIASED_IDS, SAMPLING, sample_records
from runner_svc.attention.cuda_kernels import AttentionShape, DecodeVariant, HopperPrefillVariant
from tests.support.attention_cases import AttentionBatch, AttentionCase
from tests.support.gpu_limits import H100

SHAPES = [shape for part in PARTS.values() for shape in part.shapes]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_have_every_shape(shape: Shape) -> None:
    compiled = AttentionShape(
        "__half",
        shape.head_dim,
        shape.num_heads,
        shape.num_kv_heads,
        shape.block_size,
        shape.soft_cap,
        shape.fp8_cache,
    )
    for small_batch in (True, False):
        assert DecodeVariant.choose(compiled, H100, small_batch).shared_bytes <= H100.block
    if HopperPrefillVariant.fits(compiled):
        assert HopperPrefillVariant(compiled).shared_bytes <= H100.block


def test_every_shape_has_a_name_of_its_own_and_only_one_is_held_against_others() -> None:
    names = [str(shape) for shape in SHAPES]
    assert len(set(names)) == len(names)  # no part repeats a case of another
    assert set(names) >= {
        "32+8 heads of 96",
        "32+8 heads of 96, FP8 cache",
        "32+8 heads of 256",
        "32+8 heads of 128, blocks of 32",
        "32+8 heads of 128, fp16",
        "32+8 heads of 128, window of 256",
        "32+8 heads of 128, soft-cap of 50.0",
    }
    found = {}
    for name in names:
        for kind, case in (("decode", "8 x 8192"), ("prefill", "1 x 8192")):
            one = Measurement(f"{kind}, {name}", case, 10.0, 2.0, "TB/s", "read")
            assert as_json(one, {"read": 4.0})["share"] == 0.5
            found[name, kind] = reference_of(one) is not None
    assert {name for (name, _), is_known in found.items() if is_known} == {"32+8 heads of 128"}


def test_cases_of_parts_are_cases_and_a_window_binds_in_each() -> None:
    for part in PARTS.values():
        assert set(part.decode) <= set(DECODE_CASES) and set(part.prefill) <= set(PREFILL_CASES)
        for window in (shape.window for shape in part.shapes if shape.window is not None):
            assert window <= min(min(DECODE_CASES[name]) for name in part.decode) // 2
            assert window <= min(PREFILL_CASES[name][2] for name in part.prefill) // 2


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces measuring: nothing runs, and a measurement only names its case."""

    def measure(kind: str) -> Callable[..., Measurement]:
        return lambda shape, name, *_: Measurement(f"{kind}, {shape}", name, 1.0, 1.0, "TB/s", "read")

    for kind in ("prefill", "decode"):
        monkeypatch.setattr(command.attention, f"measure_{kind}", measure(kind))
    monkeypatch.setattr(command.small, "measurements", lambda: iter([measure("small")("kernel", "case")]))


@pytest.mark.usefixtures("timed")
def test_prefill_of_all_parts_comes_before_any_decode() -> None:
    found = list(command.measured(command.PARTS))
    kinds = [one.kernel.partition(",")[0] for one in found]
    assert kinds == sorted(kinds, key=["prefill", "decode", "small"].index)
    assert len({(one.kernel, one.case) for one in found}) == len(found) == 3 * (6 + 10) + 3 * (6 + 2) + 4 * (2 + 2) + 1
    assert [one.kernel for one in command.measured(["small"])] == ["small, kernel"]
    assert {one.kernel for one in command.measured(["attention-64"])} == {
        "prefill, 32+8 heads of 64",
        "decode, 32+8 heads of 64",
    }


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize(("rows", "count", "length"), [(1, 9, 9), (3, 4, 11), (2, 1, 7)])
def test_work_is_that_of_what_rows_see(window: int | None, rows: int, count: int, length: int) -> None:
    shape = Shape(4, 2, 64, window=window)
    case = AttentionCase((length,), (count,), head_dim=64, num_heads=4, num_kv_heads=2, window=window)
    batch = AttentionBatch(case, 0, torch.device("cpu"))
    seen = np.zeros((count, length), bool)
    for position in range(length):  # a key is visible if the reference's output changes with its value
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
