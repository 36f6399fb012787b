"""Prompts of turns: the earlier prompt, its output, then new content; contexts are dropped after their last use."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.simulator.conversations.contexts import Contexts, Tokens
from scheduler_svc.simulator.conversations.turn import Turn


def content(part: int, tokens: int) -> Tokens:
    return np.full(tokens, part, np.int32)


def test_a_prompt_is_the_context_so_far_and_what_is_new() -> None:
    turns = [
        Turn("a", ((7, 2), (1, 1))),
        Turn("a", ((2, 2),), continues=0),
        Turn("a", ((3, 1),), continues=1),
        Turn("b", ((4, 1),), continues=0),
    ]
    contexts = Contexts(turns, content)
    assert contexts.prompt(0).tolist() == [7, 7, 1]
    contexts.output(0, np.array([90, 91], np.int32))
    assert contexts.prompt(1).tolist() == [7, 7, 1, 90, 91, 2, 2]
    assert contexts.prompt(3).tolist() == [7, 7, 1, 90, 91, 4]
    contexts.output(1, np.array([92], np.int32))
    contexts.output(3, np.array([93], np.int32))
    assert contexts.num_kept == 1
    assert contexts.prompt(2).tolist() == [7, 7, 1, 90, 91, 2, 2, 92, 3]
    assert contexts.num_kept == 0


def test_a_request_outside_of_conversations_has_no_context() -> None:
    with pytest.raises(ValueError, match="request 0 is no turn"):
        Contexts([None], content).prompt(0)
