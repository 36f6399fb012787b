"""Which layouts matrices get on a GPU, and which launchers of products a model makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from runner_svc.cuda.products import kernels
from runner_svc.cuda.products.kernels import KERNELS, _OnDemand, prepared
from runner_svc.cuda.products.preparing import Preparing
from runner_svc.weights.activation_rounding import NoRounding
from runner_svc.weights.blocks.int8_matrix import Int8Matrix
from runner_svc.weights.fp8_matrix import Fp8Matrix, to_fp8
from runner_svc.weights.int4_matrix import Int4Matrix
from runner_svc.weights.matrix import JoinedMatrix, Matrix
from runner_svc.weights.plain_matrix import PlainMatrix


def test_fp8_without_kernels_becomes_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded, kept = to_fp8(torch.randn(32, 64)), replace(to_fp8(torch.randn(32, 64)), rounding=NoRounding())
    for is_hopper, dtype in ((True, torch.bfloat16), (True, torch.float16), (False, torch.bfloat16)):
        monkeypatch.setattr(kernels, "is_hopper", lambda is_hopper=is_hopper: is_hopper)
        plain = prepared(kept, dtype)
        assert isinstance(plain, PlainMatrix) and torch.equal(plain.weight, kept.dequantized().to(dtype))
        has_kernels = is_hopper and dtype is torch.bfloat16
        assert (prepared(rounded, dtype) is rounded) == has_kernels
        odd = prepared(to_fp8(torch.randn(33, 64)), dtype)
        assert isinstance(odd, PlainMatrix) and odd.weight.dtype is dtype


def test_a_runner_says_what_became_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "is_hopper", lambda: True)
    kept, fp8, plain = int8(), to_fp8(torch.randn(32, 64)), PlainMatrix(torch.randn(32, 64))
    preparing = Preparing(torch.bfloat16)
    assert [preparing(each) for each in (fp8, plain)] == [fp8, plain] and preparing.sentence == ""
    assert isinstance(preparing(kept), PlainMatrix)
    joined = preparing(JoinedMatrix((fp8, kept)))
    assert isinstance(joined, JoinedMatrix) and joined.parts[0] is fp8
    assert preparing.plain == {"int8 in groups of 32": 2}
    assert preparing.sentence == "as bfloat16 on this GPU: int8 in groups of 32"


def int8() -> Int8Matrix:
    return Int8Matrix(torch.ones(32, 64, dtype=torch.int8), torch.ones(32, 2, dtype=torch.float16), 32)


def test_a_plain_model_makes_no_launchers_of_other_formats() -> None:
    made: list[type[Matrix]] = []

    def make(kind: type[Matrix], launcher: str | None) -> str | None:
        made.append(kind)
        return launcher

    launchers: Mapping[type[Matrix], str] = _OnDemand(
        {
            PlainMatrix: lambda: make(PlainMatrix, "plain"),
            Fp8Matrix: lambda: make(Fp8Matrix, "fp8"),
            Int4Matrix: lambda: make(Int4Matrix, None),
        }
    )
    assert [launchers.get(PlainMatrix), launchers[PlainMatrix]] == ["plain"] * 2 and made == [PlainMatrix]
    assert Int4Matrix not in launchers and launchers.get(Int4Matrix, "other") == "other"
    assert set(launchers) == {PlainMatrix, Fp8Matrix} and made == [PlainMatrix, Int4Matrix, Fp8Matrix]
    assert {PlainMatrix, Fp8Matrix, Int4Matrix} <= set(KERNELS)
