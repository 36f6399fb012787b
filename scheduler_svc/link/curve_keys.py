"""Files of CURVE keys: what `roster keygen` writes, and what both ends of the link read.

A key is 40 characters of Z85. `NAME.key` holds the secret one, readable by its owner only; `NAME.pub` the public one
with its name behind it, so that `cat *.pub` makes an allow-list. Lines that begin with "# " and empty ones are skipped.
"""

from __future__ import annotations

import os
from pathlib import Path

import zmq

KEY_CHARACTERS = 40


class UnusableKey(ValueError):
    """A key file can't be used; the text says why."""


def generate(folder: Path, name: str) -> tuple[Path, Path]:
    """Makes a key pair; returns the paths of the secret and the public key. Raises FileExistsError, OSError."""
    secret_path, public_path = folder / f"{name}.key", folder / f"{name}.pub"
    for path in (secret_path, public_path):
        if path.exists():
            raise FileExistsError(f"{path} exists: remove it first, or choose another name")
    public, secret = zmq.curve_keypair()
    descriptor = os.open(secret_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"# secret CURVE key of {name}: it stays where it is\n{secret.decode()}\n")
    public_path.write_text(f"{public.decode()} {name}\n")
    return secret_path, public_path


def read_secret(path: Path) -> bytes:
    """The secret key of a file. Raises UnusableKey."""
    keys = _keys(path)
    if len(keys) != 1:
        raise UnusableKey(f"{path} must hold one secret key, and holds {len(keys)}: make it with `roster keygen`")
    try:
        zmq.curve_public(keys[0])
    except (zmq.ZMQError, ValueError) as error:
        raise UnusableKey(f"{path} holds no CURVE key: {error}") from error
    return keys[0]


def read_public(path: Path) -> frozenset[bytes]:
    """The public keys of a file, each line a key and, behind it, whatever the operator notes. Raises UnusableKey."""
    return frozenset(_keys(path))


def _keys(path: Path) -> list[bytes]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableKey(f"{path} can't be read: {error}") from error
    keys = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("# "):
            continue
        key = line.split()[0]
        if len(key) != KEY_CHARACTERS or not key.isascii():
            raise UnusableKey(f"{path}, line {number}: a key has {KEY_CHARACTERS} characters, this one {len(key)}")
        keys.append(key.encode())
    return keys
