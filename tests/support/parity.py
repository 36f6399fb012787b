"""Compares greedy output with transformers' in float32: equal tokens, or near ties of its logits, counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Precision:
    """A backend's arithmetic, and how close two logits must be for it to choose the second largest.

    A token that differs from transformers' passes only if its logit is within `gap` of the largest (in standard
    deviations of that position's logits if `relative`). Only `few` positions, plus `rate` of all positions, may differ.

    Float32: sums in another order differ by 1e-5, for logits that spread over about 10. The errors of 16-bit arithmetic
    were measured with transformers' own 16-bit models on a CPU, with the LM head in float32 as ours is, on random texts
    (11,520 positions of each family of tiny models, 930 of SmolLM2). They are in standard deviations of a position's
    logits:

    | | a logit's error: root mean square | largest | positions where tokens differ | largest gap there |
    | --- | --- | --- | --- | --- |
    | tiny models, float16 | 0.002 to 0.003 | 0.039 | 0.03 to 0.5% of a family's | 0.0175, of 173,000 positions |
    | SmolLM2, bfloat16 | 0.05 | 0.7 | 2 to 5% | 0.06 |

    Kernels round at other points, which for YaRN in bfloat16 has cost 1.6 times as much. The limits are therefore about
    twice the largest value, and four times the share of positions. For SmolLM2, 0.1 is a quarter of a nat, as in
    `bench.answers.greedy_parity`. A wrong position, block or weight is still found: it changes logits by their standard
    deviation, and a token that is within the gap by chance is followed by others, each compared in the text so
    produced.
    """

    dtype: torch.dtype
    gap: float
    error: float
    """Largest error of a logit, in the unit of `gap`."""
    relative: bool
    few: int
    rate: float

    def allowed_gap(self, logits: Tensor) -> float:
        """Returns the gap allowed at a position with these logits [vocab_size]."""
        return self.gap * (float(logits.std()) if self.relative else 1.0)

    def allowed_error(self, logprobs: Tensor) -> float:
        """Returns the error allowed for log-probabilities [places, vocab_size]."""
        return self.error * (float(logprobs.std(dim=-1).min()) if self.relative else 1.0)

    def allowed_ties(self, places: int) -> int:
        """Returns the number of near ties allowed among `places` positions in one test."""
        return self.few + int(self.rate * places)


FLOAT32 = Precision(torch.float32, 1e-3, 1e-4, relative=False, few=1, rate=0.0)
# Of two runs of a deterministic backend.
EXACT = Precision(torch.float32, 0.0, 0.0, relative=False, few=0, rate=0.0)
FLOAT16 = Precision(torch.float16, 0.04, 0.08, relative=True, few=3, rate=0.02)
BFLOAT16 = Precision(torch.bfloat16, 0.1, 1.4, relative=True, few=4, rate=0.1)
# Activations that lie between two numbers of e4m3 may be rounded either way, by the last bit of a sum. The CPU's
# product with int4 weights is in bfloat16.
ROUNDED = Precision(torch.float32, 0.15, 0.3, relative=True, few=3, rate=0.1)


@dataclass
class Parity:
    """Compares streams of one model and counts near ties."""

    model: Any
    """transformers' model in float32, with the backend's weights."""
    precision: Precision
    places: int = 0
    ties: int = 0
    largest_gap: float = 0.0
    _expected: dict[str, list[list[int]]] = field(default_factory=dict)

    def check(self, prompts: Sequence[list[int]], streams: Sequence[list[int]], max_tokens: int) -> None:
        """Fails if a stream differs from `generate`'s output other than by near ties.

        After a near tie, the stream's own text is the context.

        `generate` takes the prompts as one batch, which costs hardly more than one prompt. A stream that differs from
        its row is compared by itself.
        """
        key = str((prompts, max_tokens))
        if key not in self._expected:  # the same requests may be served in several ways
            self._expected[key] = expected_tokens(self.model, prompts, max_tokens)
        expected = self._expected[key]
        for prompt, tokens, row in zip(prompts, streams, expected, strict=True):
            assert len(tokens) == max_tokens
            if tokens == row:
                self.places += max_tokens
            else:
                self.check_forced(prompt, tokens)

    def check_forced(
        self, prompt: list[int], tokens: list[int], allowed: Callable[[list[int]], list[int]] | None = None
    ) -> None:
        """Fails if a token is not the likeliest of the allowed ones after those before it, near ties excepted."""
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
        """Checks at the end of a test that few tokens were near ties."""
        allowed = self.precision.allowed_ties(self.places)
        print(f"{self.ties} near ties at {self.places} places, {allowed} allowed, largest gap {self.largest_gap:.5f}")
        assert self.ties <= allowed


def _only(logits: Tensor, ids: list[int]) -> Tensor:
    kept = torch.full_like(logits, -torch.inf)
    kept[ids] = logits[ids]
    return kept


def expected_tokens(model: Any, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """Returns `generate`'s output tokens for each prompt."""
    if _depends_on_the_batch(model):
        return [row for prompt in prompts for row in _tokens(model, [prompt], max_tokens)]
    return _tokens(model, prompts, max_tokens)


def _depends_on_the_batch(model: Any) -> bool:
    """Whether results depend on the batch: such RoPE derives its frequencies from the batch's longest text."""
    parameters = str(getattr(model.config, "rope_parameters", None))
    return "dynamic" in parameters or "longrope" in parameters


def forced_logits(model: Any, prompt: list[int], tokens: list[int]) -> Tensor:
    """Returns the logits [len(tokens), vocab_size] at each token's position while `generate` must take `tokens`."""
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
    """Runs `generate` on prompts of any lengths, padded on the left."""
    width = max(map(len, prompts))
    with torch.inference_mode():
        # A short call resets dynamic RoPE, which keeps the frequencies of its longest call until then.
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
