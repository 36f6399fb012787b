"""The masks of one plan: bits as the runner reads them, rows that fail, deferred stop tokens, drafts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from runner_svc.backends.byte_tokenizer import IM_END_ID, NUM_TOKENS, byte_model
from scheduler_svc.constrained.process.compiler import GrammarCompiler, grammar_text
from scheduler_svc.constrained.process.masks import MOST_FORCED, MaskMaker, OutputMatcher, only_tokens
from tests.support.json_schemas import random_schema
from tests.support.thoroughness import choice

EVERYTHING = set(range(-(-NUM_TOKENS // 32) * 32))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_model("hash", "HashModel", NUM_TOKENS, 2048))


def output(compiler: GrammarCompiler, regex: str, min_tokens: int = 0) -> OutputMatcher:
    return OutputMatcher(compiler.compile(grammar_text("regex", regex)), min_tokens, np.array([IM_END_ID], np.int32))


@dataclass(slots=True)
class AskedRow:
    """A row whose masks are requested: its matcher, the tokens that it lacks, and draft tokens after them."""

    output: OutputMatcher
    tokens: list[int]
    draft: Sequence[int] = ()


def made(maker: MaskMaker, rows: list[AskedRow]) -> tuple[list[list[set[int]]], list[tuple[int, str]]]:
    """Returns the allowed tokens of each row's masks, and the failures."""
    places = sum(1 + len(row.draft) for row in rows)
    bits = np.zeros((places, maker.words), np.uint32)
    drafts = [row.draft for row in rows] if any(row.draft for row in rows) else ()
    counts, failures = maker.make([row.output for row in rows], [row.tokens for row in rows], bits, drafts)
    sets = [set(np.flatnonzero(np.unpackbits(each.view(np.uint8), bitorder="little")).tolist()) for each in bits]
    masks, at = [], 0
    for row, count in zip(rows, counts, strict=True):
        masks.append(sets[at : at + count])
        at += 1 + len(row.draft)
    return masks, failures


def only(masks: list[list[set[int]]]) -> list[set[int]]:
    return [mask for (mask,) in masks]


@pytest.mark.parametrize("threads", [1, 4])
def test_each_row_has_the_mask_of_its_own_matcher(compiler: GrammarCompiler, threads: int) -> None:
    maker = MaskMaker(NUM_TOKENS, threads)
    outputs = [output(compiler, regex) for regex in ("ab", "[xy]z?", "q")]
    masks, failures = made(maker, [AskedRow(each, []) for each in outputs])
    assert only(masks) == [{ord("a")}, {ord("x"), ord("y")}, {ord("q")}] and not failures
    told = [AskedRow(each, tokens) for each, tokens in zip(outputs, ([ord("a")], [ord("x")], []), strict=True)]
    assert only(made(maker, told)[0]) == [{ord("b")}, {ord("z"), IM_END_ID}, {ord("q")}]
    assert only(made(maker, [AskedRow(outputs[0], [ord("b")])])[0]) == [{IM_END_ID}]


def test_a_row_that_fails_gets_a_mask_and_the_others_theirs(compiler: GrammarCompiler) -> None:
    maker = MaskMaker(NUM_TOKENS, 1)
    bad, good = output(compiler, "ab"), output(compiler, "ab")
    masks, failures = made(maker, [AskedRow(bad, [ord("x")], [1, 2]), AskedRow(good, [ord("a")])])
    assert masks == [[EVERYTHING], [{ord("b")}]]
    ((index, why),) = failures
    assert index == 0 and "does not continue a match" in why


def test_stop_tokens_are_put_off_unless_nothing_else_may_come(compiler: GrammarCompiler) -> None:
    maker = MaskMaker(NUM_TOKENS, 1)
    each = output(compiler, "a{1,3}", min_tokens=9)
    seen = [only(made(maker, [AskedRow(each, tokens)])[0])[0] for tokens in ([], [97], [97], [97])]
    assert seen == [{97}, {97}, {97}, {IM_END_ID}]
    each = output(compiler, "a{1,3}", min_tokens=1)
    assert only(made(maker, [AskedRow(each, [97])])[0]) == [{97, IM_END_ID}]


