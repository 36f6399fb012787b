"""Compares greedy output with a deterministic backend's own logits of the text alone, without any near tie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from runner_svc.backends.torch_backend import TorchBackend
from tests.support.logits_of_steps import Part, Steps


class ExactParity:
    """Does what `Parity` does, but each token must be the likeliest: of equal ones, that of the lowest id."""

    def __init__(self, backend: TorchBackend) -> None:
        """`backend` is used for nothing else; its pool holds a whole text."""
        self._steps = Steps(backend)
        self._table = list(range(1, backend.num_blocks + 1))
        self.places = 0

    def check(self, prompts: Sequence[list[int]], streams: Sequence[list[int]], max_tokens: int) -> None:
        """Fails if a stream is not the greedy one."""
        for prompt, tokens in zip(prompts, streams, strict=True):
            assert len(tokens) == max_tokens
            self.check_forced(prompt, tokens)

    def check_forced(
        self, prompt: list[int], tokens: list[int], allowed: Callable[[list[int]], list[int]] | None = None
    ) -> None:
        """Fails if a token is not the likeliest of the allowed ones after those before it."""
        logits = self._steps.logits([Part([*prompt, *tokens[:-1]], 0, self._table)], len(prompt))[0]
        for place, (token, row) in enumerate(zip(tokens, logits[len(prompt) - 1 :], strict=True)):
            if allowed is not None:
                kept = torch.full_like(row, -torch.inf)
                kept[allowed(tokens[:place])] = row[allowed(tokens[:place])]
                row = kept
            best = _likeliest(row)
            assert token == best, f"token {place} after {len(prompt)}: {float(row[best]) - float(row[token])}"
        self.places += len(tokens)

    def expected_tokens(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """Returns the greedy tokens after each prompt, computed one at a time."""
        answers = []
        for prompt in prompts:
            text = list(prompt)
            while len(text) < len(prompt) + max_tokens:
                start = len(text) - 1 if len(text) > len(prompt) else 0
                row = self._steps.logits([Part(text[start:], start, self._table)], len(prompt))[0][-1]
                text.append(_likeliest(row))
            answers.append(text[len(prompt) :])
        return answers

    def assert_few_ties(self) -> None:
        """Prints how many tokens have been compared; there are no ties."""
        print(f"{self.places} places, no tie excused")


def _likeliest(row: Tensor) -> int:
    return int((row == row.max()).nonzero()[0])
