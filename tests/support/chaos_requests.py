"""Requests of a mixed load, each generated from its number and a seed, with their expected answers.

`RequestSpec.check` compares an answer exactly: tokens, text, log-probabilities, the prompt's log-probabilities and the
finish.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from roster_client.client.events import Choice, Completion, FinishReason, TokenLogprobs, token_logprobs
from roster_client.client.requests import Options
from roster_protos import inference_pb2 as pb
from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID, NUM_TOKENS, byte_model
from runner_svc.backends.hash_backend import expected_tokens
from runner_svc.backends.hash_tokens import expected_logprobs, only_logprobs
from scheduler_svc.constrained.process.compiler import GrammarCompiler, grammar_text
from tests.support.constraints import CONSTRAINTS

EOS_PROBABILITY = 1 / 64
MAX_TOKENS = 60
EVERYWHERE = 0
"""First token of each prompt, and part of the scheduler's probe: a runner that crashes on it fails every plan."""
STEM = [7, 3, 1, 4] * 8
CONTEXTS = [random.Random(number).choices(range(1, 256), k=96) for number in range(6)]
"""Starts of prompts that come back, more than a small runner's cache holds."""
LONG = 200
"""Tokens with which the prompts of large requests begin; they fit only large runners."""
MODEL: plan_pb2.Model = byte_model("hash", "HashModel", NUM_TOKENS, 2048)
SCHEMAS = [*CONSTRAINTS, ("regex", "([a-d]{3}-){4,14}[0-9]{2,6}"), ("json_schema", '{"type": "integer"}')]
_COMPILER = GrammarCompiler(MODEL)


def text_of(tokens: Sequence[int]) -> str:
    """Returns the byte tokenizer's text of tokens."""
    return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


def follower(kind: str, text: str) -> Callable[[list[int]], list[int]]:
    """Like `allowed_after`, but for one sequence whose tokens grow from call to call, which is much faster."""
    matcher, told = _COMPILER.compile(grammar_text(kind, text)), 0

    def allowed(generated: list[int]) -> list[int]:
        nonlocal told
        assert matcher.consume_tokens(generated[told:]), matcher.get_error()
        told = len(generated)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()

    return allowed


def scored(tokens: Sequence[int], position: int, top: int) -> list[TokenLogprobs]:
    """Returns the log-probabilities of tokens from a position on, as a client receives them."""
    values = [expected_logprobs(token, position + index, top, NUM_TOKENS) for index, token in enumerate(tokens)]
    return _received(values, top)


def _only(token: int, top: int) -> TokenLogprobs:
    """Returns those of a token that is the only one that its mask allows."""
    (received,) = _received([only_logprobs(token, top)], top)
    return received


def _received(values: Sequence[tuple[float, list[int], list[float]]], top: int) -> list[TokenLogprobs]:
    message = pb.Logprobs(top=top)
    for value, ids, tops in values:
        message.sampled.append(value)
        message.top_token_ids.extend(ids)
        message.top_logprobs.extend(tops)
    return list(token_logprobs(message))


@dataclass(frozen=True, slots=True)
class ToldPrompt:
    """A connection's prompt information, with the tokens of each choice that the client had by then."""

    info: pb.PromptInfo
    received: list[int]


