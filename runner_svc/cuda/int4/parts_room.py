"""Memory for the sums of blocks that divide the columns of a product among them, and the flags by which they meet."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_FLAGS = 4096


class PartsRoom:
    """Room for one launch at a time. Captured graphs may still use what was given before it grew."""

    def __init__(self) -> None:
        self._rooms: list[Tensor] = []
        self._flags: Tensor | None = None

    def of(self, num_bytes: int, num_flags: int, device: torch.device) -> tuple[int, int]:
        """Returns the addresses of the room and of the flags, which are zero between launches.

        Raises ValueError for too many flags.
        """
        if num_flags > MOST_FLAGS:
            raise ValueError(f"a launch needs {num_flags} flags, more than {MOST_FLAGS}")
        if self._flags is None:
            self._flags = torch.zeros(MOST_FLAGS, dtype=torch.int32, device=device)
        if not self._rooms or self._rooms[-1].numel() < num_bytes:
            self._rooms.append(torch.empty(num_bytes, dtype=torch.uint8, device=device))
        return self._rooms[-1].data_ptr(), self._flags.data_ptr()
