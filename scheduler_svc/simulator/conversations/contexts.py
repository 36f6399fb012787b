"""The tokens of conversations: each turn's prompt, made of earlier prompts, the runner's outputs and new content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from scheduler_svc.simulator.conversations.turn import Turn

Tokens = npt.NDArray[np.int32]


class Contexts:
    """Contexts of the conversations under way: those that a later turn will continue."""

    def __init__(self, turns: Sequence[Turn | None], content: Callable[[int, int], Tokens]) -> None:
        """`content` returns the tokens of a part by its id and its number of tokens."""
        self._turns = turns
        self._content = content
        self._continued = Counter(turn.continues for turn in turns if turn is not None and turn.continues is not None)
        self._contexts: dict[int, Tokens] = {}

    def prompt(self, index: int) -> Tokens:
        """Returns the prompt of the turn `index`, int32. The turn that it continues has ended."""
        turn = self._turns[index]
        if turn is None:
            raise ValueError(f"request {index} is no turn of a conversation")
        pieces = [self._content(content, tokens) for content, tokens in turn.parts]
        if turn.continues is not None:
            pieces.insert(0, self._contexts[turn.continues])
            self._continued[turn.continues] -= 1
            if not self._continued[turn.continues]:
                del self._contexts[turn.continues]
        prompt = np.concatenate(pieces)
        if self._continued[index]:
            self._contexts[index] = prompt
        return prompt

    def output(self, index: int, tokens: Tokens) -> None:
        """Appends the output of a request that has ended to its context, if a later turn continues it."""
        if index in self._contexts:
            self._contexts[index] = np.concatenate((self._contexts[index], tokens))

    @property
    def num_kept(self) -> int:
        """Number of contexts that are kept."""
        return len(self._contexts)
