"""Names of KV blocks: a chained, collision-resistant hash, so that an equal name means an equal prefix.

A block's name is BLAKE2b over its parent's name and its own tokens. The parent of a first block is a root, which
separates what must not be shared: weights versions, salts, tenants. Roots are keyed with a secret of the scheduler
(`naming_secret.py`), so that an outsider can't search for two prefixes with the same name.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

HASH_BYTES = 16
"""128 bits: two of 2**40 blocks have the same name with a probability below 1e-14."""
TOKEN_BYTES = 4
"""A token is an int32."""


@lru_cache(maxsize=1024)
def root_hash(secret: bytes, *parts: str) -> bytes:
    """Returns the parent of a first block, 16 bytes; it differs if `secret` or any of `parts` does."""
    root = hashlib.blake2b(digest_size=HASH_BYTES, key=secret)
    for part in parts:
        data = part.encode()
        root.update(len(data).to_bytes(8, "little") + data)
    return root.digest()


def chain_hash(parent: bytes, tokens: bytes) -> bytes:
    """Returns the name, 16 bytes, of the block with `tokens` (an int32 column) after the prefix named `parent`."""
    return hashlib.blake2b(parent + tokens, digest_size=HASH_BYTES).digest()


def chain_hashes(parent: bytes, tokens: bytes, block_size: int) -> list[bytes]:
    """Returns the names of the full blocks that `tokens` (an int32 column) fill after the prefix `parent`."""
    width, blake2b, names = TOKEN_BYTES * block_size, hashlib.blake2b, []
    for start in range(0, len(tokens), width):  # inlined `chain_hash`
        parent = blake2b(parent + tokens[start : start + width], digest_size=HASH_BYTES).digest()
        names.append(parent)
    return names
