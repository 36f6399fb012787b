"""Attention in the canonical order, emulated on a CPU: every step's bits equal the twin's, and broken orders are found.

Outputs are compared as the halves of float32 that rounding drops, which a wrong order of sums changes first. CI runs a
part of the cases; `ROSTER_TEST_FULL=1` runs all.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable

import pytest
import torch

from runner_svc.cuda.sources import kernel_folder
from tests.support.attention_cases import AttentionBatch, AttentionCase
from tests.support.canonical_arithmetic import EmulatedArithmetic
from tests.support.canonical_runs import CanonicalCase, halves, low_halves
from tests.support.emulator.attention import emulate_attention
from tests.support.emulator.kernel import EmulatedKernel
from tests.support.thoroughness import choice

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

CPU = torch.device("cpu")
HOPPER, OTHERS = "sm_90a", "sm_80"
HEADS = (64, 96, 128)
# window, soft cap, sinks
KINDS = ((None, None, False), (100, None, True), (300, 20.0, False), (5, 20.0, True))


@pytest.fixture
def seed() -> int:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    EmulatedKernel.orders.seed(seed)
    return seed


def made(case: AttentionCase, seed: int) -> tuple[CanonicalCase, torch.Tensor]:
    """Returns a case and the low halves of the twin's outputs."""
    made = CanonicalCase(AttentionBatch(case, seed, CPU))
    return made, halves(made.expected(EmulatedArithmetic()))[1]


def steps(case: CanonicalCase, expected: torch.Tensor, positions: tuple[int, ...]) -> dict[str, int]:
    """Returns the differences of every kind of step; the case has three rows, of 40, 9 and 30 queries."""
    attention = case.attention()
    found = {
        "prefill": case.prefill(attention, [(0, 0, 40), (1, 0, 9), (2, 0, 30)]),
        "chunks": case.prefill(attention, [(0, 0, 1), (0, 1, 16), (0, 17, 23), (2, 11, 19)]),
        "decode": case.decode(attention, [(0, 39), (1, 3), (2, 29), (0, 0), (0, 13)]),
        "alone": case.decode(attention, [(2, 29)]),
        "mixed": case.mixed(attention, [(0, 20), (1, 8)], [(2, 0, 30)]),
    }
    for size in positions:
        chunks = [(0, 31, size), (1, 0, max(1, size - 1)), (2, 5, 1)]
        found[f"verify of {size}"] = case.verify(attention, chunks, size, slack=9)
    return {name: ran.differences(expected) for name, ran in found.items()}


