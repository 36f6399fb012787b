"""Drives a runner in process with random plans that a scheduler could send, without a scheduler's order.

Sequences are admitted at random moments, prompts are cut into random chunks, steps contain random subsets of the
sequences, and block tables are scattered over a shuffled pool.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from roster_protos import plan_pb2
from runner_svc.execution.runner import Runner
from runner_svc.interface.backend import Backend

GREEDY = plan_pb2.Sampling(temperature=0.0, top_p=1.0, repetition_penalty=1.0)


@dataclass
class DrivenSequence:
    """A running sequence: its tokens (the prompt, then samples), the number of computed positions, its blocks."""

    slot: int
    prompt_len: int
    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    admitted: bool = False


class RandomDriver:
    """Generates greedily through `Runner`, in plans drawn from `rng`."""

    def __init__(self, backend: Backend, rng: random.Random, sampling: plan_pb2.Sampling = GREEDY) -> None:
        """`sampling`: of all sequences, if not greedily; each gets a seed of its own."""
        self._runner = Runner(backend)
        self._runner.reset()
        self._block_size = backend.block_size
        self._max_step_tokens = backend.max_step_tokens
        self._rng = rng
        self._free = list(range(1, backend.num_blocks + 1))
        rng.shuffle(self._free)
        self._number = 0
        self._sampling = sampling
        self.logprobs: dict[int, list[bytes]] = {}
        """Of each slot, what was asked for, row after row."""

    def generate(self, prompts: list[list[int]], max_tokens: int, max_chunk: int) -> list[list[int]]:
        """Returns the `max_tokens` greedy tokens after each prompt; no chunk is longer than `max_chunk`."""
        sequences = [DrivenSequence(slot, len(prompt), list(prompt)) for slot, prompt in enumerate(prompts)]
        while unfinished := [s for s in sequences if len(s.tokens) < s.prompt_len + max_tokens]:
            self._step(self._rng.sample(unfinished, self._rng.randint(1, len(unfinished))), max_chunk)
        return [sequence.tokens[sequence.prompt_len :] for sequence in sequences]

    def _step(self, sequences: list[DrivenSequence], max_chunk: int) -> None:
        admissions, appends, extents = [], [], []
        budget = self._max_step_tokens
        for sequence in sequences:
            count = min(self._rng.randint(1, max_chunk), len(sequence.tokens) - sequence.computed, budget)
            if count == 0:
                continue
            budget -= count
            needed = -(-(sequence.computed + count) // self._block_size)
            grown = [self._free.pop() for _ in range(needed - len(sequence.blocks))]
            if sequence.admitted:
                first = len(sequence.blocks)
                appends += [(sequence.slot, first + offset, block) for offset, block in enumerate(grown)]
            else:
                admissions.append(_admission(sequence, grown, self._sampling))
                sequence.admitted = True
            sequence.blocks += grown
            samples = sequence.computed + count == len(sequence.tokens)
            extents.append((sequence.slot, sequence.computed, count, samples))
            sequence.computed += count
        result = self._execute(admissions, appends, extents)
        tokens = iter(np.frombuffer(result.tokens, np.int32).tolist())
        by_slot = {sequence.slot: sequence for sequence in sequences}
        for (slot, *_), sampled in zip(extents, result.token_counts, strict=True):
            by_slot[slot].tokens += [next(tokens) for _ in range(sampled)]
        for scored in result.logprobs:
            row = scored.values + scored.top_ids + scored.top_values
            self.logprobs.setdefault(extents[scored.row][0], []).append(row)

    def _execute(
        self,
        admissions: list[plan_pb2.Admission],
        appends: list[tuple[int, int, int]],
        extents: list[tuple[int, int, int, bool]],
    ) -> plan_pb2.Result:
        self._number += 1
        append_columns = np.array(appends, np.int32).reshape(-1, 3).T
        extent_columns = np.array(extents, np.int32).T
        return self._runner.execute(
            self._number,
            plan_pb2.Plan(
                admissions=admissions,
                append_slots=append_columns[0].tobytes(),
                append_indexes=append_columns[1].tobytes(),
                append_blocks=append_columns[2].tobytes(),
                extent_slots=extent_columns[0].tobytes(),
                extent_starts=extent_columns[1].tobytes(),
                extent_counts=extent_columns[2].tobytes(),
                extent_flags=extent_columns[3].astype(np.uint8).tobytes(),
            ),
        )


def _admission(sequence: DrivenSequence, blocks: list[int], sampling: plan_pb2.Sampling) -> plan_pb2.Admission:
    return plan_pb2.Admission(
        slot=sequence.slot,
        sequence_id=sequence.slot + 1,
        tokens=np.array(sequence.tokens, np.int32).tobytes(),
        prompt_len=sequence.prompt_len,
        sampling=sampling,
        seed=sum(sequence.tokens[: sequence.prompt_len]),
        blocks=np.array(blocks, np.int32).tobytes(),
    )
