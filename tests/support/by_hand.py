"""A stack whose runner is answered by hand: a test decides what rows draft and what each row of a plan draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import NUM_TOKENS
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.backends.hash_tokens import expected_logprobs
from runner_svc.execution.runner import Runner
from scheduler_svc.link.runner_events import GotResult
from scheduler_svc.scheduler.scheduler import Scheduler
from tests.support.in_process import Stack, Submitted

MAX_DRAFTS = 7


class DraftingRunner(Runner):
    """Says that it drafts. A test answers its plans, so that it need not."""

    def __init__(self, backend: HashBackend, runner_id: str, max_drafts: int) -> None:
        super().__init__(backend, runner_id)
        self._max_drafts = max_drafts

    def hello(self) -> plan_pb2.Hello:
        hello = super().hello()
        hello.max_drafts, hello.drafter = self._max_drafts, "by hand"
        return hello


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a plan; `start` is -1 where only the runner knows it."""

    slot: int
    start: int
    count: int
    flags: int
    drafts: int


@dataclass(slots=True)
class Sent:
    """A plan that awaits its answer."""

    number: int
    plan: plan_pb2.Plan
    rows: list[Row]

    @property
    def row(self) -> Row:
        """The only row."""
        (row,) = self.rows
        return row

    @property
    def drafts(self) -> list[int]:
        """Number of drafts of each row."""
        return [row.drafts for row in self.rows]

    @property
    def num_positions(self) -> int:
        return sum(row.count for row in self.rows)


def read(number: int, plan: plan_pb2.Plan) -> Sent:
    columns = [np.frombuffer(column, "<i4").tolist() for column in (plan.extent_slots, plan.extent_starts)]
    counts = np.frombuffer(plan.extent_counts, "<i4").tolist()
    drafts = list(plan.extent_drafts) if plan.extent_drafts else [0] * len(counts)
    rows = [Row(*row) for row in zip(*columns, counts, plan.extent_flags, drafts, strict=True)]
    return Sent(number, plan, rows)


