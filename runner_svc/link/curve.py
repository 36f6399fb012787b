"""CURVE on the link to the scheduler: this runner's key pair, and the scheduler's public key that it insists on.

Key files are those of `roster keygen`: a key is 40 characters of Z85, alone on its line or with a note behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import zmq

KEY_CHARACTERS = 40


class UnusableKey(ValueError):
    """A key file can't be used; the text says why."""


@dataclass(frozen=True, slots=True)
class CurveClient:
    """The keys, Z85."""

    secret: bytes
    public: bytes
    scheduler: bytes

    @classmethod
    def read(cls, secret_file: Path, scheduler_file: Path) -> Self:
        """From this runner's `.key` file and the scheduler's `.pub` file. Raises UnusableKey."""
        secret, scheduler = _read_key(secret_file), _read_key(scheduler_file)
        try:
            return cls(secret, zmq.curve_public(secret), scheduler)
        except (zmq.ZMQError, ValueError) as error:
            raise UnusableKey(f"{secret_file} holds no CURVE key: {error}") from error

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Makes the socket, not connected yet, a CURVE client: it talks to no other scheduler."""
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.scheduler)


def _read_key(path: Path) -> bytes:
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("# ")]
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableKey(f"{path} can't be read: {error}") from error
    key = lines[0].split()[0] if lines else ""
    if len(lines) != 1 or len(key) != KEY_CHARACTERS or not key.isascii():
        raise UnusableKey(f"{path} must hold one key of {KEY_CHARACTERS} characters: make it with `roster keygen`")
    return key.encode()