@dataclass(frozen=True)
class RequestSpec:
    """One request of the load, generated from its number."""

    number: int
    prompt: list[int]
    max_tokens: int
    n: int
    seed: int
    temperature: float
    logprobs: int | None
    prompt_logprobs: int | None
    constraint: tuple[str, str] | None
    """Kind and text of the constraint."""
    stop: str | None
    in_session: bool
    cancel_after: int | None
    """Tokens after which the request is cancelled; None: never."""
    cancel_by_id: bool
    """Whether to cancel with a separate call while the stream stays open; otherwise the client closes the stream."""
    speculate: bool
    """Whether runners may draft its tokens."""

    @classmethod
    def of(cls, number: int, seed: int, large: float = 0.0) -> RequestSpec:
        """Returns the request of this number. `large`: fraction of requests with prompts of more than `LONG` tokens."""
        rng = random.Random(f"{seed}-{number}")
        kind = rng.random()
        stem = STEM if kind < 0.2 else rng.choice(CONTEXTS) if kind < 0.6 else []
        spec = cls(
            number=number,
            prompt=[EVERYWHERE, *stem, *(rng.randrange(256) for _ in range(rng.randrange(1, 24)))],
            max_tokens=rng.randrange(1, MAX_TOKENS),
            n=rng.choice([1, 1, 1, 1, 2]),
            seed=rng.randrange(1 << 60),
            temperature=rng.choice([0.0, 1.0]),
            logprobs=rng.randrange(3) if rng.random() < 0.2 else None,
            prompt_logprobs=rng.randrange(3) if rng.random() < 0.1 else None,
            constraint=rng.choice(SCHEMAS) if rng.random() < 0.15 else None,
            stop=None,
            in_session=rng.random() < 0.5,
            cancel_after=rng.randrange(1, 20) if rng.random() < 0.1 else None,
            cancel_by_id=rng.random() < 0.5,
            speculate=rng.random() < 0.9,
        )
        if rng.random() < large:
            spec = replace(spec, prompt=[*spec.prompt, *(rng.randrange(256) for _ in range(LONG))])
        if rng.random() < 0.1 and spec.n == 1 and len(text := text_of(spec.expected[0])) > 12:
            begin = rng.randrange(4, len(text) - 4)
            return replace(spec, stop=text[begin : begin + 4])
        return spec

    @cached_property
    def expected(self) -> list[list[int]]:
        """Each choice's tokens before a stop string cuts them."""
        return [
            expected_tokens(
                self.prompt,
                self.max_tokens,
                temperature=self.temperature,
                seed=self.seed,
                sample_index=index,
                stop_ids=[IM_END_ID],
                eos_probability=EOS_PROBABILITY,
                allowed=follower(*self.constraint) if self.constraint is not None else None,
            )
            for index in range(self.n)
        ]

    @property
    def is_large(self) -> bool:
        """Whether only large runners can hold it."""
        return len(self.prompt) > LONG

    @property
    def options(self) -> Options:
        """Options with which the client sends it."""
        options: Options = {
            "request_id": f"chaos-{self.number}", "max_tokens": self.max_tokens, "n": self.n, "seed": self.seed,
            "temperature": self.temperature,
        }  # fmt: skip
        if self.logprobs is not None:
            options["logprobs"] = self.logprobs
        if self.prompt_logprobs is not None:
            options["prompt_logprobs"] = self.prompt_logprobs
        if not self.speculate:
            options["speculate"] = False
        if self.stop is not None:
            options["stop"] = [self.stop]
        if self.constraint is not None:
            kind, text = self.constraint
            options[kind] = text  # type: ignore[literal-required]
        return options

    def check(self, completion: Completion, prompts: Sequence[ToldPrompt]) -> None:
        """Checks that a complete answer equals that of the request alone, and that a partial one is a prefix of it.

        An answer is partial if it was cancelled or cut by the service's shutdown. `prompts`: each connection's prompt
        information.
        """
        assert len(completion.choices) == self.n, f"{self}: {completion}"
        finishes = [choice.finish for choice in completion.choices]
        if not any(finish and finish.reason is FinishReason.UNAVAILABLE for finish in finishes):
            self._check_prompt(completion, prompts)
        usage = completion.usage
        assert usage is None or usage.accepted_tokens <= usage.drafted_tokens * self.speculate, f"{self}: {usage}"
        for expected, choice in zip(self.expected, completion.choices, strict=True):
            told = f"{self}, expected {expected}: {choice}"
            assert choice.token_ids == expected[: len(choice.token_ids)], told
            wanted = [] if self.logprobs is None else scored(choice.token_ids, len(self.prompt), self.logprobs)
            if wanted and self.constraint is not None:
                known = zip(choice.logprobs, choice.token_ids, wanted, strict=True)
                wanted = [got if got == _only(token, self.logprobs or 0) else want for got, token, want in known]
            assert choice.logprobs == wanted, told
            self._check_end(choice, expected, told)

    def _check_prompt(self, completion: Completion, prompts: Sequence[ToldPrompt]) -> None:
        """Checks that the prompt's log-probabilities are complete in the answer and from each connection.

        A connection that adds no tokens may send none.
        """
        wanted = [] if self.prompt_logprobs is None else scored(self.prompt[1:], 1, self.prompt_logprobs)
        assert completion.started is not None and not completion.started.prompt_token_ids
        assert list(completion.started.prompt_logprobs) == wanted, f"{self}: {completion.started}"
        assert bool(prompts) == (self.prompt_logprobs is not None), f"{self}: {prompts}"
        received = [len(choice.token_ids) for choice in completion.choices]
        for told in prompts:
            # If the client lacks only the end, the prompt is not recomputed for its log-probabilities.
            nothing_left = self.n == 1 and told.received == received and not told.info.logprobs.sampled
            assert nothing_left or list(token_logprobs(told.info.logprobs)) == wanted, f"{self}: {told}"

    def _check_end(self, choice: Choice, expected: list[int], told: str) -> None:
        assert choice.finish is not None, told
        if choice.finish.reason is FinishReason.CANCELLED:
            assert self.cancel_after is not None, told
        elif choice.finish.reason is FinishReason.UNAVAILABLE:
            assert choice.finish.message == "the service shut down", told
        elif self.stop is not None and choice.finish.stop_string is not None:
            text = text_of(expected)
            assert choice.text == text[: text.index(self.stop)], told
        else:
            assert choice.token_ids == expected, told
            assert choice.text == text_of(expected), told
            assert choice.finish.reason in (FinishReason.STOP, FinishReason.LENGTH), told
