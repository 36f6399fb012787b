"""Steps of a backend on the CPU without a scheduler: the logits of every position, compared as integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.decoder.cpu_decoder import DecoderInputs


@dataclass(frozen=True, slots=True)
class Part:
    """Positions of a sequence from `start` that a step computes. `table`: its blocks."""

    tokens: Sequence[int]
    start: int
    table: Sequence[int]


class Steps:
    """The decoder and cache of a backend."""

    def __init__(self, backend: TorchBackend) -> None:
        self._backend = backend

    @torch.inference_mode()
    def logits(self, parts: Sequence[Part], prompt_len: int = 1) -> list[Tensor]:
        """Computes a step; returns the logits of each part, float32 [positions, vocab_size]."""
        backend = self._backend
        starts = np.array([part.start for part in parts], np.int32)
        counts = np.array([len(part.tokens) for part in parts], np.int32)
        width = max(len(part.table) for part in parts)
        tables = np.array([[*part.table, *[0] * (width - len(part.table))] for part in parts], np.int32)
        positions = np.concatenate([start + np.arange(count) for start, count in zip(starts, counts, strict=True)])
        rows = np.repeat(np.arange(len(parts)), counts)
        size = backend.block_size
        inputs = DecoderInputs(
            tokens=torch.tensor([token for part in parts for token in part.tokens]),
            positions=torch.from_numpy(positions.astype(np.int64)),
            slot_mapping=torch.from_numpy((tables[rows, positions // size] * size + positions % size).astype(np.int64)),
            prompt_lens=torch.full((len(positions),), prompt_len),
        )
        attention = backend._pass._attention.planned(starts, counts, tables)
        hidden = backend._decoder.forward(inputs, backend.cache, attention)
        return list(backend._decoder.logits(hidden).split(counts.tolist()))


def different(one: Tensor, other: Tensor) -> int:
    """Returns how many positions have unequal bits in logits [positions, vocab_size]."""
    return int((one.contiguous().view(torch.int32) != other.contiguous().view(torch.int32)).any(dim=-1).sum())
