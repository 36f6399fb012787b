"""The host's launchers pass the tests of the kernels on a GPU, which verifies those tests."""

from __future__ import annotations

import pytest
import torch

from runner_svc.model.families.description import NormKind, QkNorm
from tests.support.host_device import copy_words, scatter_segments
from tests.support.host_layers import HostRopeKv
from tests.support.rope_cases import EPS, SHAPES, RopeCase, check_fp8_write, check_write
from tests.support.slot_copies import WORDS, check_copy, check_scatter

CPU = torch.device("cpu")


def host_rope(case: RopeCase) -> HostRopeKv:
    return HostRopeKv(
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        rotary_dim=case.rotary_dim,
        eps=EPS,
        qk_norm=case.qk_norm,
        norm=NormKind.RMS_PLUS_ONE if case.plus_one else NormKind.RMS,
    )


@pytest.mark.parametrize("qk_norm", QkNorm)
@pytest.mark.parametrize("num_tokens", [1, 33])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope_and_cache_write(shape: tuple, num_tokens: int, qk_norm: QkNorm) -> None:
    case = RopeCase(*shape, num_tokens=num_tokens, qk_norm=qk_norm, plus_one=qk_norm is QkNorm.HEAD)
    for in_place in (False, True):
        check_write(host_rope, case, CPU, 0, in_place)
    check_fp8_write(host_rope, case, CPU, 0)


def at_once() -> None:
    """Does nothing: there is no device to wait for."""


@pytest.mark.parametrize("num_words", WORDS)
def test_copies(num_words: int) -> None:
    source, target = (torch.zeros(num_words + 12, dtype=torch.int32) for _ in range(2))
    check_copy(copy_words, source, target, num_words, 0, at_once)
    check_copy(copy_words, source[4:], target[8:], num_words - 4 or 4, 0, at_once)


@pytest.mark.parametrize(("num_admitted", "num_appended"), [(1, 0), (0, 1), (3, 2), (0, 40), (40, 40)])
def test_changes_of_the_slots(num_admitted: int, num_appended: int) -> None:
    check_scatter(scatter_segments, CPU, num_admitted, num_appended, 0, at_once)
