"""Compares greedy output with transformers' generate: equal, or a near tie of the two top logits, counted."""

from __future__ import annotations

from typing import Any

import torch

# A first difference passes only where transformers' two top logits lie closer than this (they spread over about 10),
NEAR_TIE = 1e-3
# and only so often in one test.
MAX_NEAR_TIES = 1


def expected_tokens(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    with torch.inference_mode():
        model(torch.tensor([prompt[:1]]))  # dynamic RoPE keeps the frequencies of the longest call until a short one
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


def top_gap(model: Any, tokens: list[int]) -> float:
    """Distance of the two top logits after `tokens`."""
    with torch.inference_mode():
        best = model(torch.tensor([tokens])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


def count_near_ties(model: Any, prompts: list[list[int]], actual: list[list[int]], max_tokens: int) -> int:
    """Sequences whose first difference from transformers is a near tie; fails on any other difference."""
    near_ties = 0
    for prompt, tokens in zip(prompts, actual, strict=True):
        expected = expected_tokens(model, prompt, max_tokens)
        if tokens == expected:
            continue
        same = next(i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b)
        gap = top_gap(model, prompt + expected[:same])
        assert gap < NEAR_TIE, f"token {same} after {len(prompt)}: {tokens[same]}, expected {expected[same]}, gap {gap}"
        near_ties += 1
    return near_ties
