"""Attention in the canonical order on a GPU: the bits of every kind of step against the twin's, 0 differences.

Outputs are compared as bfloat16 and, by kernels that store them, as the halves of float32 that rounding drops.
"""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.attention_cases import AttentionBatch, AttentionCase

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.attention import cuda_prefill
from tests.support.attention_runs import attention_of, run_decode, run_prefill
from tests.support.canonical_device import DeviceArithmetic
from tests.support.canonical_runs import CanonicalCase, halves, low_halves

DEVICE = torch.device("cuda")
# window, soft cap, sinks
KINDS = ((None, None, False), (100, None, True), (1000, 30.0, False))
HEADS = ((64, 9, 3), (96, 8, 8), (128, 32, 8))
CACHES = pytest.mark.parametrize("fp8_cache", [False, True], ids=["bf16", "fp8"])
LOW = pytest.mark.parametrize("low", [False, True], ids=["high", "low"])


@pytest.fixture
def seed() -> int:
    return random.randrange(2**31)


def made(case: AttentionCase, seed: int, low: bool) -> tuple[CanonicalCase, torch.Tensor]:
    made = CanonicalCase(AttentionBatch(case, seed, DEVICE), max_batch=512)
    return made, halves(made.expected(DeviceArithmetic()))[low]


def chunks_of(counts: tuple[int, ...], sizes: tuple[int, ...], rng: random.Random) -> list[tuple[int, int, int]]:
    """Cuts each row's queries into chunks of random sizes out of `sizes`."""
    chunks = []
    for row, count in enumerate(counts):
        offset = 0
        while offset < count:
            size = min(rng.choice(sizes), count - offset)
            chunks.append((row, offset, size))
            offset += size
    return chunks


def all_steps(case: CanonicalCase, expected: torch.Tensor, positions: tuple[int, ...], seed: int) -> dict[str, int]:
    """Returns the differences of every kind of step."""
    rng, attention, counts = random.Random(seed), case.attention(), case.case.counts
    whole = [(row, 0, count) for row, count in enumerate(counts)]
    every = [(row, index) for row, count in enumerate(counts) for index in range(count)]
    found = {"whole prefill": case.prefill(attention, whole).differences(expected)}
    for sizes in ((1, 16, 100), (300, 2048)):
        chunks = chunks_of(counts, sizes, rng)
        found[f"prefill of {sizes}"] = case.prefill(attention, chunks).differences(expected)
    for size in (1, 3, 17, 64, 256):
        rows = rng.sample(every, min(size, len(every)))
        found[f"decode of {size}"] = case.decode(attention, rows).differences(expected)
    rows, chunks = rng.sample(every, 20), chunks_of(counts, (5, 300), rng)
    found["mixed"] = case.mixed(attention, rows, chunks).differences(expected)
    for size in positions:
        chunks = [(row, rng.randrange(count), size) for row, count in enumerate(counts)]
        chunks = [(row, offset, min(size, counts[row] - offset)) for row, offset, _ in chunks]
        found[f"verify of {size}"] = case.verify(attention, chunks, size, slack=9).differences(expected)
    return found


@LOW
@CACHES
@pytest.mark.parametrize("window, soft_cap, sinks", KINDS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_step_has_the_twins_bits(
    heads: tuple[int, int, int],
    window: int | None,
    soft_cap: float | None,
    sinks: bool,
    fp8_cache: bool,
    low: bool,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(seed)
    counts = (rng.randrange(300, 700), rng.randrange(1, 300), rng.randrange(1, 40), rng.randrange(200, 400))
    befores = (rng.randrange(0, 400), 0, rng.randrange(1000, 2500), rng.randrange(0, 1500))
    lengths = tuple(before + count for before, count in zip(befores, counts, strict=True))
    kinds = {"window": window, "soft_cap": soft_cap, "sinks": sinks, "fp8_cache": fp8_cache}
    case, expected = made(AttentionCase(lengths, counts, *heads, **kinds), seed, low)
    positions = (2, 6) if window is None else ()  # each compiles a kernel
    if not low:
        found = all_steps(case, expected, positions, seed)
    else:
        with low_halves(monkeypatch):
            found = all_steps(case, expected, positions, seed)
    assert not any(found.values()), (seed, found)


@CACHES
@pytest.mark.parametrize("positions", [3, 4, 5, 7, 8])
def test_verify_rows_of_any_size(positions: int, fp8_cache: bool, seed: int) -> None:
    lengths, counts = (3000, 700, 256, 260, 64, 9), (40, 40, 40, 40, 40, 9)
    case, expected = made(AttentionCase(lengths, counts, 128, 32, 8, fp8_cache=fp8_cache), seed, False)
    attention = case.attention()
    for offset in (0, 1, 32):
        chunks = [(row, min(offset, count - 1), 1) for row, count in enumerate(counts)]
        chunks = [(row, first, min(positions, counts[row] - first)) for row, first, _ in chunks]
        assert case.verify(attention, chunks, positions, slack=5).differences(expected) == 0, (seed, offset)


@LOW
@CACHES
def test_8192_positions(fp8_cache: bool, low: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    case, expected = made(AttentionCase((8192, 5000), (900, 70), 128, 8, 2, fp8_cache=fp8_cache), seed, low)
    if not low:
        found = all_steps(case, expected, (2,), rng.randrange(2**31))
    else:
        with low_halves(monkeypatch):
            found = all_steps(case, expected, (), rng.randrange(2**31))
    assert not any(found.values()), (seed, found)


@CACHES
def test_the_portable_prefill_has_the_same_bits(fp8_cache: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_prefill, "is_hopper", lambda: False)
    case, expected = made(AttentionCase((700, 1500), (700, 200), 128, 8, 2, fp8_cache=fp8_cache), seed, False)
    attention = case.attention()
    for chunks in ([(0, 0, 700), (1, 0, 200)], chunks_of(case.case.counts, (1, 16, 100), random.Random(seed))):
        assert case.prefill(attention, chunks).differences(expected) == 0, seed


def test_the_usual_kernels_differ(seed: int) -> None:
    """The comparison notices what it must."""
    batch = AttentionBatch(AttentionCase((2000, 700, 1100), (1, 1, 1), 128, 32, 8), seed, DEVICE)
    attention = attention_of(batch)
    run_decode(attention, batch)
    decoded = batch.output.clone()
    run_prefill(attention, batch)
    assert int((decoded.view(torch.int16) != batch.output.view(torch.int16)).sum()) > 50


def test_runs_repeat_their_bits(seed: int) -> None:
    """Blocks that share a (row, unit) arrive in any order."""
    case, expected = made(AttentionCase((3000, 2900, 40), (30, 30, 30), 128, 32, 8), seed, False)
    attention = case.attention()
    rows = [(row, index) for row in range(3) for index in (0, 17, 29)]
    for _ in range(20):
        assert case.decode(attention, rows).differences(expected) == 0
