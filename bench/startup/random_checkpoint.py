"""Writes a random checkpoint of a shape in bfloat16, in shards of safetensors, at the speed of memory."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import numpy as np
import torch

from bench.common.random_model import ALL_SHAPES
from runner_svc.model.checkpoint.expected_tensors import expected_tensors
from runner_svc.model.config import ModelConfig
from runner_svc.model.folder.checkpoint_files import INDEX_FILE

_SHARDS = 8
_SCALE = 0.02
_RANDOM = 1 << 26
"""Random numbers, which the tensors repeat."""


def write_checkpoint(shape: str, folder: Path) -> int:
    """Writes the weights of a shape (a key of `ALL_SHAPES`) into its folder; returns their bytes."""
    config = ModelConfig.from_hugging_face(ALL_SHAPES[shape])
    tensors = dict(expected_tensors(config, "model.", ()))
    if config.tied_embeddings:
        del tensors[f"{config.names.head}.weight"]
    numbers = (torch.randn(_RANDOM, generator=torch.Generator().manual_seed(0)) * _SCALE).bfloat16().view(torch.uint8)
    weights = {}
    shards: list[dict[str, tuple[int, ...]]] = [{} for _ in range(_SHARDS)]
    for name, size in tensors.items():
        lightest = min(range(_SHARDS), key=lambda index: sum(map(prod, shards[index].values())))
        shards[lightest][name] = size
        weights[name] = f"model-{lightest}.safetensors"
    with ThreadPoolExecutor(_SHARDS) as threads:
        jobs = [
            threads.submit(_write_shard, folder / f"model-{number}.safetensors", shard, numbers.numpy())
            for number, shard in enumerate(shards)
        ]
        total = sum(job.result() for job in jobs)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weights}))
    return total


def _write_shard(path: Path, tensors: dict[str, tuple[int, ...]], numbers: np.ndarray) -> int:
    header, end = {}, 0
    for name, size in tensors.items():
        begin, end = end, end + 2 * prod(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    ones = torch.ones(1 << 16, dtype=torch.bfloat16).view(torch.uint8).numpy()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, size in tensors.items():
            source = ones if len(size) == 1 and name.endswith("norm.weight") else numbers
            left, place = 2 * prod(size), (len(name) * 4099 << 4) % len(source) if source is numbers else 0
            while left:
                part = source[place : place + left]
                file.write(part.data)
                left, place = left - len(part), 0
    return end
