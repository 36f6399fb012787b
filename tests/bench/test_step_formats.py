"""Formats of `bench.steps`."""

from __future__ import annotations

import argparse

import pytest

from bench.steps.formats import format_of, graphs_of
from bench.steps.times import BARS
from runner_svc.gpu import capture


def test_every_bar_of_a_format_can_be_timed() -> None:
    names = [format_of(text).name for text in ("none", "fp8", "fp8+head", "fp8+kv", "fp8-block", "int4")]
    models = {", ".join(filter(None, ("llama-3.1-8b", name))) for name in names}
    assert models == {model for model in BARS if model.startswith("llama-3.1-8b")}


@pytest.mark.parametrize("text", ["fp9", "fp8+heads", "", "fp8 + kv"])
def test_others_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"no format: write none, fp8, fp8-block, int4, with \+head"):
        format_of(text)


def test_graphs_of_the_batches_alone() -> None:
    usual = capture.bucket_sizes
    with graphs_of([8, 1]):
        assert capture.bucket_sizes(256) == [1, 8, 256]
    assert capture.bucket_sizes is usual
    with graphs_of(None):
        assert capture.bucket_sizes is usual
