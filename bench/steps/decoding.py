"""Drives a decoding runner as a scheduler would."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bench.steps.backend import BLOCK_SIZE
from bench.steps.times import MAX_STEP_TOKENS, PROMPT
from roster_protos import plan_pb2
from runner_svc.execution.runner import LaunchedPlan, Runner

_DEPTH = 2


class Decoding:
    """Drives a runner like a scheduler whose sequences all began together."""

    def __init__(self, runner: Runner, batch: int, vocab_size: int) -> None:
        self._runner = runner
        self._batch = batch
        self._vocab_size = vocab_size
        self.number = 0  # number of the last plan
        self._table = 0
        self._slots = np.arange(batch, dtype=np.int32)

    def prefill(self) -> float:
        """Admits and computes all prompts, several per step. Returns the seconds."""
        runner = self._runner
        runner.reset()
        per_step = min(self._batch, MAX_STEP_TOKENS // PROMPT)
        rng = np.random.default_rng(0)
        self._table = PROMPT // BLOCK_SIZE
        begin = time.perf_counter()
        pending: deque[LaunchedPlan] = deque()
        for first in range(0, self._batch, per_step):
            slots = self._slots[first : first + per_step]
            tokens = rng.integers(0, self._vocab_size, (len(slots), PROMPT), dtype=np.int32)
            admissions = [
                plan_pb2.Admission(
                    slot=slot,
                    sequence_id=slot + 1,
                    tokens=row.tobytes(),
                    prompt_len=PROMPT,
                    sampling=plan_pb2.Sampling(temperature=0.0, top_p=1.0, repetition_penalty=1.0),
                    blocks=self._blocks(slot, 0, self._table).tobytes(),
                )
                for slot, row in zip(slots.tolist(), tokens, strict=True)
            ]
            pending.append(self._launch(slots, np.zeros_like(slots), np.full_like(slots, PROMPT), admissions))
            if len(pending) == _DEPTH:
                pending.popleft().wait()
        for launched in pending:
            launched.wait()
        return time.perf_counter() - begin

    def decode(self, steps: int) -> Iterator[plan_pb2.Result]:
        """Yields the results of decode steps, with one plan always ahead."""
        pending: deque[LaunchedPlan] = deque()
        for step in range(steps):
            start = np.full_like(self._slots, PROMPT + step)
            pending.append(self._launch(self._slots, start, np.ones_like(start), []))
            if len(pending) == _DEPTH:
                yield pending.popleft().wait()
        for launched in pending:
            yield launched.wait()

    def _launch(
        self,
        slots: NDArray[np.int32],
        starts: NDArray[np.int32],
        counts: NDArray[np.int32],
        admissions: Sequence[plan_pb2.Admission],
    ) -> LaunchedPlan:
        self.number += 1
        appended = np.empty(0, np.int32)
        if int((starts + counts)[0]) > self._table * BLOCK_SIZE:
            appended = slots
            self._table += 1
        plan = plan_pb2.Plan(
            admissions=admissions,
            append_slots=appended.tobytes(),
            append_indexes=np.full_like(appended, self._table - 1).tobytes(),
            append_blocks=(1 + appended + (self._table - 1) * self._batch).astype(np.int32).tobytes(),
            extent_slots=slots.tobytes(),
            extent_starts=starts.tobytes(),
            extent_counts=counts.tobytes(),
            extent_flags=np.ones(len(slots), np.uint8).tobytes(),
        )
        return self._runner.launch(self.number, plan)

    def _blocks(self, slot: int, first: int, count: int) -> NDArray[np.int32]:
        """Returns blocks of a sequence; neighbours lie far apart, as in a pool that has been in use."""
        return (1 + slot + np.arange(first, first + count) * self._batch).astype(np.int32)
