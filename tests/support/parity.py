"""Compares greedy output with transformers' in float32: equal, or near ties of its logits, counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Precision:
    """What a backend computes in, and how near to each other logits must be for it to take the second one.

    A token that is not transformers' passes only where its logit lies closer to the largest than `gap`, in standard
    deviations of that place's logits where `relative`; and only `few` such places may be, and `rate` of all places.

    Float32: sums in another order err by 1e-5 of logits that spread over about 10. What 16 bits do was found out with
    transformers' own 16-bit models on a CPU, their LM head in float32 as ours is, on random texts (11,520 places of
    each family of tiny models, 930 of SmolLM2), in standard deviations of a place's logits:

    | | a logit's error: root of its mean square | largest | places where tokens differ | largest gap there |
    | --- | --- | --- | --- | --- |
    | tiny models, float16 | 0.002 to 0.003 | 0.039 | 0.03 to 0.5% of a family's | 0.0175, of 173,000 places |
    | SmolLM2, bfloat16 | 0.05 | 0.7 | 2 to 5% | 0.06 |

    Kernels round at other places, which for YaRN in bfloat16 has cost 1.6 times as much: hence about twice the largest,
    and four times the share of places. For SmolLM2 0.1 is a quarter of a nat, as in `bench.answers.greedy_parity`. A
    wrong position, block or weight is found all the same: logits then change by their standard deviation, and a token
    that is within the gap by chance is followed by others, each of which is compared, in the text that it made.
    """

    dtype: torch.dtype
    gap: float
    error: float
    """Of a logit, at most, in what `gap` is in."""
    relative: bool
    few: int
    rate: float

    def allowed_gap(self, logits: Tensor) -> float:
        """At a place with these logits [vocab_size]."""
        return self.gap * (float(logits.std()) if self.relative else 1.0)

    def allowed_error(self, logprobs: Tensor) -> float:
        """Of a log-probability, at places with these [places, vocab_size]."""
        return self.error * (float(logprobs.std(dim=-1).min()) if self.relative else 1.0)

    def allowed_ties(self, places: int) -> int:
        """Of so many places, in one test."""
        return self.few + int(self.rate * places)


FLOAT32 = Precision(torch.float32, 1e-3, 1e-4, relative=False, few=1, rate=0.0)
FLOAT16 = Precision(torch.float16, 0.04, 0.08, relative=True, few=3, rate=0.02)
BFLOAT16 = Precision(torch.bfloat16, 0.1, 1.4, relative=True, few=4, rate=0.1)


@dataclass
class Parity:
    """Compares streams of one model, and counts."""

    model: Any
    """transformers' in float32, with the weights that the backend has."""
    precision: Precision
    places: int = 0
    ties: int = 0
    largest_gap: float = 0.0

    def check(self, prompts: Sequence[list[int]], streams: Sequence[list[int]], max_tokens: int) -> None:
        """Fails where a stream is not what `generate` gives, but for near ties, behind which its own text counts.

        `generate` takes the prompts as one batch, which costs hardly more than one; a stream that differs from its row
        is compared by itself.
        """
        expected = expected_tokens(self.model, prompts, max_tokens)
        for prompt, tokens, row in zip(prompts, streams, expected, strict=True):
            assert len(tokens) == max_tokens
            if tokens == row:
                self.places += max_tokens
            else:
                self.check_forced(prompt, tokens)

    def check_forced(
        self, prompt: list[int], tokens: list[int], allowed: Callable[[list[int]], list[int]] | None = None
    ) -> None:
        """Fails where a token is not the likeliest after those before it, of those that are allowed there."""
        self.places += len(tokens)
        for place, (token, row) in enumerate(zip(tokens, forced_logits(self.model, prompt, tokens), strict=True)):
            bound = self.precision.allowed_gap(row)
            if allowed is not None:
                row = _only(row, allowed(tokens[:place]))
            if token == (best := int(row.argmax())):
                continue
            gap = float(row[best] - row[token])
            print(f"token {place} after {len(prompt)} is {token}, not {best}: gap {gap:.5f}, allowed {bound:.5f}")
            assert gap < bound
            self.ties += 1
            self.largest_gap = max(self.largest_gap, gap)

    def assert_few_ties(self) -> None:
        """At the end."""
        allowed = self.precision.allowed_ties(self.places)
        print(f"{self.ties} near ties at {self.places} places, {allowed} allowed, largest gap {self.largest_gap:.5f}")
        assert self.ties <= allowed


def _only(logits: Tensor, ids: list[int]) -> Tensor:
    kept = torch.full_like(logits, -torch.inf)
    kept[ids] = logits[ids]
    return kept


def expected_tokens(model: Any, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """What `generate` gives for each prompt."""
    if _depends_on_the_batch(model):
        return [row for prompt in prompts for row in _tokens(model, [prompt], max_tokens)]
    return _tokens(model, prompts, max_tokens)


def _depends_on_the_batch(model: Any) -> bool:
    """Dynamic RoPE takes its frequencies from the longest text of a batch."""
    return "dynamic" in str(model.config.rope_parameters)


def forced_logits(model: Any, prompt: list[int], tokens: list[int]) -> Tensor:
    """Logits [len(tokens), vocab_size] of the places of tokens that `generate` is made to take."""
    made = _generate(
        model,
        [prompt],
        len(tokens),
        output_logits=True,
        prefix_allowed_tokens_fn=lambda _, before: [tokens[len(before) - len(prompt)]],
    )
    return torch.cat(made.logits)


def _tokens(model: Any, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    return _generate(model, prompts, max_tokens).sequences[:, -max_tokens:].tolist()


def _generate(model: Any, prompts: Sequence[list[int]], max_tokens: int, **options: Any) -> Any:
    """For prompts of any lengths, padded on the left."""
    width = max(map(len, prompts))
    with torch.inference_mode():
        # Dynamic RoPE keeps the frequencies of the longest call until a short one.
        model(torch.tensor([prompts[0][:1]]))
        return model.generate(
            torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]),
            attention_mask=torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            **options,
        )
