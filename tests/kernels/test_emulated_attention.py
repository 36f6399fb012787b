"""The sources of the attention kernels, emulated on a CPU, against float32 torch, for Hopper and for other GPUs.

The emulator models neither register limits nor timing; random execution orders test for races. CI runs a part of the
cases; `ROSTER_TEST_FULL=1` runs all, which takes five minutes of two cores.
"""

from __future__ import annotations

import random
import shutil

import pytest
import torch

from tests.support.attention_cases import AttentionBatch, AttentionCase
from tests.support.attention_runs import attention_of, check, run_decode, run_mixed, run_prefill
from tests.support.emulator.attention import emulate_attention
from tests.support.emulator.kernel import EmulatedKernel, EmulationError
from tests.support.thoroughness import FULL, choice

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

CPU = torch.device("cpu")
HOPPER, OTHERS = "sm_90a", "sm_80"
ODD_HEADS = [(16, False), (48, False), (80, False), (176, False)]
HEADS = [(64, False), (64, True), (96, False), (96, True), (128, False), (128, True), (256, False), (256, True)]
ON_HOPPER = [head for head in HEADS if head != (256, True)]


@pytest.fixture
def seed() -> int:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    EmulatedKernel.orders.seed(seed)
    return seed


def prefill(case: AttentionCase, seed: int, blocks: int | None = None) -> None:
    batch = AttentionBatch(case, seed, CPU)
    run_prefill(attention_of(batch), batch, blocks)
    check(batch, seed)


