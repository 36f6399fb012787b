"""Decode attention of verify rows, emulated on a CPU, against float32 torch.

Positions beyond a row's drafts and absent queries are NaN. CI runs a part of the cases; `ROSTER_TEST_FULL=1` runs all.
"""

from __future__ import annotations

import random
import shutil

import numpy as np
import pytest
import torch

from runner_svc.attention.softmax_arguments import common_first
from runner_svc.interface.attention_launcher import PrefillRows, VerifyRows
from runner_svc.interface.attention_layer import AttentionLayer
from tests.support.attention_cases import AttentionBatch, AttentionCase
from tests.support.attention_runs import attention_of, check
from tests.support.emulator.attention import emulate_attention
from tests.support.emulator.kernel import EmulatedKernel, EmulationError
from tests.support.thoroughness import choice
from tests.support.verify_cases import VerifyBatch, VerifyCase

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

CPU = torch.device("cpu")
HOPPER, OTHERS = "sm_90a", "sm_80"
HEADS = [(64, False), (64, True), (96, False), (96, True), (128, False), (128, True), (256, False), (256, True)]
ODD_HEADS = [(16, False), (48, False), (80, False), (176, False)]
GROUPS = [(1, 1), (4, 2), (9, 3), (4, 1), (28, 4), (16, 2), (16, 1), (40, 2)]
POSITIONS = [1, 2, 3, 4, 6, 8, 5, 7]


@pytest.fixture
def seed() -> int:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    EmulatedKernel.orders.seed(seed)
    return seed


def drafts(positions: int, rows: int) -> tuple[int, ...]:
    """Returns every number of drafts in turn, the most first."""
    return tuple((positions - 1) * (row + 1) % positions for row in range(rows))


def verify(case: VerifyCase, seed: int) -> VerifyBatch:
    batch = VerifyBatch(case, seed, CPU)
    batch.run(batch.attention(), repeats=2)
    batch.check(seed)
    return batch


