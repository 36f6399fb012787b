"""SmolLM2's logits are equal in every bit however a position is computed; tried by hand, as it takes a minute or more.

ROSTER_TEST_FULL=1 ROSTER_TEST_BIT_POSITIONS=600 pytest -s tests/runner_svc/backends/test_smollm2_bits.py
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from runner_svc.catalog.source import model_folder
from runner_svc.hub.packaged import DEFAULT_MODEL
from runner_svc.model.errors import ModelNotFound
from runner_svc.settings.runner_settings import default_cache_folder
from tests.support.bit_walk import Walk, load
from tests.support.host_backend import no_progress
from tests.support.logits_of_steps import different
from tests.support.thoroughness import FULL

POSITIONS = int(os.environ.get("ROSTER_TEST_BIT_POSITIONS", "300"))
THREADS = (1, 2, 16)

pytestmark = [
    pytest.mark.usefixtures("deterministic_cpu"),
    pytest.mark.skipif(not FULL, reason="takes a minute or more: ROSTER_TEST_FULL=1 runs it"),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.timeout(3600)
def test_logits_of_smollm2_are_equal_in_every_bit() -> None:
    try:
        folder = model_folder(DEFAULT_MODEL, default_cache_folder(), no_progress)
    except ModelNotFound as error:
        pytest.skip(str(error))
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    num_blocks = 5 * (POSITIONS // 16 + 2)
    sizes = {"num_blocks": num_blocks, "max_step_tokens": 2048}

    def tried(what: str, find: Callable[[], int]) -> int:
        began = time.monotonic()
        found = find()
        print(f"{what}: {found} different, {time.monotonic() - began:.1f} s", flush=True)
        return found

    walk = Walk(load(folder, **sizes), random.Random(seed), POSITIONS, num_blocks)
    for size in (1, 16, 100, 256, 2048):
        assert tried(f"chunks of {size}", lambda size=size: walk.chunks(size)) == 0
    for _ in range(3):
        assert tried("batches with chunks and drafts", walk.batches) == 0
    assert tried("prefix hits at each block", walk.hits) == 0
    assert tried("drafts that are not finite", walk.not_finite_behind) == 0
    for threads in THREADS:
        torch.set_num_threads(threads)
        assert tried(f"{threads} threads", lambda: walk.chunks(100)) == 0
    torch.set_num_threads(1)
    again = Walk(load(folder, block_size=32, num_slots=2, **sizes), random.Random(seed), POSITIONS, num_blocks)
    assert again.backend.model.numerics == walk.backend.model.numerics != ""
    assert tried("loaded again, other sizes", lambda: different(again.wanted, walk.wanted)) == 0
    plain = Walk(load(folder, deterministic=False, **sizes), random.Random(seed), POSITIONS, num_blocks)
    assert tried("the mode off", plain.batches) > 0
    assert torch.allclose(plain.wanted, walk.wanted, atol=1e-2)
