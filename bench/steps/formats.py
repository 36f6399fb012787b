"""The formats of weights and KV that a run of `bench.steps` compares, and graphs of the timed batches alone."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bench.common.quantization import FORMATS
from runner_svc.gpu import capture
from runner_svc.weights.on_load import OnLoad

_HEAD, _KV = "head", "kv"
_KV_FORMAT = "fp8_e4m3"


@dataclass(frozen=True, slots=True)
class Format:
    """What is quantized."""

    on_load: OnLoad
    fp8_cache: bool

    @property
    def name(self) -> str:
        """For results; "" for nothing."""
        return ", ".join(filter(None, (self.on_load.name, f"KV {_KV_FORMAT}" if self.fp8_cache else "")))


def format_of(text: str) -> Format:
    """Parses one of `--formats`: "none", "fp8", "fp8+head", "fp8+kv". Raises argparse.ArgumentTypeError."""
    layers, *others = text.split("+")
    if layers not in FORMATS or not set(others) <= {_HEAD, _KV}:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no format: write {', '.join(FORMATS)}, with +{_HEAD} or +{_KV} behind it"
        )
    return Format(OnLoad(layers, _HEAD in others), _KV in others)


@contextmanager
def graphs_of(batches: Sequence[int] | None) -> Iterator[None]:
    """Makes backends capture decode graphs of these batches alone: all, with variants, take 20 s. None: of all."""
    if batches is None:
        yield
        return
    usual = capture.bucket_sizes
    capture.bucket_sizes = lambda max_rows: sorted({*batches, max_rows})
    try:
        yield
    finally:
        capture.bucket_sizes = usual