def test_a_draft_has_the_masks_of_its_tokens_one_by_one(compiler: GrammarCompiler) -> None:
    """Correct drafts, drafts that go wrong at each position, and ends within them; the matcher does not advance."""
    rng = random.Random(7)
    maker = MaskMaker(NUM_TOKENS, 2)
    for regex in ("[ab]{4,6}", "(foo|ba+r)[0-9]{1,3}", '"[a-c]*"(, "[a-c]*"){0,3}'):
        rows, expected = [], []
        for _ in range(8):
            min_tokens = rng.choice([0, 0, 3])
            drafted, twin = (output(compiler, regex, min_tokens) for _ in range(2))
            told: list[int] = []
            for _ in range(rng.randrange(4)):
                token = rng.choice(sorted(only(made(maker, [AskedRow(twin, told[-1:])])[0])[0] - {IM_END_ID} or {97}))
                told.append(token)
            told = told[:-1] if len(told) > 1 else []
            assert not drafted.feed(told)
            twin = output(compiler, regex, min_tokens)
            masks = [only(made(maker, [AskedRow(twin, told)])[0])[0]]
            draft: list[int] = []
            for _ in range(rng.randrange(5)):
                draft.append(rng.choice(sorted(masks[-1])) if rng.random() < 0.8 else rng.randrange(256))
                if draft[-1] not in masks[-1]:
                    break
                masks.append(only(made(maker, [AskedRow(twin, draft[-1:])])[0])[0])
            rows.append(AskedRow(drafted, [], draft))
            expected.append(masks)
        before = [row.output.num_tokens for row in rows]
        for _ in range(2):
            assert made(maker, rows) == (expected, [])
            assert [row.output.num_tokens for row in rows] == before


# ---------------------------------------------------------------------- forced tokens


def forced(maker: MaskMaker, outputs: list[OutputMatcher], tokens: list[list[int]]) -> list[list[int]]:
    maker.forced_s = 60.0  # however long that takes on a busy machine
    bits = np.zeros((len(outputs), maker.words), np.uint32)
    _, failures = maker.make(outputs, tokens, bits)
    return maker.force(outputs, bits, [index for index, _ in failures])


def test_only_tokens_are_those_of_masks_with_one_bit() -> None:
    bits = np.zeros((6, 3), np.uint32)
    bits[1, 0], bits[2, 2], bits[3, 1], bits[4], bits[5, :2] = 1, 1 << 31, 3, 5, 1
    assert only_tokens(bits) == [(1, 0), (2, 95)]


@pytest.mark.parametrize("seed", choice(range(8), in_ci=range(2)))
def test_forced_tokens_are_what_masks_one_by_one_would_give(compiler: GrammarCompiler, seed: int) -> None:
    """Each of them is the only token of its mask, and the run ends where a mask allows several, or before a stop."""
    rng = random.Random(seed)
    maker, ended = MaskMaker(NUM_TOKENS, 1), 0
    for _ in range(8):
        grammar = grammar_text("json_schema", json.dumps(random_schema(rng)))
        stops = np.array([IM_END_ID, *rng.sample(range(97, 123), rng.randrange(3))], np.int32)
        min_tokens = rng.choice([0, 0, 12])
        fast, slow = (OutputMatcher(compiler.compile(grammar), min_tokens, stops) for _ in range(2))
        told: list[int] = []
        for _ in range(40):
            (run,) = forced(maker, [fast], [told])
            for token in [*told, *run]:
                assert not token or slow.matcher.consume_token(token)
            slow.num_tokens += len(told) + len(run)
            (allowed,) = only(made(maker, [AskedRow(slow, [])])[0])
            assert len(run) == MOST_FORCED or len(allowed) > 1 or allowed <= set(stops.tolist())
            assert allowed == only(made(maker, [AskedRow(fast, [])])[0])[0], "the mask that was kept"
            assert fast.num_tokens == slow.num_tokens
            told = [rng.choice(sorted(allowed))]
            if told[0] in stops:
                ended += 1
                break
    assert ended


def test_each_forced_token_is_the_only_one_of_its_mask(compiler: GrammarCompiler) -> None:
    maker = MaskMaker(NUM_TOKENS, 1)
    fast, slow = (output(compiler, "(foo|bar)baz[xy]q{70}") for _ in range(2))
    other = output(compiler, "[ab]c")
    (none, run) = forced(maker, [other, fast], [[], [ord("f")]])
    assert none == [] and bytes(run) == b"oobaz"
    told = [ord("f")]
    for token in run:
        assert only(made(maker, [AskedRow(slow, told)])[0]) == [{token}]
        told = [token]
    assert forced(maker, [fast], [[ord("x")]]) == [[ord("q")] * MOST_FORCED]
    assert forced(maker, [fast], [[]]) == [[ord("q")] * (70 - MOST_FORCED)]
    assert only(made(maker, [AskedRow(fast, [])])[0]) == [{IM_END_ID}] and forced(maker, [fast], [[]]) == [[]]


def test_a_slow_run_ends_early(compiler: GrammarCompiler) -> None:
    maker, fast = MaskMaker(NUM_TOKENS, 1), output(compiler, "[ab]c{9}")
    bits = np.zeros((1, maker.words), np.uint32)
    maker.make([fast], [[ord("a")]], bits)
    maker.forced_s = 0.0
    assert maker.force([fast], bits, []) == [[ord("c")]]
    assert forced(maker, [fast], [[]]) == [[ord("c")] * 8]


def test_a_row_that_fails_has_no_forced_tokens(compiler: GrammarCompiler) -> None:
    maker = MaskMaker(NUM_TOKENS, 1)
    outputs = [output(compiler, "abc"), output(compiler, "abc")]
    assert forced(maker, outputs, [[ord("x")], [ord("a")]]) == [[], [*b"bc"]]
