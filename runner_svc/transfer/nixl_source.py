"""The source's side of moves by NIXL: stages granted blocks in memory that the target reads.

Requests come over the socket of `BlockServer`, with its keys and grants. A place in the staging memory is *leased* to
one chunk of a pull until the reader returns it, or for `LEASE_S`. The answer to the return says whether the lease held
until then. Only if it did has the reader read what was staged for it, and only then it writes that to its cache.
"""

from __future__ import annotations

import struct
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from roster_common.link_protocol import MOVE_KEY_BYTES
from runner_svc.tiers.block_store import BlockStore
from runner_svc.transfer.grants import Grants
from runner_svc.transfer.nixl_agent import Staging
from runner_svc.transfer.wire import BadFrame

LEASE_S = 10.0
"""Longer than a reader waits for anything."""
STAGED, REFUSED, BUSY, RETURNED, LATE = range(5)
"""What an answer says: the blocks are staged; they are not, and never will be, or for now; the lease held, or not."""
_ASK = struct.Struct(f"<4sQ{MOVE_KEY_BYTES}s")
_RETURN = struct.Struct("<4sQQ")
_ANSWER = struct.Struct("<4sQBQQ")
_ASK_MAGIC, _RETURN_MAGIC, _ANSWER_MAGIC = b"RKN1", b"RKN2", b"RKN3"


def ask_frame(number: int, key: bytes, blocks: NDArray[np.int32]) -> bytes:
    """Returns a request to stage these blocks."""
    return _ASK.pack(_ASK_MAGIC, number, key) + blocks.astype("<i4").tobytes()


def return_frame(number: int, lease: int) -> bytes:
    """Returns what gives a place back."""
    return _RETURN.pack(_RETURN_MAGIC, number, lease)


def read_answer(header: bytes) -> tuple[int, int, int, int]:
    """Returns number of the request, what the answer says, lease and address. Raises BadFrame."""
    if len(header) != _ANSWER.size:
        raise BadFrame(f"an answer's header of {len(header)} bytes")
    magic, number, says, lease, address = _ANSWER.unpack(header)
    if magic != _ANSWER_MAGIC or says > LATE:
        raise BadFrame("not an answer about staged blocks")
    return number, says, lease, address


class NixlSource:
    """Stages the blocks of one store. Belongs to the thread of `BlockServer`."""

    def __init__(
        self, staging: Staging, store: BlockStore, grants: Grants, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._staging = staging
        self._store = store
        self._grants = grants
        self._clock = clock
        self._leases: OrderedDict[int, tuple[int, float]] = OrderedDict()  # place and end; the oldest first
        self._last_lease = 0

    def answer(self, frame: bytes) -> tuple[bytes, bytes] | None:
        """Returns the frames of an answer; None for a frame that is not for it. Raises BadFrame."""
        if frame[:4] == _RETURN_MAGIC and len(frame) == _RETURN.size:
            _, number, lease = _RETURN.unpack(frame)
            return self._take_back(number, lease)
        ids = len(frame) - _ASK.size
        if frame[:4] != _ASK_MAGIC:
            return None
        if ids <= 0 or ids % 4:
            raise BadFrame(f"a request of {len(frame)} bytes")
        _, number, key = _ASK.unpack_from(frame)
        return self._stage(number, key, np.frombuffer(frame, "<i4", offset=_ASK.size))

    def _stage(self, number: int, key: bytes, blocks: NDArray[np.int32]) -> tuple[bytes, bytes]:
        num_bytes = len(blocks) * self._store.block_bytes
        reason = self._grants.refusal(key, blocks)
        if not reason and num_bytes > self._staging.place_bytes:
            reason = f"{len(blocks)} blocks are too many for one request"
        if reason:
            return _ANSWER.pack(_ANSWER_MAGIC, number, REFUSED, 0, 0), reason.encode()
        place = self._free_place()
        if place is None:
            return _ANSWER.pack(_ANSWER_MAGIC, number, BUSY, 0, 0), b""
        try:
            self._staging.bytes_of(place, num_bytes)[:] = np.frombuffer(self._store.read(blocks), np.uint8)
        except Exception as error:  # of the device, for example: the next plan will show it too
            self._staging.give_back(place)
            return _ANSWER.pack(_ANSWER_MAGIC, number, REFUSED, 0, 0), f"reading them failed: {error}".encode()
        self._last_lease += 1
        self._leases[self._last_lease] = place, self._clock() + LEASE_S
        address = self._staging.address_of(place)
        return _ANSWER.pack(_ANSWER_MAGIC, number, STAGED, self._last_lease, address), self._staging.metadata

    def _free_place(self) -> int | None:
        """Returns a place, of a lease that is over if no other is free."""
        place = self._staging.take()
        if place is None and self._leases and next(iter(self._leases.values()))[1] <= self._clock():
            _, (place, _) = self._leases.popitem(last=False)
        return place

    def _take_back(self, number: int, lease: int) -> tuple[bytes, bytes]:
        place, _ = self._leases.pop(lease, (None, 0.0))
        if place is not None:
            self._staging.give_back(place)
        return _ANSWER.pack(_ANSWER_MAGIC, number, LATE if place is None else RETURNED, lease, 0), b""
