"""A drafter of trials on a GPU: it proposes the tokens in a tensor, right or wrong.

One launch, as the drafters of the service: in torch, its dozen launches took 3% of a step of a small model.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from runner_svc.cuda.kernel import Kernel
from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.interface.draft_launchers import DraftLaunchers, DraftRows

_THREADS = 128
SOURCE = r"""
extern "C" __global__ void told_drafts(
    const int* slots, const int* starts, const int* counts, const int* counters, const int* texts, int* proposals,
    int num_rows, int stride, int context_length) {
    const int place = blockIdx.x * blockDim.x + threadIdx.x, row = place / stride, draft = place % stride;
    if (row >= num_rows) return;
    const int wanted = starts[row] < 0 ? counts[row] - 1 : 0;
    const int position = counters[slots[row]] + draft;
    const bool proposes = draft < wanted && position >= 0 && position < context_length;
    proposals[place] = proposes ? texts[static_cast<long long>(slots[row]) * context_length + position] : -1;
}
"""


@cache
def _kernel() -> Kernel:
    import cupy

    return Kernel(cupy.RawModule(code=SOURCE), "told_drafts", "PPPPPPiii", _THREADS)


class ToldDrafts:
    """Implements `runner_svc.interface.draft_launchers.ProposeLauncher`."""

    def __init__(self, launchers: DraftLaunchers, slots: DeviceSlots) -> None:
        self.texts = torch.full_like(slots.tokens, -1)
        """int32 [slots + 1, context_length]: by slot and position the token that is proposed there; -1 is none."""
        self._counters = slots.counters
        self._kernel = _kernel()

    def __call__(self, stream: int, rows: DraftRows, proposals: Tensor) -> None:
        """Fills `proposals`, int32 [R, S], with the tensor's tokens from each row's counter on."""
        tensors = rows.slots, rows.starts, rows.counts, self._counters, self.texts, proposals
        addresses = [tensor.data_ptr() for tensor in tensors]
        grid = -(-proposals.numel() // _THREADS)
        self._kernel(stream, grid, *addresses, *proposals.shape, self.texts.shape[1])
