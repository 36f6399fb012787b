"""What the kernels of exchanges read and write besides data: kernels/one_shot.cuh."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from runner_svc.interface.device import Device

MOST_BLOCKS, MOST_RANKS, DATA_BYTES = 64, 8, 65536
"""As in one_shot.cuh."""
_LINE = 32
"""Words between the host's two, which the device writes and reads."""


class ExchangeState:
    """Addresses of windows, turns, and the words by which host and device tell one another that all is over.

    Its tensors stay at one place, and kernels find windows through them: captured launches stay right when other
    windows take the place of those of a lost rank. Until `begin`, launches do nothing.
    """

    def __init__(self, device: Device, limit_s: float) -> None:
        """`limit_s`: how long a launch waits for other ranks at most."""
        where = device.device
        self.windows = torch.zeros(MOST_RANKS, dtype=torch.int64, device=where)
        self.turns = torch.zeros(MOST_BLOCKS, dtype=torch.int32, device=where)
        self.broken = torch.ones(1, dtype=torch.int32, device=where)
        self.limit_ns = int(limit_s * 1e9)
        self._host = device.pinned(2 * _LINE)
        self._host.zero_()
        self._words = self._host.numpy()

    @property
    def abort(self) -> Tensor:
        """The host's word, int32, that ends all waiting; page-locked memory."""
        return self._host[:1]

    @property
    def fault(self) -> Tensor:
        """The device's word, int32, that says that a launch gave up; page-locked memory."""
        return self._host[_LINE:]

    @property
    def has_failed(self) -> bool:
        """Whether a launch has given up waiting, or the host has raised `abort`."""
        return bool(self._words[_LINE] or self._words[0])

    def raise_abort(self) -> None:
        """Ends the waiting of launches under way, and makes later ones do nothing. For any thread."""
        self._words[0] = 1

    def begin(self, windows: Sequence[int]) -> None:
        """Lets launches exchange over windows, by rank, whose flags are zeros. No launch may be under way."""
        self.windows[: len(windows)] = torch.tensor(windows, dtype=torch.int64)
        self.turns.zero_()
        self._words[:] = 0
        self.broken.zero_()

    def end(self) -> None:
        """Makes launches do nothing. No launch may be under way."""
        self.broken.fill_(1)

    def wait_for_fault(self, seconds: float) -> bool:
        """Returns whether a launch gave up within that time."""
        deadline = time.monotonic() + seconds
        while not self._words[_LINE] and time.monotonic() < deadline:
            time.sleep(0.001)
        return bool(self._words[_LINE])
