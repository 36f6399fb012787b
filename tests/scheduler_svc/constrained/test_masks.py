"""The masks of one plan: bits as the runner reads them, rows that fail, stop tokens that are put off."""

from __future__ import annotations

import numpy as np
import pytest

from protos import plan_pb2
from runner_svc.byte_tokenizer import IM_END_ID, NUM_TOKENS, byte_model
from scheduler_svc.constrained.compiler import GrammarCompiler
from scheduler_svc.constrained.grammar_text import grammar_text
from scheduler_svc.constrained.masks import AwaitedRow, MaskMaker, OutputMatcher

EVERYTHING = set(range(-(-NUM_TOKENS // 32) * 32))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_model("hash", "HashModel", NUM_TOKENS, 2048))


def output(compiler: GrammarCompiler, regex: str, min_tokens: int = 0) -> OutputMatcher:
    return OutputMatcher(compiler.compile(grammar_text("regex", regex)), min_tokens, np.array([IM_END_ID], np.int32))


def allowed(masks: plan_pb2.Masks) -> dict[int, set[int]]:
    return {
        entry.row: set(np.flatnonzero(np.unpackbits(np.frombuffer(entry.bits, np.uint8), bitorder="little")).tolist())
        for entry in masks.rows
    }


@pytest.mark.parametrize("threads", [1, 4])
def test_each_row_has_the_mask_of_its_own_matcher(compiler: GrammarCompiler, threads: int) -> None:
    maker = MaskMaker(NUM_TOKENS, threads)
    outputs = [output(compiler, regex) for regex in ("ab", "[xy]z?", "q")]
    rows = [AwaitedRow(row, each, []) for row, each in zip((2, 5, 7), outputs, strict=True)]
    made = maker.make(rows)
    assert allowed(made.masks) == {2: {ord("a")}, 5: {ord("x"), ord("y")}, 7: {ord("q")}}
    told = [AwaitedRow(0, outputs[0], [ord("a")]), AwaitedRow(1, outputs[1], [ord("x")]), AwaitedRow(2, outputs[2], [])]
    assert allowed(maker.make(told).masks) == {0: {ord("b")}, 1: {ord("z"), IM_END_ID}, 2: {ord("q")}}
    assert allowed(maker.make([AwaitedRow(0, outputs[0], [ord("b")])]).masks) == {0: {IM_END_ID}}
    assert not made.failures


def test_a_row_that_fails_gets_a_mask_and_the_others_theirs(compiler: GrammarCompiler) -> None:
    maker = MaskMaker(NUM_TOKENS, 1)
    bad, good = output(compiler, "ab"), output(compiler, "ab")
    made = maker.make([AwaitedRow(0, bad, [ord("x")]), AwaitedRow(1, good, [ord("a")])])
    assert allowed(made.masks) == {0: EVERYTHING, 1: {ord("b")}}
    ((index, why),) = made.failures
    assert index == 0 and "does not continue a match" in why


def test_stop_tokens_are_put_off_unless_nothing_else_may_come(compiler: GrammarCompiler) -> None:
    maker = MaskMaker(NUM_TOKENS, 1)
    each = output(compiler, "a{1,3}", min_tokens=9)
    seen = [allowed(maker.make([AwaitedRow(0, each, tokens)]).masks)[0] for tokens in ([], [97], [97], [97])]
    assert seen == [{97}, {97}, {97}, {IM_END_ID}]
    each = output(compiler, "a{1,3}", min_tokens=1)
    assert allowed(maker.make([AwaitedRow(0, each, [97])]).masks)[0] == {97, IM_END_ID}


def test_free_masks_exclude_nothing(compiler: GrammarCompiler) -> None:
    maker = MaskMaker(NUM_TOKENS, 1)
    assert allowed(maker.free([AwaitedRow(3, output(compiler, "a"), [])])) == {3: EVERYTHING}
