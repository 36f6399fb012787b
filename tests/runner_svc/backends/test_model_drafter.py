"""A draft model with KV of its own drafts from right KV only: after rejections, prefix hits, reuse, and catching up."""

from __future__ import annotations

import random

import pytest

from roster_protos import plan_pb2
from runner_svc.backends.hash_backend import HashBackend, expected_tokens
from runner_svc.backends.hash_drafter import hash_model_drafter
from runner_svc.execution.runner import Runner
from runner_svc.tiers.thread_copier import ThreadCopier
from tests.support.drafters import CheckedDraftModel, checked_model
from tests.support.drafting_driver import EOS_PROBABILITY, VOCAB_SIZE, DraftingDriver
from tests.support.plans import SAMPLE, admission, ints, plan
from tests.support.thoroughness import count

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


class Hand:
    """A runner with a draft model, one plan after the other; blocks of 4."""

    def __init__(self, wrong: float = 0.0, context_length: int = 64, catch_up: int = 256) -> None:
        self.backend = HashBackend(num_slots=3, block_size=4, num_blocks=30, context_length=64, eos_probability=0)
        dice = random.Random(3)
        self.drafter = checked_model(dice, self.backend, context_length, wrong=wrong, catch_up=catch_up)
        self.backend.draft_with(self.drafter, 7)
        self.runner = Runner(self.backend, copier=ThreadCopier(self.backend.cache_regions, 4))

    def send(self, *rows: tuple[int, int, int, int], drafts: tuple[int, ...] = (), **parts: object) -> plan_pb2.Result:
        return self.runner.execute(self.runner.last_plan + 1, plan(extents=rows, drafts=drafts, **parts))

    def prompt(self, slot: int, tokens: list[int], blocks: list[int], computed: int = 0) -> list[int]:
        """Admits a prompt and computes it; returns its first token."""
        begin = admission(slot, tokens, blocks, num_computed=computed)
        return ints(self.send((slot, computed, len(tokens) - computed, SAMPLE), admissions=[begin]).tokens)

    def draft(self, slot: int, most: int) -> tuple[int, int]:
        """Returns the drafts that a row verified, and the tokens that it got."""
        result = self.send((slot, -1, 1 + most, SAMPLE), drafts=(most,))
        return result.drafted[0], result.token_counts[0]

    @property
    def passes(self) -> list[list[int]]:
        """Positions of each row of the passes since the last call."""
        assert isinstance(self.drafter._model, CheckedDraftModel)
        passes, self.drafter._model.passes = self.drafter._model.passes, []
        return passes


