"""CURVE key files, which `roster keygen` writes and both ends of the link read.

A key is 40 characters of Z85. `NAME.key` contains the secret key and is readable by its owner only. `NAME.pub` contains
the public key followed by its name, so that `cat *.pub` makes an allow-list. Empty lines and lines that begin with "# "
are skipped.
"""

from __future__ import annotations

import os
from pathlib import Path

KEY_CHARACTERS = 40
_REMEDY = "make it with `roster keygen`"


class UnusableKey(ValueError):
    """A key file can't be used; the message says why."""


def generate(folder: Path, name: str) -> tuple[Path, Path]:
    """Generates a key pair and returns the paths of the secret and the public key. Raises FileExistsError, OSError."""
    import zmq  # imported here because only code that generates or checks keys needs it

    secret_path, public_path = folder / f"{name}.key", folder / f"{name}.pub"
    for path in (secret_path, public_path):
        if path.exists():
            raise FileExistsError(f"{path} exists: remove it first, or choose another name")
    public, secret = zmq.curve_keypair()
    descriptor = os.open(secret_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"# secret CURVE key of {name}: do not copy or share it\n{secret.decode()}\n")
    public_path.write_text(f"{public.decode()} {name}\n")
    return secret_path, public_path


def read_secret(path: Path) -> bytes:
    """Returns the secret key of a file. Raises UnusableKey."""
    return read_pair(path)[0]


def read_pair(path: Path) -> tuple[bytes, bytes]:
    """Returns the secret key of a file and its public key. Raises UnusableKey."""
    import zmq

    key = _only_key(path)
    try:
        return key, zmq.curve_public(key)
    except (zmq.ZMQError, ValueError) as error:
        raise UnusableKey(f"{path} does not contain a CURVE key: {error}") from error


def read_public(path: Path) -> bytes:
    """Returns the only public key of a file. Raises UnusableKey."""
    return _only_key(path)


def read_allowed(path: Path) -> frozenset[bytes]:
    """Returns the public keys of a file. Text after the key on a line is ignored. Raises UnusableKey."""
    return frozenset(_keys(path))


def _only_key(path: Path) -> bytes:
    keys = _keys(path, f"; the file must contain one key: {_REMEDY}")
    if len(keys) != 1:
        raise UnusableKey(f"{path} must contain one key but contains {len(keys)}: {_REMEDY}")
    return keys[0]


def _keys(path: Path, remedy: str = "") -> list[bytes]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UnusableKey(f"{path} can't be read: {reason}") from error
    keys = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("# "):
            continue
        key = line.split()[0]
        if len(key) != KEY_CHARACTERS or not key.isascii():
            fault = f"a key has {KEY_CHARACTERS} characters, all ASCII; this one has {len(key)}"
            raise UnusableKey(f"{path}, line {number}: {fault}{remedy}")
        keys.append(key.encode())
    return keys
