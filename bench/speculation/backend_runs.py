"""Answers prompts with a backend alone, with a fixed number of drafts in each row and step, and times its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from roster_common.link_protocol import SAMPLE_FLAG
from roster_protos import plan_pb2
from runner_svc.execution.runner import Runner
from runner_svc.interface.backend import Backend

Clock = Callable[[], float]


@dataclass
class Answers:
    """What a run made."""

    tokens: list[list[int]]
    """The answers, EOS included."""
    seconds: float = 0.0
    """Of the steps behind the prompts: what the first tokens took is the same with and without drafts."""
    rows: int = 0
    """Rows of these steps."""
    verified: int = 0
    """Drafts that were verified."""
    offered: list[int] = field(default_factory=list)
    """Rows that verified a draft at each position, from the first draft on."""
    accepted: list[int] = field(default_factory=list)
    """Rows that accepted it."""

    @property
    def decoded(self) -> int:
        """Number of tokens behind the first one of each answer."""
        return sum(len(tokens) - 1 for tokens in self.tokens)


def answer(
    backend: Backend,
    prompts: Sequence[Sequence[int]],
    *,
    drafts: int,
    max_tokens: int,
    temperature: float = 0.0,
    clock: Clock = time.perf_counter,
) -> Answers:
    """Answers the prompts at once, each until its EOS or for `max_tokens` tokens; no row drafts more than `drafts`.

    `clock` returns seconds.
    """
    runner = Runner(backend)
    answers = Answers([[] for _ in prompts], offered=[0] * drafts, accepted=[0] * drafts)
    ends = set(backend.model.eos_token_ids)
    for slot, prompt in enumerate(prompts):
        plan = plan_pb2.Plan(admissions=[_admission(backend, slot, prompt, max_tokens, temperature, len(prompts))])
        for start in range(0, len(prompt), backend.max_step_tokens):
            count = min(backend.max_step_tokens, len(prompt) - start)
            rows = [(slot, start, count, SAMPLE_FLAG if start + count == len(prompt) else 0, 0)]
            result = runner.execute(runner.last_plan + 1, _with_rows(plan, rows))
            plan = plan_pb2.Plan()
        answers.tokens[slot].extend(np.frombuffer(result.tokens, "<i4").tolist())
    running = [slot for slot, tokens in enumerate(answers.tokens) if tokens[-1] not in ends]
    while running:
        rows = []
        for slot in running:
            made, most = answers.tokens[slot], min(drafts, max_tokens - len(answers.tokens[slot]) - 1)
            rows.append((slot, -1 if most else len(prompts[slot]) + len(made) - 1, 1 + most, SAMPLE_FLAG, most))
        plan = _with_rows(plan_pb2.Plan(), rows)
        began = clock()
        result = runner.execute(runner.last_plan + 1, plan)
        answers.seconds += clock() - began
        answers.rows += len(rows)
        _take(answers, result, running, ends)
        running = [
            slot for slot in running if answers.tokens[slot][-1] not in ends and len(answers.tokens[slot]) < max_tokens
        ]
    return answers


def _take(answers: Answers, result: plan_pb2.Result, slots: Sequence[int], ends: set[int]) -> None:
    """Appends the result's tokens, each row's up to its first end, and counts its drafts."""
    tokens, first = np.frombuffer(result.tokens, "<i4").tolist(), 0
    for row, slot in enumerate(slots):
        count = result.token_counts[row]
        kept = tokens[first : first + count]
        first += count
        verified = result.drafted[row] if result.drafted else 0
        for place in range(verified):
            answers.offered[place] += 1
            answers.accepted[place] += count - 1 > place
        answers.verified += verified
        end = next((index for index, token in enumerate(kept) if token in ends), len(kept) - 1)
        answers.tokens[slot].extend(kept[: end + 1])


def _admission(
    backend: Backend, slot: int, prompt: Sequence[int], max_tokens: int, temperature: float, num_prompts: int
) -> plan_pb2.Admission:
    each = -(-(len(prompt) + max_tokens + 16) // backend.block_size)
    if each * num_prompts > backend.num_blocks:
        raise ValueError(f"{num_prompts} prompts of {len(prompt)} tokens do not fit into the cache")
    per_slot = backend.num_blocks // num_prompts
    return plan_pb2.Admission(
        slot=slot,
        sequence_id=slot + 1,
        tokens=np.array(prompt, "<i4").tobytes(),
        prompt_len=len(prompt),
        seed=slot + 1,
        sampling=plan_pb2.Sampling(temperature=temperature, top_p=1.0, repetition_penalty=1.0),
        blocks=np.arange(1 + slot * per_slot, 1 + slot * per_slot + each, dtype="<i4").tobytes(),
    )


def _with_rows(plan: plan_pb2.Plan, rows: Sequence[tuple[int, int, int, int, int]]) -> plan_pb2.Plan:
    """Returns the plan with rows of (slot, start, count, flags, drafts)."""
    slots, starts, counts, flags, drafts = np.array(rows, "<i4").T
    plan.extent_slots, plan.extent_starts, plan.extent_counts = slots.tobytes(), starts.tobytes(), counts.tobytes()
    plan.extent_flags = flags.astype(np.uint8).tobytes()
    if drafts.any():
        plan.extent_drafts = drafts.astype(np.uint8).tobytes()
    return plan
