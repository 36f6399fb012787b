"""What a GPU does with quantized weights until their kernels have been tried in whole models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runner_svc.cuda.products import kernels
from runner_svc.cuda.products.kernels import KERNELS, _OnDemand, prepared
from runner_svc.gpu.loading import refuse_formats
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.folder.config_file import read_config
from runner_svc.model.quantization.selection import Quantization
from runner_svc.weights.activation_rounding import NoRounding
from runner_svc.weights.fp8_matrix import Fp8Matrix, to_fp8
from runner_svc.weights.int4_matrix import Int4Matrix, to_int4
from runner_svc.weights.matrix import Matrix, joined
from runner_svc.weights.on_load import NOTHING, OnLoad
from runner_svc.weights.plain_matrix import PlainMatrix
from tests.support.tiny_models import make_tiny_model


def test_quantized_weights_are_refused_but_for_blocks_of_gguf(tmp_path: Path) -> None:
    config = ModelConfig.from_hugging_face(read_config(make_tiny_model("llama", tmp_path / "tiny")))
    refuse_formats(config, NOTHING)
    refuse_formats(replace(config, quantization=Quantization("gguf-blocks", (), ())), NOTHING)
    with pytest.raises(UnsupportedModel, match="which only the CPU serves so far: set device to 'cpu'"):
        refuse_formats(replace(config, quantization=Quantization("awq", (), ())), NOTHING)
    for on_load in (OnLoad("fp8"), OnLoad(head=True)):
        with pytest.raises(UnsupportedModel, match="quantize_head to false, or device to 'cpu'"):
            refuse_formats(config, on_load)


def test_what_is_not_refused_becomes_plain() -> None:
    parts: list[Matrix] = [to_int4(torch.randn(24, 64), 32), to_fp8(torch.randn(8, 64))]
    whole = joined(parts)
    plain = prepared(whole, torch.bfloat16, all_plain=True)
    assert isinstance(plain, PlainMatrix) and prepared(plain, all_plain=True) is plain
    assert torch.equal(plain.weight, whole.dequantized().bfloat16())


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
