"""Gathered inputs against the CPU's BatchState arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.gather import GatherInputs  # imports CuPy

NUM_SLOTS, CONTEXT, MAX_BLOCKS = 40, 640, 40


def on_gpu(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int32)).cuda()


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("num_rows", [1, 2, 37])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("most", [1, 100])
def test_gather_inputs(num_rows: int, block_size: int, padding: int, most: int) -> None:
    rng = np.random.default_rng()
    slots = rng.permutation(NUM_SLOTS)[:num_rows]
    counts = rng.integers(0 if num_rows > 2 else 1, most + 1, num_rows)  # rows may be empty
    counts[0] = max(counts[0], 1)
    starts = np.array([rng.integers(0, CONTEXT - count + 1) for count in counts])
    buffer = rng.integers(0, 1000, (NUM_SLOTS + 1, CONTEXT))
    tables = rng.integers(1, 5000, (NUM_SLOTS + 1, MAX_BLOCKS))
    offsets = np.concatenate(([0], np.cumsum(counts)))
    total = int(offsets[-1])
    outs = [torch.full((total + padding,), -7, dtype=torch.int32, device="cuda") for _ in range(3)]
    gather = GatherInputs(on_gpu(buffer), on_gpu(tables), block_size)
    gather(torch.cuda.current_stream().cuda_stream, on_gpu(slots), on_gpu(starts), on_gpu(offsets), *outs)

    rows = np.repeat(np.arange(num_rows), counts)
    positions = starts[rows] + np.arange(total) - offsets[rows]
    expected = (
        buffer[slots[rows], positions],
        positions,
        tables[slots[rows], positions // block_size] * block_size + positions % block_size,
    )
    for out, values in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(out.cpu().numpy(), np.concatenate((values, np.zeros(padding))))