@pytest.mark.parametrize(("head_dim", "fp8_cache"), choice(ON_HOPPER, in_ci=[(64, True)]))
def test_hoppers_prefill_with_many_pieces_a_block(
    head_dim: int, fp8_cache: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of one tile follows one of several, and vice versa; the ring of records wraps around."""
    emulate_attention(monkeypatch, HOPPER, 2)
    rows = ((200, 130, 31, 16, 5, 140), (150, 1, 31, 16, 3, 140))
    prefill(AttentionCase(*rows, head_dim, 6, 2, fp8_cache=fp8_cache), seed, blocks=1)


@pytest.mark.parametrize(("head_dim", "fp8_cache"), choice(ON_HOPPER, in_ci=[(64, True)]))
@pytest.mark.parametrize(("window", "soft_cap"), choice([(33, None), (100, 20.0)], in_ci=[(100, 20.0)]))
def test_hoppers_prefill_with_windows_and_soft_caps(
    head_dim: int,
    fp8_cache: bool,
    window: int,
    soft_cap: float | None,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulate_attention(monkeypatch, HOPPER, 2)
    rows = ((333, 40), (170, 33))
    prefill(AttentionCase(*rows, head_dim, 2, 2, 32, window, soft_cap, dtype=torch.float16, fp8_cache=fp8_cache), seed)


@pytest.mark.parametrize("head_dim", choice([64, 96, 128, 256], in_ci=[96]))
def test_hoppers_prefill_of_scores_that_grow_tile_by_tile(
    head_dim: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are processed from the last to the first: each tile's maximum is far above all earlier ones."""
    emulate_attention(monkeypatch, HOPPER, 1)
    prefill(AttentionCase((500, 140), (140, 140), head_dim, 2, 1, first_key=30.0), seed)


@pytest.mark.parametrize(("head_dim", "fp8_cache"), choice(HEADS, in_ci=[(64, False)]))
def test_prefill_elsewhere(head_dim: int, fp8_cache: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_attention(monkeypatch, OTHERS, 1)
    if FULL:  # one more kernel to compile; each head of the other is a case of this one
        prefill(AttentionCase((150, 40, 7), (70, 33, 7), head_dim, 4, 2, fp8_cache=fp8_cache), seed)
    rows = ((150, 40), (70, 33))
    prefill(AttentionCase(*rows, head_dim, 2, 2, 32, 33, 20.0, dtype=torch.float16, fp8_cache=fp8_cache), seed)


@pytest.mark.parametrize("head_dim", choice([head for head, _ in ODD_HEADS], in_ci=[48]))
def test_heads_of_odd_multiples_of_16(head_dim: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_attention(monkeypatch, HOPPER, 2)
    prefill(AttentionCase((150, 40, 7), (70, 33, 7), head_dim, 4, 2), seed)
    batch = AttentionBatch(AttentionCase((100, 1, 17, 0), (1,) * 4, head_dim, 6, 2), seed, CPU)
    run_decode(attention_of(batch), batch)
    check(batch, seed)


@pytest.mark.parametrize(
    ("head_dim", "fp8_cache", "arch"),
    choice(
        [(*head, arch) for head in (*HEADS, *ODD_HEADS) for arch in (HOPPER, OTHERS)],
        in_ci=[(64, False, HOPPER)],
    ),
)
@pytest.mark.parametrize("soft_cap", choice([None, 20.0], in_ci=[None]))
def test_sinks(
    head_dim: int, fp8_cache: bool, arch: str, soft_cap: float | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are split over blocks, pieces of one tile and of several, decode beside prefill."""
    emulate_attention(monkeypatch, arch, 2)
    kinds = {"soft_cap": soft_cap, "fp8_cache": fp8_cache, "sinks": True}
    prefill(AttentionCase((200, 130, 31), (150, 3, 31), head_dim, 4, 2, **kinds), seed)
    batch = AttentionBatch(AttentionCase((300, 1, 0, 33), (1,) * 4, head_dim, 6, 2, **kinds), seed, CPU)
    run_decode(attention_of(batch), batch, repeats=2)
    check(batch, seed)
    batch = AttentionBatch(AttentionCase((90, 130, 45), (1, 61, 1), head_dim, 4, 2, **kinds), seed, CPU)
    run_mixed(attention_of(batch), batch)
    check(batch, seed)


@pytest.mark.parametrize(
    ("head_dim", "fp8_cache", "arch"),
    choice(
        [(*head, arch) for head in HEADS for arch in (HOPPER, OTHERS)],
        in_ci=[(128, True, HOPPER), (256, False, OTHERS)],
    ),
)
def test_decode(head_dim: int, fp8_cache: bool, arch: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are split over blocks, rows that share a block, an empty row; both variants."""
    emulate_attention(monkeypatch, arch, 3)
    for lengths in ((300, 1, 17, 0, 33), tuple(range(1, 60, 3))):
        case = AttentionCase(lengths, (1,) * len(lengths), head_dim, 6, 2, fp8_cache=fp8_cache)
        batch = AttentionBatch(case, seed, CPU)
        run_decode(attention_of(batch), batch, repeats=2)
        check(batch, seed)


@pytest.mark.parametrize("arch", choice([HOPPER, OTHERS], in_ci=[HOPPER]))
@pytest.mark.parametrize("head_dim", choice([64, 96, 128, 256], in_ci=[96]))
def test_decode_beside_prefill(head_dim: int, arch: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_attention(monkeypatch, arch, 4)
    case = AttentionCase((90, 33, 130, 31, 45), (1, 1, 61, 31, 1), head_dim, 4, 2, window=70)
    batch = AttentionBatch(case, seed, CPU)
    run_mixed(attention_of(batch), batch)
    check(batch, seed)


MANY_PIECES = AttentionCase((300, 31, 140), (150, 31, 140), 96, 2, 1)  # the kernel of scores that grow
FAULTS = {
    "scores are not waited for": ("wgmma_wait<1>();", ""),
    "keys are given back twice": (
        "if (tile == final_tile) barrier_arrive(shared.queries()",
        "barrier_arrive(shared.keys().empty(0)); if (tile == final_tile) barrier_arrive(shared.queries()",
    ),
    "values' stage is not left": ("value_ring.advance();", ""),
    "a new piece adds to the last one's outputs": ("mix(p, !begins);", "mix(p, true);"),
    "queries are not waited for": ("barrier_wait(shared.queries().full(query_ring.stage), query_ring.parity);", ""),
    "values beyond the end count": ("if (line < valid) data", "data"),
    "a copy is not announced": ("barrier_expect(full, kQueryTileBytes);", "barrier_arrive(full);"),
    "sums are not those of the piece": ("softmax.reset();", ""),
}


@pytest.mark.parametrize("fault", choice(list(FAULTS), in_ci=list(FAULTS)[:1]))
def test_the_emulator_sees(fault: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = FAULTS[fault]
    texts: list[str] = []

    def change(text: str) -> str:
        texts.append(text)
        return text.replace(old, new)

    emulate_attention(monkeypatch, HOPPER, 1, change)
    with pytest.raises((AssertionError, EmulationError)):
        prefill(MANY_PIECES, seed)
    assert any(old in text for text in texts)


def test_without_a_fault_it_passes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_attention(monkeypatch, HOPPER, 1)
    prefill(MANY_PIECES, seed)
