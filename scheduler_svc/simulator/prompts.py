"""Token ids for a trace's prompts. Equal hash ids give equal tokens, so prefixes shared in the trace are shared.

Every token is a hash of (block id, position in the block). Blocks therefore need no table, and two prompts share
exactly the blocks whose ids they share. A prompt without hash ids gets a unique id and shares nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler_svc.simulator.trace import Trace, TraceRequest

FIRST_ORDINARY_TOKEN = 256
"""First token id used; tokenizers have their special tokens below it."""

_OWN_IDS = 1 << 40
"""First block id of prompts without hash ids."""

_CONTENT_IDS = 1 << 41
"""First block id of contents of conversations."""

_SALT_STEP = 0xD1B54A32D192ED03
"""Odd, so that no two salts below 2^64 collide."""


def prompt_tokens(trace: Trace, index: int, vocab_size: int, salt: int = 0) -> npt.NDArray[np.int32]:
    """Returns the prompt of request `index`: (prompt_tokens,) ids in [256, vocab_size).

    A different `salt` (0 or greater) gives different tokens, with the same sharing between the trace's prompts.
    """
    request = trace.requests[index]
    if request.prefix_hash_ids:
        ids = np.array(request.prefix_hash_ids, np.uint64)
        return _block_tokens(ids, trace.hash_block_tokens, vocab_size, salt)[: request.prompt_tokens]
    own = np.array([_OWN_IDS + index], np.uint64)
    return _block_tokens(own, request.prompt_tokens, vocab_size, salt)


def content_tokens(content: int, count: int, vocab_size: int) -> npt.NDArray[np.int32]:
    """Returns `count` tokens of the content with this id: (count,) ids in [256, vocab_size)."""
    return _block_tokens(np.array([_CONTENT_IDS + content], np.uint64), count, vocab_size, 0)


def blank_prompt(request: TraceRequest) -> npt.NDArray[np.int32]:
    """Returns a prompt of zeros of the request's length, for runs without prefix sharing."""
    return np.zeros(request.prompt_tokens, np.int32)


def _block_tokens(ids: npt.NDArray[np.uint64], block_tokens: int, vocab_size: int, salt: int) -> npt.NDArray[np.int32]:
    """Returns the blocks' tokens, (len(ids) * block_tokens,), hashed with splitmix64's finalizer (Steele et al.)."""
    positions = np.arange(block_tokens, dtype=np.uint64)
    x = ((ids[:, None] << np.uint64(20)) + positions[None, :]).ravel()
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt * _SALT_STEP % (1 << 64))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (FIRST_ORDINARY_TOKEN + (x >> np.uint64(33)) % np.uint64(vocab_size - FIRST_ORDINARY_TOKEN)).astype(np.int32)
