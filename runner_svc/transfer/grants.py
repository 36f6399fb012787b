"""What other runners may read here: the scheduler's allow-list, by the random key of each move."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from roster_common.link_protocol import MOVE_KEY_BYTES

MOST_GRANTS = 4096
"""More than a scheduler ever has open; the oldest goes first."""


class Grants:
    """Granted blocks by key, and the public keys of their readers. Thread-safe."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._lock = threading.Lock()
        self._blocks: dict[bytes, frozenset[int]] = {}
        self._readers: dict[bytes, bytes] = {}

    def add(self, key: bytes, blocks: NDArray[np.int32], reader: str) -> None:
        """Lets the owner of `reader`, a CURVE key, read `blocks` if it states `key`. Raises ValueError."""
        if len(key) != MOVE_KEY_BYTES:
            raise ValueError(f"the key of a move has {len(key)} bytes, not {MOVE_KEY_BYTES}")
        if len(blocks) and not (int(blocks.min()) >= 1 and int(blocks.max()) <= self._num_blocks):
            raise ValueError(f"a grant names a block outside 1 to {self._num_blocks}")
        with self._lock:
            self._blocks[key] = frozenset(blocks.tolist())
            self._readers[key] = reader.encode()
            while len(self._blocks) > MOST_GRANTS:
                self._drop(next(iter(self._blocks)))

    def remove(self, key: bytes) -> None:
        """Ends a grant, if there is one."""
        with self._lock:
            self._drop(key)

    def clear(self) -> None:
        """Ends all grants."""
        with self._lock:
            self._blocks.clear()
            self._readers.clear()

    def refusal(self, key: bytes, blocks: NDArray[np.int32]) -> str:
        """Returns why these blocks may not be read with this key, "" if they may."""
        with self._lock:
            granted = self._blocks.get(key)
        if granted is None:
            return "the key of the move is unknown here"
        return "" if granted.issuperset(blocks.tolist()) else "some of the blocks are not granted"

    def admits(self, reader: bytes) -> bool:
        """Whether the owner of this CURVE key, Z85, may connect: some grant names it."""
        with self._lock:
            return bool(reader) and reader in self._readers.values()

    def _drop(self, key: bytes) -> None:
        self._blocks.pop(key, None)
        self._readers.pop(key, None)
