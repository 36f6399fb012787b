"""Texts that a model writes itself: prompts that it makes up, tasks about its own texts, and its answers to both.

A model that was trained on chats writes a user's message where one is expected, so that no data is needed (Xu et al.
2024, Magpie). None of it is in `bench.speculation.prompts`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TASKS = (
    "Correct the mistakes in this text and return the whole text.",
    "Repeat this text word for word.",
    "Rewrite this text in the past tense.",
    "Quote the most important sentence of this text.",
    "List the names and numbers in this text.",
    "Shorten this text.",
    "Write a function in Python about this and explain it.",
    "Continue this text.",
    "Add a title and a summary to this text, and repeat it.",
    "Answer in one paragraph: what is this text about, and why?",
)
"""Instructions before a text of the model."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """An answer, as token ids, and the model's final states from which they were drawn."""

    tokens: list[int]
    states: Tensor
    """[tokens, hidden_size], in the model's dtype."""


def message_frame(encode: Callable[[str], list[int]]) -> tuple[list[int], list[int]]:
    """Returns the tokens before and behind a user's message, by a chat template; `encode` applies it."""
    one, other = encode("apple"), encode("9 +")
    before = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    behind = next(i for i, (a, b) in enumerate(zip(reversed(one), reversed(other), strict=False)) if a != b)
    return one[:before], one[len(one) - behind :]


class Writer:
    """Writes with a causal model of transformers."""

    def __init__(self, model: Any, frame: tuple[list[int], list[int]], end: int, seed: int) -> None:
        """`frame`: see `message_frame`. `end`: the id that ends a message."""
        self._model, (self._before, self._behind), self._end = model, frame, end
        self._dice = random.Random(seed)
        torch.manual_seed(seed)

        self._seen: list[Tensor] = []
        model.model.norm.register_forward_hook(lambda module, inputs, output: self._seen.append(output[:, -1]))

    def messages(self, count: int, most: int) -> list[list[int]]:
        """Returns `count` messages of a user, made up by the model, each of at most `most` tokens."""
        return [self._cut(made.tokens) for made in self._continued([self._before] * count, most, temperature=1.0)]

    def tasks(self, texts: Sequence[Answer], encode_text: Callable[[str], list[int]], most: int) -> list[list[int]]:
        """Returns a message for each text: an instruction, then the text, cut to `most` tokens."""
        return [[*encode_text(f"{self._dice.choice(TASKS)}\n\n"), *self._cut(text.tokens[:most])] for text in texts]

    def answers(self, messages: Sequence[list[int]], most: int, temperature: float) -> list[Answer]:
        """Returns the answers to messages, each of at most `most` tokens."""
        prompts = [[*self._before, *message, *self._behind] for message in messages]
        return self._continued(prompts, most, temperature)

    def _cut(self, tokens: list[int]) -> list[int]:
        return tokens[:-1] if tokens and tokens[-1] == self._end else tokens

    @torch.inference_mode()
    def _continued(self, prompts: Sequence[list[int]], most: int, temperature: float) -> list[Answer]:
        """Returns what follows each prompt, up to `end` included."""
        self._seen.clear()
        longest = max(map(len, prompts))
        device = self._model.device
        ids = torch.tensor([[self._end] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        known = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        drawing = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        made: Tensor = self._model.generate(
            input_ids=ids,
            attention_mask=known,
            max_new_tokens=most,
            do_sample=temperature > 0,
            eos_token_id=self._end,
            pad_token_id=self._end,
            **drawing,
        )
        answers = [self._ended(line) for line in made[:, longest:].tolist()]
        states = torch.stack(self._seen, dim=1)  # [prompts, steps, hidden_size]
        return [Answer(tokens, line[: len(tokens)].clone()) for tokens, line in zip(answers, states, strict=True)]

    def _ended(self, tokens: list[int]) -> list[int]:
        return tokens[: tokens.index(self._end) + 1] if self._end in tokens else tokens