class ByHand:
    """One engine and one runner without a backend."""

    def __init__(
        self,
        wanted: int = 0,
        *,
        slots: int = 4,
        num_blocks: int = 64,
        block_size: int = 4,
        step_tokens: int = 64,
        context: int = 256,
        max_drafts: int = MAX_DRAFTS,
        **settings: Any,
    ) -> None:
        self.wanted = wanted
        """Drafts of each row from now on, as far as it may."""
        self.next: list[int] = []
        """The same of the next plans, one after another, before `wanted` counts again."""
        self.stack = Stack(**{"depth": 2, **settings})
        self.stack.drafts = self
        backend = HashBackend(
            num_slots=slots,
            block_size=block_size,
            num_blocks=num_blocks,
            max_step_tokens=step_tokens,
            context_length=context,
            eos_probability=0.0,
        )
        self.session = 1
        self.stack._sessions = 1
        self.stack.runners.connect(1, DraftingRunner(backend, "by-hand", max_drafts))
        self.step()

    @property
    def scheduler(self) -> Scheduler:
        return self.stack.engine.pool.schedulers[self.session]

    @property
    def num_sent(self) -> int:
        """Number of plans that await their answers."""
        return len(self.stack.runners.plans[self.session])

    def step(self) -> None:
        """Lets the engine take in what has arrived, and plan."""
        self.stack.step()

    def wants(self) -> bool:
        """Implements `Script`."""
        return bool(self.next or self.wanted)

    def lengths(self, rows: int) -> list[int]:
        """Implements `Script`."""
        return [self.next.pop(0) if self.next else self.wanted] * rows

    def submit(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Submitted:
        return self.stack.submit(list(prompt), max_tokens, **fields)

    def take(self) -> Sent:
        """Lets the engine plan, if no plan waits, and returns the oldest plan."""
        if not self.num_sent:
            self.step()
        return read(*self.stack.runners.plans[self.session].popleft())

    def result(
        self,
        sent: Sent,
        draws: Mapping[int, Sequence[int]],
        *,
        drafted: Sequence[int] | None = None,
        statuses: Mapping[int, int] | None = None,
    ) -> plan_pb2.Result:
        """Returns a result in which slot s draws the tokens `draws[s]`, one token 0 by default if it samples.

        `drafted`: drafts that each row verified, by default those of the plan. `statuses`: those that are not 0.
        """
        statuses = statuses or {}
        tokens = [
            list(draws.get(row.slot, [0])) if row.flags & 1 and not statuses.get(row.slot) else [] for row in sent.rows
        ]
        result = plan_pb2.Result(
            statuses=bytes(statuses.get(row.slot, 0) for row in sent.rows),
            token_counts=bytes(map(len, tokens)),
            tokens=np.array([token for row in tokens for token in row], "<i4").tobytes(),
            logprobs=self._scored(tokens),
        )
        if sent.plan.extent_drafts:
            result.drafted = bytes(sent.drafts if drafted is None else drafted)
        return result

    def _scored(self, tokens: Sequence[Sequence[int]]) -> list[plan_pb2.RowLogprobs]:
        """Returns the log-probabilities of the oldest plan's rows whose requests want them, as a hash backend would."""
        sequences, rows = self.scheduler.in_flight[0].sequences.tolist(), []
        for row, (sequence, drawn) in enumerate(zip(sequences, tokens, strict=True)):
            if drawn and sequence.request.sampling.HasField("logprobs"):
                top, position = sequence.request.sampling.logprobs, len(sequence.tokens)
                scores = [expected_logprobs(token, position + i, top, NUM_TOKENS) for i, token in enumerate(drawn)]
                rows.append(
                    plan_pb2.RowLogprobs(
                        row=row,
                        values=np.array([value for value, _, _ in scores], "<f4").tobytes(),
                        top=top,
                        top_ids=np.array([ids for _, ids, _ in scores], "<i4").tobytes(),
                        top_values=np.array([values for _, _, values in scores], "<f4").tobytes(),
                    )
                )
        return rows

    def give(self, sent: Sent, result: plan_pb2.Result) -> None:
        """Delivers a result, without a step of the engine."""
        self.stack.runners.events.append(GotResult(self.session, sent.number, result))

    def answer(self, sent: Sent, draws: Mapping[int, Sequence[int]] | None = None, **how: Any) -> None:
        """Delivers the result of `result` and lets the engine take it."""
        self.give(sent, self.result(sent, draws or {}, **how))
        self.step()

    def run(self, wanted: int = 3) -> Sent:
        """Lets rows draft `wanted` tokens from now on, answers plans until one drafts, and returns that."""
        self.wanted = wanted
        for _ in range(4):
            sent = self.take()
            if any(sent.drafts):
                return sent
            self.answer(sent)
        raise AssertionError("no row drafts")

    def preempt(self, slot: int = 0) -> None:
        """Preempts the sequence in the slot."""
        self.scheduler.departures.preempt(self.scheduler.table.at(slot), self.stack.engine.requests.queue)

    def finish(self, token: int = 3) -> None:
        """Answers every plan until no request is live."""
        for _ in range(400):
            if self.stack.engine.requests.idle and not self.stack.front.commands:
                return
            if self.num_sent or self.scheduler.table.num_running or self.stack.engine.requests.queue:
                sent = self.take()
                self.answer(sent, {row.slot: [token] for row in sent.rows})
        raise AssertionError("never idle")

    def known(self, request: Submitted, index: int = 0) -> int:
        """Returns the number of a choice's tokens, prompt included."""
        return len(request.submit.prompt) // 4 + len(self.tokens(request, index))

    def decoding(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Submitted:
        """Submits a request and answers its prompt's row: its first token is 0, and it decodes in the next plan.

        Its slot is the next one free, from 0 upwards.
        """
        request = self.submit(prompt, max_tokens, **fields)
        while not request.streams or not all(stream.tokens for stream in request.streams):
            self.answer(self.take())
        return request

    def tokens(self, request: Submitted, index: int = 0) -> list[int]:
        """Returns what a choice's client has received."""
        return request.streams[index].tokens
