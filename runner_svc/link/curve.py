"""CURVE encryption of the link to the scheduler: the runner's key pair and the scheduler's public key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import zmq

from roster_common.curve_keys import read_pair, read_public


@dataclass(frozen=True, slots=True)
class CurveClient:
    """The keys, in Z85."""

    secret: bytes
    public: bytes
    scheduler: bytes

    @classmethod
    def read(cls, secret_file: Path, scheduler_file: Path) -> Self:
        """Reads this runner's `.key` file and the scheduler's `.pub` file. Raises UnusableKey."""
        secret, public = read_pair(secret_file)
        return cls(secret, public, read_public(scheduler_file))

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Makes the socket a CURVE client, which accepts only this scheduler. Call before connecting."""
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.scheduler)
