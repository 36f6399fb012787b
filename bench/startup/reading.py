"""Times reading a checkpoint onto the GPU in several ways, and compares what they read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open

from runner_svc.model.checkpoint import staged_reader, weights
from runner_svc.model.config import ModelConfig
from runner_svc.model.folder.checkpoint_files import checkpoint_tensors
from runner_svc.model.folder.config_file import read_config
from runner_svc.weights.model_weights import MlpWeights

MAPPED = (0, 0)
"""In place of threads and bytes of a piece: a memory map, copied by torch."""
WAYS: tuple[tuple[int, int], ...] = ((8, 4), (16, 4), (8, 16), (4, 8), MAPPED)
"""Threads, and MiB of a piece."""


def time_ways(folder: Path, ways: Sequence[tuple[int, int]], until_at: float) -> None:
    """Prints seconds, rate and the largest memory of each way, until a time of `time.monotonic`."""
    config = ModelConfig.from_hugging_face(read_config(folder))
    reader = staged_reader.StagedReader
    for threads, mebibytes in ways:
        if time.monotonic() > until_at:
            print("no time is left for further ways", flush=True)
            return
        make = partial(reader, threads=threads, piece_bytes=mebibytes << 20) if threads else _Mapped
        weights.StagedReader = make  # type: ignore[assignment,misc]
        name = f"{threads} threads, pieces of {mebibytes} MiB" if threads else "memory map"
        _time(folder, config, name)
    weights.StagedReader = reader  # type: ignore[misc]


class _Mapped:
    """As `StagedReader`, in the plain way."""

    def __init__(self, tensors: object, device: torch.device, read: Callable[[str], torch.Tensor]) -> None:
        self._device, self._read = device, read

    def __enter__(self) -> _Mapped:
        return self

    def __exit__(self, *error: object) -> None:
        """Closes nothing."""

    def __call__(self, name: str) -> torch.Tensor:
        return self._read(name).to(self._device)


def _time(folder: Path, config: ModelConfig, name: str) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    began_at = time.perf_counter()
    device = torch.device("cuda")
    loaded = weights.load_weights(folder, config, torch.bfloat16, device, lambda what, share: None)
    layers = list(loaded.layers)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began_at
    held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    mlp = layers[-1].mlp
    assert isinstance(mlp, MlpWeights), "the checkpoint has no experts"
    wrong = [
        stored
        for stored, read in (
            (config.names.head, loaded.head.weight),
            ("model.layers.0.self_attn.v_proj", layers[0].qkv.weight[-config.num_kv_heads * config.head_dim :]),
            (f"model.layers.{config.num_layers - 1}.mlp.down_proj", mlp.down.weight),
        )
        if not torch.equal(_stored(folder, f"{stored}.weight"), read.cpu())
    ]
    print(
        f"reading, {name}: {seconds:.2f} s, {held / seconds / 1e9:.1f} GB/s; {held / 1e9:.2f} GB, at most "
        f"{(peak - held) / 1e9:.2f} GB more; {f'WRONG: {wrong}' if wrong else 'right'}",
        flush=True,
    )


def _stored(folder: Path, name: str) -> torch.Tensor:
    with safe_open(checkpoint_tensors(folder)[name].path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor
