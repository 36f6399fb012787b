"""Answers as the bodies of OpenAI's chat completions and completions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

from roster_client.batch.bodies import Asked
from roster_client.batch.input_file import CHAT
from roster_client.batch.records import Record
from roster_client.batch.token_texts import TokenTexts
from roster_client.client.events import Choice, Completion, FinishReason, TokenLogprobs

EXCLUDED = -9999.0
"""Log-probability of a token that a constraint excludes, for JSON, which has no infinity."""

REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
"""Ends of whole answers; OpenAI's names."""

Texts = Mapping[int, str]


async def answer_body(
    url: str, model: str, asked: Asked, completions: Sequence[Completion], texts: TokenTexts
) -> Record:
    """Returns the body that answers a request; `completions`: an answer to each of its prompts."""
    choices = list(chain.from_iterable(completion.choices for completion in completions))
    known = await texts.of(_tokens(choices)) if asked.logprobs is not None else {}
    form = _chat_choice if url == CHAT else _completion_choice
    kind, prefix = ("chat.completion", "chatcmpl-") if url == CHAT else ("text_completion", "cmpl-")
    return {
        "id": prefix + completions[0].request_id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [form(index, choice, asked.logprobs, known) for index, choice in enumerate(choices)],
        "usage": _usage(completions),
    }


def _usage(completions: Sequence[Completion]) -> Record:
    usages = [completion.usage for completion in completions if completion.usage is not None]
    prompt = sum(usage.prompt_tokens for usage in usages)
    output = sum(usage.completion_tokens for usage in usages)
    record: Record = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }
    if drafted := sum(usage.drafted_tokens for usage in usages):  # names of Roster: OpenAI's mean a given prediction
        record["drafted_tokens"] = drafted
        record["accepted_tokens"] = sum(usage.accepted_tokens for usage in usages)
    return record


def _chat_choice(index: int, choice: Choice, logprobs: int | None, texts: Texts) -> Record:
    scores: Record | None = None
    if logprobs is not None:
        content = [
            {**_scored(token, entry.sampled, texts), "top_logprobs": [_scored(*one, texts) for one in entry.top]}
            for token, entry in _shown(choice)
        ]
        scores = {"content": content, "refusal": None}
    return {
        "index": index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": scores,
        "finish_reason": _reason(choice),
    }


def _scored(token: int, logprob: float, texts: Texts) -> Record:
    text = texts[token]
    data = list(text.encode()) if "\ufffd" not in text else None  # the token is a part of a character
    return {"token": text, "logprob": _finite(logprob), "bytes": data}


def _completion_choice(index: int, choice: Choice, logprobs: int | None, texts: Texts) -> Record:
    scores: Record | None = None
    if logprobs is not None:
        shown = _shown(choice)
        tokens = [texts[token] for token, _ in shown]
        scores = {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.sampled) for _, entry in shown],
            "top_logprobs": [_by_text(entry, texts) for _, entry in shown] if logprobs else None,
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0)) if tokens else [],
        }
    return {"index": index, "text": choice.text, "logprobs": scores, "finish_reason": _reason(choice)}


def _by_text(entry: TokenLogprobs, texts: Texts) -> dict[str, float]:
    """Returns the alternatives by text, the likeliest of equal ones."""
    return {texts[token]: _finite(logprob) for token, logprob in reversed(entry.top)}


def _shown(choice: Choice) -> list[tuple[int, TokenLogprobs]]:
    """Returns the tokens of the text with their log-probabilities, that is, without the one that ended it."""
    pairs = list(zip(choice.token_ids, choice.logprobs, strict=True))
    ended = choice.finish is not None and choice.finish.stop_token_id is not None
    return pairs[:-1] if ended else pairs


def _tokens(choices: Sequence[Choice]) -> set[int]:
    shown = [pair for choice in choices for pair in _shown(choice)]
    return {token for token, _ in shown} | {token for _, entry in shown for token, _ in entry.top}


def _finite(logprob: float) -> float:
    return max(logprob, EXCLUDED)


def _reason(choice: Choice) -> Any:
    return REASONS[choice.finish.reason] if choice.finish is not None else None
