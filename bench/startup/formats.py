"""Loads a plain checkpoint onto the GPU in several formats, and prints the seconds and the memory of each."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from runner_svc.cuda.fp8.on_load import on_gpu
from runner_svc.cuda.module import is_hopper
from runner_svc.cuda.products.kernels import prepared
from runner_svc.model.checkpoint.weights import load_weights
from runner_svc.model.config import ModelConfig
from runner_svc.model.folder.config_file import read_config
from runner_svc.weights.on_load import OnLoad

PLAIN = "none"
_DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Loading:
    """Seconds, and bytes of the GPU that torch's allocator gave to tensors."""

    seconds: float
    held: int
    peak: int


def time_formats(folder: Path, formats: Sequence[str], until_at: float) -> None:
    """Prints two loads of each format, each format in a process of its own, beside those of plain weights.

    A format's first process may compile kernels, and the very first one brings the checkpoint into the page cache; what
    counts is the second one: in it, the first load is that of a runner's start. It stops at a time of `time.monotonic`.
    """
    plain: list[Loading] = []
    for name in formats:
        for kernels in ("empty", "warm"):
            if time.monotonic() > until_at:
                print("no time is left for further formats", flush=True)
                return
            loadings = _in_a_process(folder, name)
            plain = loadings if name == PLAIN else plain
            for index, (times, loading) in enumerate(zip(("first", "again"), loadings, strict=True)):
                beside = plain[index] if plain else None
                print(line(f"{name}, {kernels} caches, {times}", loading, beside), flush=True)


def _in_a_process(folder: Path, name: str) -> list[Loading]:
    call = f"import sys; from {__name__} import print_loads; print_loads(*sys.argv[1:])"
    command = [sys.executable, "-c", call, str(folder), name]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [Loading(**fields) for fields in json.loads(printed.splitlines()[-1])]


def print_loads(folder: str, name: str) -> None:
    """Prints the first load of this process and the next one, as JSON; CUDA has started before."""
    is_hopper()
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    print(json.dumps([asdict(load(Path(folder), name)) for _ in range(2)]), flush=True)


def line(name: str, loading: Loading, plain: Loading | None) -> str:
    """Returns a format's line, with ratios to plain weights if they are known."""
    text = f"loading, {name}: {loading.seconds:.2f} s, {loading.held / 1e9:.2f} GB, peak {loading.peak / 1e9:.2f} GB"
    if plain is None:
        return text
    return (
        f"{text}; {loading.seconds / plain.seconds:.2f} x seconds, peak {loading.peak / plain.held:.2f} x plain bytes"
    )


def load(folder: Path, name: str) -> Loading:
    """Loads the folder's weights as a runner does, quantized so while they are read, and frees them."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    began_at, before = time.perf_counter(), torch.cuda.memory_allocated()
    config = ModelConfig.from_hugging_face(read_config(folder))
    with torch.no_grad():
        device = torch.device("cuda")
        weights = load_weights(folder, config, _DTYPE, device, lambda what, share: None, on_gpu(OnLoad(name)))
        layers = [layer.mapped(partial(prepared, dtype=_DTYPE)) for layer in weights.layers]
        torch.cuda.synchronize()
    seconds, held = time.perf_counter() - began_at, torch.cuda.memory_allocated() - before
    del weights, layers
    return Loading(seconds, held, torch.cuda.max_memory_allocated() - before)
