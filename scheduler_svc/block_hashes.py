"""Names of KV blocks: a chained, collision-resistant hash, so that an equal name means an equal prefix.

A block's name is BLAKE2b over its parent's name and its own tokens; a first block's parent is a root, which separates
what must never meet: weights versions, salts, tenants. Roots hold a secret of this process, so that nobody outside can
look for two prefixes of one name.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array

HASH_BYTES = 16

_SECRET = secrets.token_bytes(HASH_BYTES)


def root_hash(*parts: str) -> bytes:
    """The parent of a first block; differs when any of `parts` does. 16 bytes."""
    root = hashlib.blake2b(digest_size=HASH_BYTES, key=_SECRET)
    for part in parts:
        data = part.encode()
        root.update(len(data).to_bytes(8, "little") + data)
    return root.digest()


def chain_hash(parent: bytes, tokens: list[int]) -> bytes:
    """The name of one block that holds `tokens` after the prefix named `parent`. 16 bytes."""
    return hashlib.blake2b(parent + array("i", tokens).tobytes(), digest_size=HASH_BYTES).digest()


def extend_chain(hashes: list[bytes], parent: bytes, tokens: list[int], count: int, block_size: int) -> None:
    """Appends to `hashes`, the names of the first blocks of `tokens`, until it has `count`. `parent`: the last of them,
    or the root."""
    data = array("i", tokens[len(hashes) * block_size : count * block_size]).tobytes()
    width, blake2b = block_size * array("i").itemsize, hashlib.blake2b
    for start in range(0, len(data), width):
        parent = blake2b(parent + data[start : start + width], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
