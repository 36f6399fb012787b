"""Which keys and values the experts' last kernel asks L2 for, its very source, on a CPU."""

from __future__ import annotations

import shutil
from functools import partial

import numpy as np
import pytest
import torch

from runner_svc.attention.decode_plan import RANGE_BEGIN, RANGE_END, RANGE_WORDS, ROW_WORDS, TILE, DecodePlanner
from runner_svc.cuda.experts import expert_rows
from runner_svc.cuda.experts.expert_rows import ExpertRows
from runner_svc.interface.attention_launcher import KvAhead
from runner_svc.interface.expert_launchers import ExpertPlan
from tests.support.emulator.kernel import EmulatedKernel, EmulatedModule
from tests.support.expert_cases import TINY
from tests.support.thoroughness import choice

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

HEADS, BLOCK, ROW_BYTES, WIDTH = 2, 32, 32, 64
LENGTHS = [700, 3, 95, 16, 333]


def counting(text: str) -> str:
    """Replaces each request by a count in the first byte of what it asks for."""
    begin = text.index("void ask(const char* source, int bytes) {")
    return (
        text[:begin]
        + "void ask(const char* source, int bytes) { ++*const_cast<char*>(source);"
        + text[text.index("}", begin) :]
    )


@pytest.mark.parametrize("tiles", choice([3, 32], in_ci=[]))
def test_the_first_tiles_of_each_range(tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_rows, "Kernel", EmulatedKernel)
    monkeypatch.setattr(expert_rows, "load", partial(EmulatedModule, arch="sm_90a", change=counting))
    monkeypatch.setattr(expert_rows, "num_multiprocessors", lambda: 1)
    rows, planner = len(LENGTHS), DecodePlanner(len(LENGTHS), 21, 4, HEADS, 1, None)
    order = np.random.default_rng(7).permutation(200).astype(np.int32)
    tables = torch.from_numpy(order[: rows * 22].reshape(rows, 22).copy())
    plan = np.zeros(planner.words, np.int32)
    numbers = np.arange(rows, dtype=np.int32)
    planner.write(np.array(LENGTHS, np.int32), numbers[::-1].copy(), numbers, plan)
    cache = torch.zeros(2, 200 * BLOCK, HEADS, ROW_BYTES, dtype=torch.uint8)
    expected = torch.zeros_like(cache)
    ranges = plan[rows * ROW_WORDS :].reshape(-1, RANGE_WORDS)
    line = [
        (row, head, tile) for row, n in enumerate(LENGTHS) for head in range(HEADS) for tile in range(-(-n // TILE))
    ]
    for begin, end in ranges[:, [RANGE_BEGIN, RANGE_END]].tolist():
        for row, head, tile in line[begin : min(end, begin + tiles)]:
            block = int(tables[rows - 1 - row, tile * TILE // BLOCK])
            first = block * BLOCK + tile * TILE % BLOCK
            expected[:, first : first + TILE, head, 0] += 1
    words = torch.from_numpy(plan)
    ahead = KvAhead(
        cache[0].data_ptr(), cache[1].data_ptr(), tables.data_ptr(), words.data_ptr(), 22, rows, len(ranges), tiles,
        HEADS, 1, BLOCK, ROW_BYTES,
    )  # fmt: skip
    space = ExpertPlan.allocate(TINY.num_experts, TINY.top_k, 3, 8, torch.device("cpu"))
    x = torch.ones(3, WIDTH, dtype=torch.bfloat16)
    y, out = torch.ones(3 * TINY.top_k, WIDTH, dtype=torch.bfloat16), torch.full_like(x, torch.nan)
    ExpertRows(TINY, WIDTH, torch.bfloat16).combine_norm(0, y, None, space, x, x[0].clone(), out, 1e-6, ahead)
    assert torch.equal(cache, expected)
    assert not out.isnan().any()
