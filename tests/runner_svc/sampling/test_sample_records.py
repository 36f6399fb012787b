"""Records for the sampling kernels: consecutive batches give the same records as packing each separately."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from runner_svc.sampling.sample_records import RowPacker, SampleRows, pack_rows
from tests.support.sampler_rows import step_batch
from tests.support.sampler_twin import Row


def random_row(rng: random.Random) -> Row:
    return Row(
        [0.0] * 50,
        [rng.randrange(50) for _ in range(rng.randint(1, 9))],
        1,
        seed=rng.getrandbits(64),
        temperature=rng.choice([0.0, 0.7]),
        min_p=rng.choice([0.0, 0.1]),
        bias={3: 1.5, 7: -2.0} if rng.random() < 0.3 else {},
        stop_ids=[4] if rng.random() < 0.3 else [],
        min_tokens=rng.choice([0, 5]),
        logprobs=rng.choice([None, None, 0, 2]),
    )


def assert_equal(actual: SampleRows, expected: SampleRows) -> None:
    assert actual.records.tobytes() == expected.records.tobytes()
    np.testing.assert_array_equal(actual.extra_ids, expected.extra_ids)
    np.testing.assert_array_equal(actual.extra_values, expected.extra_values)
    assert (actual.adjusted, actual.asking) == (expected.adjusted, expected.asking)


def test_batches_one_after_another() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    pack = RowPacker()
    batch = step_batch([random_row(rng) for _ in range(5)])
    for _ in range(60):
        kind = rng.choice(["further", "further", "further", "others", "part"])
        if kind == "further":  # the same rows, as in a following plan: same objects
            batch = replace(batch, starts=batch.starts + 1)
        elif kind == "others":
            batch = step_batch([random_row(rng) for _ in range(rng.randint(1, 6))])
        rows = np.arange(len(batch.slots))
        if kind == "part":
            rows = rows[rng.randrange(len(rows)) :]
        assert_equal(pack(batch, rows), pack_rows(batch, rows))