@pytest.mark.parametrize(
    ("head_dim", "fp8_cache", "arch", "positions"),
    choice(
        [
            (*head, arch, POSITIONS[(index + step) % len(POSITIONS)])
            for step, arch in ((0, HOPPER), (2, OTHERS), (4, HOPPER))
            for index, head in enumerate((*HEADS, *ODD_HEADS))
        ],
        in_ci=[],
    ),
)
def test_heads(
    head_dim: int, fp8_cache: bool, arch: str, positions: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are split over blocks, rows that share a block, an empty row; both variants."""
    emulate_attention(monkeypatch, arch, 3)
    kind = AttentionCase((), (), head_dim, 6, 2, fp8_cache=fp8_cache)
    for known in ((300, 1, 17, 33), tuple(range(1, 60, 3))):
        verify(VerifyCase((*known, 0), (*drafts(positions, len(known)), 0), positions, kind=kind), seed)


@pytest.mark.parametrize("positions", choice(POSITIONS, in_ci=[6]))
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), choice(GROUPS, in_ci=[(4, 1)]))
def test_groups_and_bounds(
    num_heads: int, num_kv_heads: int, positions: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows and bounds that are far from the truth: tiles without a visible key on both sides."""
    emulate_attention(monkeypatch, HOPPER, 3)
    kind = AttentionCase((), (), 32, num_heads, num_kv_heads, 32, window=45, sinks=True)
    known = (190, 1, 46, 33, 45)
    verify(VerifyCase(known, drafts(positions, 5), positions, below=40, above=70, kind=kind), seed)


@pytest.mark.parametrize(("positions", "arch"), choice([(2, OTHERS), (4, HOPPER), (6, HOPPER)], in_ci=[]))
@pytest.mark.parametrize(
    "kind",
    choice(
        [
            AttentionCase((), (), 64, 8, 2, 16, window, soft_cap, dtype=dtype, fp8_cache=fp8_cache, sinks=sinks)
            for window, soft_cap, dtype, sinks in (
                (None, 20.0, torch.float16, False),
                (100, None, torch.bfloat16, True),
                (7, 20.0, torch.float16, True),
            )
            for fp8_cache in (False, True)
        ],
        in_ci=[],
    ),
    ids=lambda kind: f"{kind.window}-{kind.soft_cap}-{kind.fp8_cache}",
)
def test_kinds(kind: AttentionCase, positions: int, arch: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_attention(monkeypatch, arch, 2)
    case = VerifyCase((300, 5, 101, 64), drafts(positions, 4), positions, below=9, above=17, kind=kind)
    verify(case, seed)


@pytest.mark.parametrize(
    ("head_dim", "fp8_cache", "arch", "positions", "first", "window"),
    choice(
        [(128, False, HOPPER, 1, 1, None), (64, True, OTHERS, 4, 5, None), (96, False, HOPPER, 3, 17, 45)],
        in_ci=[(128, False, HOPPER, 1, 1, None)],
    ),
)
def test_keys_before_the_first_are_not_seen(
    head_dim: int,
    fp8_cache: bool,
    arch: str,
    positions: int,
    first: int,
    window: int | None,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are NaN. Rows that are split over blocks, rows that share one, a row whose only key is the first."""
    emulate_attention(monkeypatch, arch, 3)
    kind = AttentionCase((), (), head_dim, 6, 2, window=window, fp8_cache=fp8_cache, first=first)
    for known in ((300, first + 1, 30, 33), tuple(range(first + 1, first + 60, 3))):
        verify(VerifyCase(known, drafts(positions, len(known)), positions, 9, 17, kind), seed)


def test_only_verify_rows_have_a_first_key(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_attention(monkeypatch, HOPPER, 3)
    batch = AttentionBatch(AttentionCase((5,), (1,), 64, 2, 2, first=1), 1, CPU)
    attention = attention_of(batch)
    plan = np.zeros(attention.decode_plan_words(1), np.int32)
    with pytest.raises(ValueError, match="only attention of verify rows"):
        attention.plan_decode(batch.lengths, batch.table_rows, plan)
    starts = batch.lengths - batch.counts
    with pytest.raises(ValueError, match="only attention of verify rows"):
        attention.plan_prefill(starts, batch.counts, batch.table_rows, batch.query_rows, plan)
    layers = [AttentionLayer(), AttentionLayer(first=1)]
    with pytest.raises(ValueError, match="first keys differ"):
        common_first(layers)


@pytest.mark.parametrize(("positions", "num_heads"), choice([(2, 4), (3, 7), (6, 4), (8, 4)], in_ci=[]))
def test_a_row_that_many_blocks_share(
    positions: int, num_heads: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More partial results than are merged at once."""
    emulate_attention(monkeypatch, HOPPER, 24)
    kind = AttentionCase((), (), 32, num_heads, 1)
    verify(VerifyCase((1300, 40), (positions - 1, 1), positions, below=3, above=9, kind=kind), seed)


FAULTS = {
    "a team does not meet": ("meet_team(team);", ""),
    "copies are not waited for": ("wait_copies<2 * 8 - 4>();", "wait_copies<2 * 8 - 2>();"),
    "absent queries' positions count": ("min(known + drafted, row.length)", "min(known + 6 - 1, row.length)"),
    "queries see later ones": ("min(length, end)", "end"),
    "windows do not move": ("length - window, min", "known - window, min"),
    "bounds are not clamped": ("min(max(end - position, 0), kTile)", "min(end - position, kTile)"),
    "the plan's length is the row's": ("min(max(__ldg(counters.known + row.table), 0), row.length)", "row.length"),
}
SHARED = VerifyCase((190, 1, 46, 33), (5, 0, 3, 1), 6, 40, 70, AttentionCase((), (), 32, 8, 2, 32, 45, sinks=True))


@pytest.mark.parametrize("fault", choice(list(FAULTS), in_ci=[]))
def test_the_emulator_sees(fault: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = FAULTS[fault]
    texts: list[str] = []

    def change(text: str) -> str:
        texts.append(text)
        return text.replace(old, new)

    emulate_attention(monkeypatch, HOPPER, 3, change)
    with pytest.raises((AssertionError, EmulationError)):
        verify(SHARED, seed)
    assert any(old in text for text in texts)


@pytest.mark.parametrize("positions", choice([1, 4], in_ci=[]))
def test_a_row_whose_counters_lie_harms_no_other(positions: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_attention(monkeypatch, HOPPER, 2)
    kind = AttentionCase((), (), 32, 8, 2, window=50)
    batch = VerifyBatch(VerifyCase((90, 100, 40), drafts(positions, 3), positions, kind=kind), seed, CPU)
    attention = batch.attention()
    others = (batch.places < positions) | (batch.places >= 2 * positions)
    for known, drafted in ((100_000, 0), (-5, 3), (0, 0), (100, -7), (100, 1000), (2**31 - 1, 2**31 - 1)):
        batch.counters[1], batch.drafted[1] = known, drafted
        batch.run(attention)
        expected = batch.batch.expected()[others]
        error = (batch.output[batch.places][others].float() - expected).norm() / expected.norm()
        assert error < 6e-3


@pytest.mark.parametrize("arch", choice([HOPPER, OTHERS], in_ci=[]))
@pytest.mark.parametrize("head_dim", choice([64, 96, 128, 256], in_ci=[]))
def test_verify_rows_beside_prefill(head_dim: int, arch: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_attention(monkeypatch, arch, 4)
    batch = AttentionBatch(
        AttentionCase((90, 33, 130, 31, 45), (1, 1, 61, 31, 1), head_dim, 4, 2, window=70), seed, CPU
    )
    attention = attention_of(batch)
    ones, more = np.array([0, 1, 4]), np.array([2, 3])
    words = attention.prefill_plan_words(92, 2)
    plan = np.zeros(attention.mixed_plan_words(3, words), np.int32)
    lengths, tables, queries = batch.lengths, batch.table_rows, batch.query_rows
    attention.plan_mixed(
        VerifyRows(lengths[ones] - 20, lengths[ones] + 30, tables[ones], queries[ones]),
        PrefillRows((lengths - batch.counts)[more], batch.counts[more], tables[more], queries[more]),
        plan,
        3,
        words,
    )
    counters, address = torch.from_numpy(lengths), torch.from_numpy(plan).data_ptr()
    attention.run_mixed(0, 0, batch.queries, batch.output, address, 3, words, counters)
    check(batch, seed)
