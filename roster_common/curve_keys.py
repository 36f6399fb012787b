"""Files of CURVE keys: what `roster keygen` writes, and what both ends of the link read.

A key is 40 characters of Z85. `NAME.key` holds the secret one, readable by its owner only; `NAME.pub` the public one
with its name behind it, so that `cat *.pub` makes an allow-list. Lines that begin with "# " and empty ones are skipped.
"""

from __future__ import annotations

import os
from pathlib import Path

KEY_CHARACTERS = 40
_REMEDY = "make it with `roster keygen`"


class UnusableKey(ValueError):
    """A key file can't be used; the text says why."""


def generate(folder: Path, name: str) -> tuple[Path, Path]:
    """Makes a key pair; returns the paths of the secret and the public key. Raises FileExistsError, OSError."""
    import zmq  # only what makes or proves keys needs it

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
    return read_pair(path)[0]


def read_pair(path: Path) -> tuple[bytes, bytes]:
    """The secret key of a file, and the public one that belongs to it. Raises UnusableKey."""
    import zmq

    key = _only_key(path)
    try:
        return key, zmq.curve_public(key)
    except (zmq.ZMQError, ValueError) as error:
        raise UnusableKey(f"{path} holds no CURVE key: {error}") from error


def read_public(path: Path) -> bytes:
    """The one public key of a file. Raises UnusableKey."""
    return _only_key(path)


def read_allowed(path: Path) -> frozenset[bytes]:
    """The public keys of a file, each line a key and, behind it, whatever the operator notes. Raises UnusableKey."""
    return frozenset(_keys(path))


def _only_key(path: Path) -> bytes:
    keys = _keys(path, f"; it must hold one key: {_REMEDY}")
    if len(keys) != 1:
        raise UnusableKey(f"{path} must hold one key, and holds {len(keys)}: {_REMEDY}")
    return keys[0]


def _keys(path: Path, remedy: str = "") -> list[bytes]:
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
            fault = f"a key has {KEY_CHARACTERS} characters, this one {len(key)}"
            raise UnusableKey(f"{path}, line {number}: {fault}{remedy}")
        keys.append(key.encode())
    return keys