def test_decode_has_the_twins_bits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that blocks share, rows that share a block, a window that begins within a segment."""
    emulate_attention(monkeypatch, OTHERS, 3)
    case, expected = made(AttentionCase((530, 9, 270), (2, 2, 2), 64, 4, 2, window=290, sinks=True), seed)
    with low_halves(monkeypatch):
        attention = case.attention()
        for rows in ([(0, 1)], [(0, 1), (1, 0), (2, 1), (0, 0), (2, 0)]):
            assert case.decode(attention, rows).differences(expected) == 0


@pytest.mark.parametrize(
    ("arch", "head_dim", "fp8_cache", "kind", "positions"),
    choice(
        [
            (arch, head_dim, fp8_cache, kind, ((2, 3, 5, 8)[(index + step) % 4],))
            for index, kind in enumerate(KINDS)
            for step, head_dim in enumerate(HEADS)
            for arch in (HOPPER, OTHERS)
            for fp8_cache in (False, True)
        ],
        in_ci=[],
    ),
)
def test_every_step_has_the_twins_bits(
    arch: str,
    head_dim: int,
    fp8_cache: bool,
    kind: tuple[int | None, float | None, bool],
    positions: tuple[int, ...],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    window, soft_cap, sinks = kind
    emulate_attention(monkeypatch, arch, 3)
    kinds = {"window": window, "soft_cap": soft_cap, "sinks": sinks, "fp8_cache": fp8_cache}
    case, expected = made(AttentionCase((530, 9, 270), (40, 9, 30), head_dim, 4, 2, **kinds), seed)
    with low_halves(monkeypatch):
        found = steps(case, expected, positions)
    assert not any(found.values()), found


@pytest.mark.parametrize("multiprocessors", choice([1, 2, 5, 40], in_ci=[]))
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), choice([(1, 1), (9, 3), (28, 4), (40, 1)], in_ci=[]))
def test_any_group_and_split(
    num_heads: int, num_kv_heads: int, multiprocessors: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_attention(monkeypatch, OTHERS, multiprocessors)
    case, expected = made(AttentionCase((1300, 9, 270), (40, 9, 30), 32, num_heads, num_kv_heads, 32), seed)
    with low_halves(monkeypatch):
        found = steps(case, expected, (2, 6))
    assert not any(found.values()), found


@pytest.mark.parametrize("head_dim", choice([16, 48, 80, 112], in_ci=[]))
def test_heads_of_odd_multiples_of_16(head_dim: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_attention(monkeypatch, HOPPER, 2)
    case, expected = made(AttentionCase((530, 9, 270), (40, 9, 30), head_dim, 4, 2), seed)
    with low_halves(monkeypatch):
        found = steps(case, expected, (4,))
    assert not any(found.values()), found


# A rule of the order that a kernel breaks: what is replaced in its text, and by what.
BROKEN = {
    "maxima that are no whole numbers": ("return ceilf(", "return ("),
    "one maximum for two queries": (
        "highest = exchange.maxima[0][column];",
        "highest = fmaxf(exchange.maxima[0][column], exchange.maxima[0][column ^ 1]);",
    ),
    "a maximum beyond the sub-tile": (
        "fmaxf(before, unit.maximum(highest));",
        "fmaxf(before, unit.maximum(highest) + 1.0f);",
    ),
    "a sum that is not rescaled": ("even[r] = __fmul_rn(even[r], factor[r]);", ""),
    "sums by another tree": ("lanes = 1; lanes < kResidues; lanes *= 2", "lanes = 4; lanes >= 1; lanes /= 2"),
    "sums in descending order": ("sum = __fadd_rn(sum, own[k]);", "sum = __fadd_rn(sum, own[kSubTile - 8 - k]);"),
    "an exponent that is rounded twice": (
        "__fmaf_rn(score, factor, -maximum)",
        "__fsub_rn(__fmul_rn(score, factor), maximum)",
    ),
    "segments that are longer": ("constexpr int kSegment = 256;", "constexpr int kSegment = 512;"),
    "segments folded in descending order": ("first + min(base + i, count - 1)", "first + max(count - 1 - base - i, 0)"),
    "segments before that are not rescaled": ("factors[0].keep != 1.0f || factors[1].keep != 1.0f", "false"),
    "probabilities that are rounded before their sum": (
        "own[0] = unit.probability(scores[n][c], maximum);",
        "own[0] = __bfloat162float(__float2bfloat16_rn(unit.probability(scores[n][c], maximum)));",
    ),
}


def replaced(old: str, new: str, texts: list[str]) -> Callable[[str], str]:
    def change(text: str) -> str:
        texts.append(text)
        return text.replace(old, new)

    return change


def test_each_rule_is_broken_where_it_is_followed() -> None:
    texts = [path.read_text() for path in kernel_folder().glob("*.cu*")]
    assert not [rule for rule, (old, _) in BROKEN.items() if not any(old in text for text in texts)]


@pytest.mark.parametrize("rule", choice(list(BROKEN), in_ci=[]))
def test_a_broken_rule_is_found(rule: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    old, new = BROKEN[rule]
    emulate_attention(monkeypatch, OTHERS, 2, replaced(old, new, texts))
    case, expected = made(AttentionCase((1300, 9, 270), (40, 9, 30), 64, 4, 2, first_key=5.0), seed)
    with low_halves(monkeypatch):
        found = steps(case, expected, ())
    assert any(old in text for text in texts)
    assert any(found.values())


def test_what_it_does_not_support_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_attention(monkeypatch, OTHERS, 2)
    for kinds, words in (
        ({"head_dim": 256}, "heads of 256 elements"),
        ({"dtype": torch.float16}, "made for bfloat16"),
        ({"scale": -1.0}, "not positive"),
    ):
        batch = AttentionBatch(AttentionCase((9,), (9,), num_heads=2, num_kv_heads=1, **kinds), 0, CPU)
        with pytest.raises(ValueError, match=words):
            CanonicalCase(batch).attention()
