"""The benchmark of drafts counts what was drafted and accepted, and its answers do not depend on it."""

from __future__ import annotations

from bench.speculation.__main__ import Case, row_of
from bench.speculation.backend_runs import answer
from runner_svc.backends.byte_tokenizer import IM_END_ID, NUM_TOKENS
from runner_svc.backends.hash_backend import HashBackend, expected_tokens
from tests.support.known_texts import KnownTexts, Most


def test_drafts_change_the_number_of_rows_and_no_answer() -> None:
    prompts = [[1, 2, 3], list(range(20))]
    made = [expected_tokens(prompt, 30, stop_ids=[IM_END_ID]) for prompt in prompts]
    drafter = KnownTexts(Most(), NUM_TOKENS, wrong=0.0)
    drafter.texts = {slot: prompt + tokens for slot, (prompt, tokens) in enumerate(zip(prompts, made, strict=True))}
    backend = HashBackend(drafter=drafter, max_drafts=4, num_slots=2, max_step_tokens=16)
    plain, drafted = (answer(backend, prompts, drafts=drafts, max_tokens=30) for drafts in (0, 4))
    assert plain.tokens == drafted.tokens == made
    assert (plain.verified, plain.decoded) == (0, plain.rows) and drafted.rows * 3 < plain.rows
    assert drafted.verified == sum(drafted.offered) >= sum(drafted.accepted) > 0
    case = Case("edit", 2, 4, [[plain]], [[drafted]])
    assert case.parted == 0 and case.acceptance[0] > 0.9 and case.tokens_per_row > 3
    assert row_of(case).startswith("| edit | 2 | 4 | ")
