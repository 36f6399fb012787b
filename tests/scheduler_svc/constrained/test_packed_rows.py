"""The message with masks is the same whether its rows are laid out at once or added one by one."""

from __future__ import annotations

import random

import pytest

from roster_protos import plan_pb2
from scheduler_svc.constrained.packed_rows import FEW_ROWS, LONG_MASK, PackedRows


@pytest.mark.parametrize("size", [4, 36, 100, 124, 128, 1536, LONG_MASK + 4])
def test_the_message_is_that_of_rows_added_one_by_one(size: int) -> None:
    """Rows of successive plans, with the same and other numbers, fewer and more; sizes around a length byte's limit."""
    rng = random.Random(size)
    packed, rows = PackedRows(size), list[int]()
    for count in (3, FEW_ROWS, 40, 40, 17, FEW_ROWS, 90, 2, 90):
        if len(rows) < count or rng.random() < 0.5:
            rows = sorted(rng.sample([*range(200), 16_383, 16_384, 2**21, 2**31, 2**32 - 1], count))
        rows = rows[:count]
        places = range(count) if rng.random() < 0.5 else sorted(rng.sample(range(2 * count), count))
        memory = rng.randbytes(2 * count * size)
        masks, expected = plan_pb2.Masks(), plan_pb2.Masks()
        masks.rows.add(row=7, bits=b"what was there")
        expected.CopyFrom(masks)
        packed.add(masks, list(rows), memory, places)
        for row, place in zip(rows, places, strict=True):
            expected.rows.add(row=row, bits=memory[place * size : (place + 1) * size])
        assert masks == expected
        assert masks.SerializeToString() == expected.SerializeToString()
