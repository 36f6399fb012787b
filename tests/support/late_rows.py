"""Rows of the CUDA backend whose sequences leave before their masks arrive, on the kernels or on their references."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from roster_protos import plan_pb2
from runner_svc.execution.runner import Runner
from runner_svc.gpu.backend import CudaBackend
from tests.support.plans import AWAIT, SAMPLE, admission, ints, masks, plan, sampling
from tests.support.tiny_models import NUM_TOKENS

LENGTH = 10
"""Length of the newcomers' prompts; all but the first token are computed once the masks have arrived."""
PENALTIES = {"repetition_penalty": 1.6, "presence_penalty": 0.8, "frequency_penalty": 0.5}


class LateRows:
    """A sequence in each slot awaits its mask; all leave, and others take the slots."""

    def __init__(self, backend: CudaBackend, rng: random.Random, settle: Callable[[], None]) -> None:
        """`settle` waits for all launched work. Each sequence gets four blocks."""
        self.slots = range(backend.num_slots)
        self.runner = Runner(backend)
        self._slots = backend._slots
        self._settle = settle
        self.leaving = [[rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, LENGTH - 2))] for _ in self.slots]
        self.coming = [[rng.randrange(NUM_TOKENS) for _ in range(LENGTH)] for _ in self.slots]
        self.drawn = [
            rng.choice([token for token in range(NUM_TOKENS) if token != prompt[len(before)]])
            for before, prompt in zip(self.leaving, self.coming, strict=True)
        ]
        """The only token that each mask allows; it differs from the newcomer's prompt token at that position."""

    def undisturbed(self) -> NDArray[np.float32]:
        """Returns the newcomers' log-probabilities [slots, NUM_TOKENS] without earlier sequences in the slots."""
        self.runner.reset()
        self._settle_in(1, releases=[])
        return self._distributions(2)

    def disturbed(self) -> NDArray[np.float32]:
        """Returns the same when the earlier sequences' masks arrive after the newcomers' first token is computed."""
        self.runner.reset()
        held = self.runner.launch(1, self._opening())
        self._settle_in(2, releases=self.slots)
        self._settle()
        held.mask(masks(NUM_TOKENS, {slot: [token] for slot, token in enumerate(self.drawn)}))
        assert ints(held.wait().tokens) == self.drawn, "sequences that continue elsewhere need these tokens"
        return self._distributions(3)

    def foreign_tokens(self) -> int:
        """Returns the number of positions at which the newcomers' prompts differ on the device."""
        self._settle()
        return int((self._slots.tokens[:-1, :LENGTH].cpu().numpy() != self.coming).sum())

    def penalised(self, leaves: bool) -> NDArray[np.float32]:
        """Returns log-probabilities [slots, NUM_TOKENS] of rows with penalties, all ids allowed, which left or not."""
        self.runner.reset()
        held = self.runner.launch(1, self._opening(logprobs=NUM_TOKENS, **PENALTIES))
        if leaves:
            self._settle_in(2, releases=self.slots)
        held.mask(masks(NUM_TOKENS, {slot: range(NUM_TOKENS) for slot in self.slots}))
        return distributions(held.wait())

    def _opening(self, **asked: float) -> plan_pb2.Plan:
        return plan(
            admissions=[self._admission(slot, prompt, 0, **asked) for slot, prompt in enumerate(self.leaving)],
            extents=[(slot, 0, len(prompt), AWAIT) for slot, prompt in enumerate(self.leaving)],
        )

    def _settle_in(self, number: int, releases: Sequence[int]) -> None:
        self.runner.execute(
            number,
            plan(
                releases=releases,
                admissions=[
                    self._admission(slot, prompt, 2, logprobs=NUM_TOKENS) for slot, prompt in enumerate(self.coming)
                ],
                extents=[(slot, 0, 1, 0) for slot in self.slots],
            ),
        )

    def _distributions(self, number: int) -> NDArray[np.float32]:
        return distributions(
            self.runner.execute(number, plan(extents=[(slot, 1, LENGTH - 1, SAMPLE) for slot in self.slots]))
        )

    def _admission(self, slot: int, prompt: list[int], first_block: int, **asked: float) -> plan_pb2.Admission:
        blocks = [1 + 4 * slot + first_block + index for index in range(2)]
        return admission(slot, prompt, blocks, sampling=sampling(**asked))


def distributions(result: plan_pb2.Result) -> NDArray[np.float32]:
    """Returns the log-probabilities [L, NUM_TOKENS] of rows that requested all of them."""
    values = np.empty((len(result.logprobs), NUM_TOKENS), np.float32)
    for entry in result.logprobs:
        values[entry.row, np.frombuffer(entry.top_ids, "<i4")] = np.frombuffer(entry.top_values, "<f4")
    return values


def differences(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns each row's error as a fraction of its standard deviation [L]."""
    shares: NDArray[np.float32] = np.sqrt(np.square(actual - expected).mean(axis=1)) / expected.std(axis=1)
    return shares
