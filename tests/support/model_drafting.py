"""Random plans with drafts for a real model's backend; each stream is compared with the sequence's own, undrafted."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.drafting.drafter import Drafter
from runner_svc.drafting.ngram import NgramDrafter
from runner_svc.execution.runner import Runner
from runner_svc.gpu.backend import CudaBackend
from runner_svc.gpu.drafts.draft_options import DraftOptions
from tests.support.drafters import LyingDrafter, MixedDrafter, Prophet
from tests.support.drafting_driver import Drafting, DraftingDriver
from tests.support.host_drafts import HostDrafter
from tests.support.plans import SAMPLE, admission, ints, plan, sampling
from tests.support.tiny_models import NUM_TOKENS

_BEYOND = 20


def mixed_drafts(rng: random.Random, prophet: Prophet, max_drafts: int = 7) -> DraftOptions:
    """Returns a drafter that knows the texts, lies, or repeats what it found, row by row at random."""
    drafters: list[Drafter] = [prophet, prophet, NgramDrafter(), LyingDrafter(rng, NUM_TOKENS)]
    mixed = MixedDrafter(rng, drafters)
    return DraftOptions("mixed", max_drafts, lambda _, slots: HostDrafter(mixed, slots.tokens, slots.counters))


@dataclass
class ModelDrafting(Drafting):
    """One sequence with penalties; `alone` and its log-probabilities are those of the sequence without drafts."""

    penalties: dict[str, float] = field(default_factory=dict)
    alone: list[int] = field(default_factory=list)
    alone_logprobs: list[float] = field(default_factory=list)

    def check(self, vocab_size: int) -> None:
        assert self.tokens == self.alone, f"sequence {self.number}"
        if self.top is not None:
            np.testing.assert_allclose(self.logprobs, self.alone_logprobs[: len(self.tokens)], atol=1e-4)


class ModelDraftingDriver(DraftingDriver):
    """Drives a backend that drafts."""

    def __init__(
        self, backend: CudaBackend, plain: CudaBackend, prophet: Prophet, dice: random.Random, requests: int
    ) -> None:
        """`plain`: the same model without drafts."""
        super().__init__(backend, dice, 0, depth=3)  # type: ignore[arg-type]
        self.requests = [_random_request(dice, number) for number in range(requests)]
        for request in self.requests:
            tokens, request.alone_logprobs = self._alone(plain, request)
            end = tokens.index(IM_END_ID) + 1 if IM_END_ID in tokens else len(tokens)
            request.alone = tokens[: min(end, request.max_tokens)]
            prophet.texts.append(request.prompt + tokens)

    def _alone(self, plain: CudaBackend, request: Drafting) -> tuple[list[int], list[float]]:
        """Returns the tokens and those that plans in flight may sample behind the end."""
        runner = Runner(plain)
        runner.reset()
        tokens: list[int] = []
        logprobs: list[float] = []
        blocks = list(range(1, -(-plain.model.context_length // plain.block_size) + 1))
        begin = admission(0, request.prompt, blocks, **self._parameters(request))
        extent, number = (0, 0, len(request.prompt), SAMPLE), 1
        while len(tokens) < request.max_tokens + _BEYOND:
            result = runner.execute(number, plan(admissions=[begin] if number == 1 else [], extents=[extent]))
            values = [np.frombuffer(entry.values, "<f4").tolist() for entry in result.logprobs]
            tokens += ints(result.tokens)
            logprobs += values[0] if values else []
            extent, number = (0, len(request.prompt) + len(tokens) - 1, 1, SAMPLE), number + 1
        return tokens, logprobs

    def _parameters(self, request: Drafting) -> dict[str, Any]:
        assert isinstance(request, ModelDrafting)
        asked = {} if request.top is None else {"logprobs": request.top}
        values = {"temperature": request.temperature, "min_tokens": request.min_tokens, "stop_ids": [IM_END_ID]}
        return {
            "prompt_len": len(request.prompt),
            "seed": request.seed,
            "sample_index": request.sample_index,
            "sampling": sampling(**values, **request.penalties, **asked),
        }

    def _admission(self, request: Drafting) -> plan_pb2.Admission:
        made = super()._admission(request)
        made.sampling.CopyFrom(self._parameters(request)["sampling"])
        return made


def _random_request(dice: random.Random, number: int) -> ModelDrafting:
    return ModelDrafting(
        number=number,
        prompt=[dice.randrange(NUM_TOKENS) for _ in range(dice.randint(1, 20))],
        max_tokens=dice.randint(1, 24),
        temperature=dice.choice([0.0, 1.0]),
        seed=dice.getrandbits(64),
        sample_index=dice.randrange(3),
        min_tokens=dice.choice([0, 0, 15]),
        top=dice.choice([None, None, 0, 2]),
        penalties=dice.choice([{}, {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": 0.3}]),
    )