@pytest.mark.parametrize("run", range(count(50, in_ci=2)))
def test_a_draft_model_that_is_the_target_is_always_right(run: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    block_size = dice.choice([1, 3, 8, 16])
    backend = HashBackend(
        num_slots=5,
        block_size=block_size,
        num_blocks=400 // block_size,
        context_length=80,
        vocab_size=VOCAB_SIZE,
        eos_probability=EOS_PROBABILITY,
    )
    backend.draft_with(hash_model_drafter(backend), dice.randint(2, 7))
    driver = DraftingDriver(backend, dice, 20, depth=3)
    driver.run()
    assert driver.drafted == driver.accepted > 50


def test_a_pass_begins_with_what_the_last_one_did_not_see() -> None:
    hand = Hand()
    hand.prompt(0, PROMPT, list(range(1, 13)))
    assert (hand.draft(0, 3), hand.passes) == ((3, 4), [[10], [1], [1]])
    assert (hand.draft(0, 2), hand.passes) == ((2, 3), [[2], [1]])  # the last draft and the token after it
    hand.send((0, -1, 1, SAMPLE))
    assert (hand.draft(0, 1), hand.passes) == ((1, 2), [[3]])
    hand.drafter._model._wrong = 1.0  # type: ignore[attr-defined]
    assert hand.draft(0, 4) == (4, 1)
    assert hand.passes and hand.draft(0, 1) == (1, 1)
    assert hand.passes == [[1]]


def test_a_row_drafts_after_it_has_caught_up_within_the_budget_of_steps() -> None:
    """Those that miss least do so first."""
    hand = Hand(catch_up=8)
    hand.prompt(0, list(range(20)), list(range(1, 9)))
    hand.prompt(1, PROMPT[:5], list(range(9, 15)))
    rows = [(0, -1, 3, SAMPLE), (1, -1, 3, SAMPLE)]
    seen = [list(hand.send(*rows, drafts=(2, 2)).drafted) for _ in range(4)]
    assert (seen, hand.passes) == (
        [[0, 2], [0, 2], [0, 2], [2, 2]],
        [[2, 6], [1], [8, 2], [1], [8, 2], [1], [6, 2], [1, 1]],
    )


def test_a_row_that_has_begun_goes_on_while_nothing_drafts_but_not_beside_prompts() -> None:
    hand = Hand(catch_up=8)
    hand.prompt(0, list(range(20)), list(range(1, 9)))
    hand.send((0, -1, 1, SAMPLE))
    assert (hand.passes, hand.draft(0, 2), hand.passes) == ([], (0, 1), [[8]])
    hand.prompt(1, PROMPT[:5], [9, 10])
    assert hand.passes == []
    for _ in range(3):
        hand.send((0, -1, 1, SAMPLE), (1, -1, 1, SAMPLE))
    assert (hand.passes, hand.draft(0, 1), hand.passes) == ([[8], [7]], (1, 2), [[3]])


def test_a_hit_brings_the_draft_models_part_along_where_it_is_there() -> None:
    hand = Hand()
    hand.prompt(0, PROMPT, [1, 2, 3, 4])
    hand.draft(0, 1)
    assert hand.drafter.counters.marks[:5].tolist() == [False, True, True, False, False]
    hand.prompt(1, [*PROMPT, 1], [1, 2, 5, 6], computed=8)
    hand.passes  # noqa: B018
    assert (hand.draft(1, 1), hand.passes) == ((1, 2), [[3]])
    hand.prompt(2, [*PROMPT[:4], *range(9)], [1, 7, 8, 9, 10], computed=4)  # block 7 is computed without drafts
    hand.send(releases=[1])
    hand.prompt(1, [*PROMPT[:4], *range(9)], [1, 7, 11, 12, 13], computed=8)
    assert (hand.draft(1, 1), hand.passes) == ((1, 2), [[10]])


def test_blocks_lose_their_marks_with_their_contents() -> None:
    hand = Hand()
    hand.prompt(0, PROMPT, [1, 2, 3])
    hand.draft(0, 1)
    hand.send(releases=[0])
    other = [token + 1 for token in PROMPT]
    (first,) = hand.prompt(0, other[:7], [1, 3])  # computed without drafts; decoding appends block 2
    hand.send((0, 7, 1, SAMPLE), appends=[(0, 2, 2)])
    hand.send(releases=[0])
    assert not hand.drafter.counters.marks.any()
    hand.prompt(0, [*other[:7], first, *range(6)], [1, 3, 4, 5, 6], computed=8)
    hand.passes  # noqa: B018
    assert (hand.draft(0, 1), hand.passes) == ((1, 2), [[15]])


def test_a_block_is_marked_only_below_the_accepted_tokens() -> None:
    hand = Hand(wrong=1.0)
    hand.prompt(0, PROMPT[:7], [1, 2, 3, 4])
    assert hand.draft(0, 7) == (7, 1)  # wrong drafts in blocks 2 to 4
    assert hand.drafter.counters.marks[:5].tolist() == [False, True, True, False, False]
    assert hand.drafter.counters.drafted[0] == 8


def test_the_end_of_a_shorter_context_ends_drafts_not_the_sequence() -> None:
    hand = Hand(context_length=16)
    hand.prompt(0, PROMPT, list(range(1, 13)))
    drafts = [hand.draft(0, 4) for _ in range(4)]
    assert drafts == [(4, 5), (2, 3), (0, 1), (0, 1)]  # of 10 known tokens, 15, 18, 19: its last position is 15
    resident = hand.runner.snapshot().sequences[0]
    assert ints(resident.tokens) == PROMPT + expected_tokens(PROMPT, 11, eos_probability=0)


def test_copied_blocks_keep_the_draft_models_part() -> None:
    hand = Hand()
    hand.prompt(0, PROMPT, [1, 2, 3, 4])
    hand.draft(0, 1)
    hand.send(copies=[(1, 8), (2, 9)])
    hand.prompt(1, [*PROMPT, 1], [8, 9, 5, 6], computed=8)
    hand.passes  # noqa: B018
    assert (hand.draft(1, 1), hand.passes) == ((1, 2), [[3]])


def test_blocks_from_the_host_pool_lack_the_draft_models_part() -> None:
    hand = Hand()
    hand.prompt(0, PROMPT, [1, 2, 3, 4])
    hand.draft(0, 1)
    hand.send(offloads=[[(1, 1, bytes(20)), (2, 2, bytes(20))]])
    hand.prompt(1, [token + 1 for token in PROMPT], [8, 9, 10, 11])
    hand.draft(1, 1)
    assert hand.drafter.counters.marks[8:10].all()
    hand.send(releases=[1])
    hand.send(loads=[[(1, 8), (2, 9)]])
    hand.runner.finish_copies()
    hand.prompt(1, [*PROMPT, 1], [8, 9, 5, 6], computed=8)
    hand.passes  # noqa: B018
    assert (hand.draft(1, 1), hand.passes) == ((1, 2), [[11]])  # the draft model computes all of it
