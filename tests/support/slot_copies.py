"""Checks of the two kernels that move words: a step's buffer, and a plan's changes to the slots.

Each check takes the launcher: the kernel's on a GPU, or the host's. Expected values are computed in numpy, from the
changes themselves and not from their encoding.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.interface.backend import AdmittedSlot, ForcedTokens, SlotChanges

Move = Callable[[int, Tensor, Tensor, int], None]
WORDS = (4, 8, 1020, 1024, 1028, 65_536, 65_540, 300_000)
"""Copies by one thread, some blocks, all blocks at once (64 of 256 threads, 4 words each), and several rounds."""
NUM_SLOTS, CONTEXT, MAX_BLOCKS = 40, 1000, 70
_UNTOUCHED = -7


def check_copy(
    copy: Move, source: Tensor, target: Tensor, num_words: int, stream: int, done: Callable[[], None]
) -> None:
    """Checks a copy between int32 tensors longer than `num_words`; `done` waits for the device."""
    source.copy_(torch.randint(-(2**31), 2**31, source.shape, dtype=torch.int64).int())
    target.fill_(_UNTOUCHED)
    expected = torch.full(target.shape, _UNTOUCHED, dtype=torch.int32)
    expected[:num_words] = source[:num_words].cpu()
    copy(stream, source, target, num_words)
    done()
    assert torch.equal(target.cpu(), expected)


def random_changes(rng: np.random.Generator, num_admitted: int, num_appended: int) -> SlotChanges:
    """Returns admissions of 1 to CONTEXT known tokens, some without a block yet, and appends to the block tables and,
    for other slots than those admitted, of forced tokens."""
    admitted, free = [], dict.fromkeys(range(NUM_SLOTS), 0)
    for slot in rng.permutation(NUM_SLOTS)[:num_admitted].tolist():
        num_tokens = int(rng.integers(1, CONTEXT + 1))
        tokens = rng.integers(0, 1 << 20, CONTEXT + 24, dtype=np.int32)
        blocks = rng.integers(1, 1 << 20, int(rng.integers(0, MAX_BLOCKS - 1)), dtype=np.int32)
        admitted.append(AdmittedSlot(SimpleNamespace(slot=slot, tokens=tokens), np.void(b""), num_tokens, blocks, 0))
        free[slot] = len(blocks)
    slots = rng.permutation(NUM_SLOTS)[:num_appended].astype(np.int32)
    indexes = np.array([free[slot] for slot in slots.tolist()], np.int32)
    others = sorted(free.keys() - {one.state.slot for one in admitted})[:num_appended]
    forced = [
        ForcedTokens(slot, int(rng.integers(1, CONTEXT - 64)), rng.integers(0, 1 << 20, rng.integers(1, 64), np.int32))
        for slot in others
    ]
    return SlotChanges(admitted, slots, indexes, rng.integers(1, 1 << 20, num_appended, dtype=np.int32), forced)


def check_scatter(
    scatter: Move, device: torch.device, num_admitted: int, num_appended: int, stream: int, done: Callable[[], None]
) -> None:
    """Checks several plans' changes in sequence; other words keep their values, even the dummy slot's."""
    rng = np.random.default_rng()
    slots = DeviceSlots(NUM_SLOTS, CONTEXT, MAX_BLOCKS, device, counted=True)
    slots.words.fill_(_UNTOUCHED)
    parts = slots.tokens, slots.tables, slots.counters
    tokens, tables, counters = (part.cpu().numpy().copy() for part in parts)
    for _ in range(3):
        changes = random_changes(rng, num_admitted, num_appended)
        for one in changes.admitted:
            tokens[one.state.slot, : one.num_tokens] = one.state.tokens[: one.num_tokens]
            tables[one.state.slot, : len(one.blocks)] = one.blocks
            counters[one.state.slot] = one.num_tokens
        for each in changes.forced:
            counters[each.slot] = each.first + len(each.tokens)
            tokens[each.slot, each.first : counters[each.slot]] = each.tokens
        tables[changes.append_slots, changes.append_indexes] = changes.append_blocks
        encoded = slots.encode(changes)
        assert encoded is not None
        on_device = torch.from_numpy(encoded).to(device)
        scatter(stream, slots.words, on_device, int(encoded[0]))
        done()  # `on_device` must live until then
    for part, expected in zip(parts, (tokens, tables, counters), strict=True):
        np.testing.assert_array_equal(part.cpu().numpy(), expected)
