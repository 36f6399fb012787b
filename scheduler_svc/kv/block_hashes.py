"""Names of KV blocks: a chained, collision-resistant hash, so that an equal name means an equal prefix.

A block's name is BLAKE2b over its parent's name and its own tokens; a first block's parent is a root, which separates
what must never meet: weights versions, salts, tenants. Roots hold a secret of this process, so that nobody outside can
look for two prefixes of one name.
"""

from __future__ import annotations

import hashlib
import secrets
from functools import lru_cache

HASH_BYTES = 16
TOKEN_BYTES = 4

_SECRET = secrets.token_bytes(HASH_BYTES)


@lru_cache(maxsize=1024)
def root_hash(*parts: str) -> bytes:
    """The parent of a first block; differs when any of `parts` does. 16 bytes."""
    root = hashlib.blake2b(digest_size=HASH_BYTES, key=_SECRET)
    for part in parts:
        data = part.encode()
        root.update(len(data).to_bytes(8, "little") + data)
    return root.digest()


def chain_hash(parent: bytes, tokens: bytes) -> bytes:
    """The name of one block that holds `tokens` (an int32 column) after the prefix named `parent`. 16 bytes."""
    return hashlib.blake2b(parent + tokens, digest_size=HASH_BYTES).digest()


def chain_hashes(parent: bytes, tokens: bytes, block_size: int) -> list[bytes]:
    """The names of the consecutive full blocks that `tokens` (an int32 column) fill after the prefix `parent`."""
    width, blake2b, names = TOKEN_BYTES * block_size, hashlib.blake2b, []
    for start in range(0, len(tokens), width):  # `chain_hash`, without the call
        parent = blake2b(parent + tokens[start : start + width], digest_size=HASH_BYTES).digest()
        names.append(parent)
    return names
