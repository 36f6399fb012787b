"""Random plans with drafts for one runner, and what each sequence gets, checked against its undrafted output."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.hash_backend import HashBackend, expected_tokens
from runner_svc.backends.hash_tokens import expected_logprobs
from runner_svc.execution.plans_in_flight import LaunchedPlan
from runner_svc.execution.runner import Runner
from tests.support.plans import SAMPLE, admission, ints, plan, sampling

VOCAB_SIZE, EOS_PROBABILITY = 300, 1 / 40


@dataclass
class Drafting:
    """One sequence: what is confirmed, and upper bounds of what its plans in flight make of it."""

    number: int
    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int
    sample_index: int
    min_tokens: int
    top: int | None  # log-probabilities per token
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    known: int = 0
    unanswered: list[int] = field(default_factory=list)  # drafts of each sampling row in flight

    @property
    def spread(self) -> int:
        return sum(self.unanswered)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def ended(self) -> bool:
        return len(self.tokens) == self.max_tokens or IM_END_ID in self.tokens[-1:]

    def take(self, tokens: list[int], logprobs: list[float]) -> None:
        """Appends a run's tokens up to the first end."""
        for index, token in enumerate(tokens):
            if not self.ended:
                self.tokens.append(token)
                self.logprobs += logprobs[index : index + 1]

    def check(self, vocab_size: int) -> None:
        """Compares tokens and log-probabilities with those of the sequence alone, without drafts."""
        expected = expected_tokens(
            self.prompt,
            self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            sample_index=self.sample_index,
            min_tokens=self.min_tokens,
            stop_ids=[IM_END_ID],
            eos_probability=EOS_PROBABILITY,
            vocab_size=vocab_size,
        )
        assert self.tokens == expected, f"sequence {self.number}"
        if self.top is not None:
            values = [expected_logprobs(t, len(self.prompt) + i, 0, vocab_size)[0] for i, t in enumerate(expected)]
            np.testing.assert_allclose(self.logprobs, values, rtol=1e-6)


class DraftingDriver:
    """Keeps up to `depth` plans in flight. A sequence gets chunks, drafts, no row, or is preempted, at random."""

    def __init__(self, backend: HashBackend, dice: random.Random, num_requests: int, depth: int) -> None:
        self.dice, self.depth, self.backend = dice, depth, backend
        self.runner = Runner(backend)
        self.free_blocks = list(range(1, backend.num_blocks + 1))
        self.free_slots = list(range(backend.num_slots))
        self.flights: deque[tuple[LaunchedPlan, list[tuple[Drafting, int, bool]]]] = deque()
        self.drafted = self.accepted = self.number = 0
        self.requests = [
            Drafting(
                number=number,
                prompt=[dice.randrange(VOCAB_SIZE) for _ in range(dice.randint(1, 30))],
                max_tokens=dice.randint(1, 40),
                temperature=dice.choice([0.0, 1.0]),
                seed=dice.getrandbits(64),
                sample_index=dice.randrange(3),
                min_tokens=dice.choice([0, 0, 15]),
                top=dice.choice([None, None, 0, 2]),
            )
            for number in range(num_requests)
        ]

    def run(self) -> None:
        """Sends plans until every sequence has ended, and checks each."""
        while waiting := [request for request in self.requests if not request.ended]:
            assert self.number < 5000
            self._step(waiting)
            while len(self.flights) > self.dice.randint(0, self.depth - 1):
                self._answer()
            if self.dice.random() < 0.05:
                self._check_snapshot()
        while self.flights:
            self._answer()
        for request in self.requests:
            request.check(VOCAB_SIZE)

    def _step(self, waiting: list[Drafting]) -> None:
        dice, releases, admissions, appends, rows = self.dice, [], [], [], []
        for request in self.requests:
            if request.slot is not None and (request.ended or dice.random() < 0.03):
                releases.append(request.slot)
                self._leave(request)
        for request in dice.sample(waiting, min(3, len(waiting))):
            room = len(self.free_blocks) > self.backend.num_blocks // 2
            if request.slot is None and not request.unanswered and self.free_slots and room:
                admissions.append(self._admission(request))
        for request in waiting:
            if request.slot is None or dice.random() < 0.1:
                continue
            start, count, flags, drafts = self._extent(request)
            end = request.computed + count
            missing = max(0, -(-end // self.backend.block_size) - len(request.blocks))
            if missing > len(self.free_blocks) or end >= self.backend.model.context_length:
                continue
            for block in self._take_blocks(missing):
                appends.append((request.slot, len(request.blocks), block))
                request.blocks.append(block)
            rows.append((request, (request.slot, start, count, flags), drafts))
            request.computed = end
            if flags:
                request.known = end + 1
                request.unanswered.append(drafts)
        appends.sort(key=lambda append: append[1])
        counts = [drafts for _, _, drafts in rows]
        self.number += 1
        launched = self.runner.launch(
            self.number,
            plan(
                releases=releases,
                admissions=admissions,
                appends=appends,
                extents=[extent for _, extent, _ in rows],
                drafts=counts if any(counts) or dice.random() < 0.1 else (),
            ),
        )
        self.flights.append((launched, [(request, drafts, bool(extent[3])) for request, extent, drafts in rows]))

    def _extent(self, request: Drafting) -> tuple[int, int, int, int]:
        """Returns start, count, flags and drafts of the sequence's next row."""
        lag = request.known - request.computed
        if lag > 1:
            count = lag if self.dice.random() < 0.5 else self.dice.randint(1, lag)
            return request.computed, count, SAMPLE if count == lag else 0, 0
        if self.dice.random() < 0.3:
            return (-1 if request.spread else request.computed), 1, SAMPLE, 0
        drafts = self.dice.randint(0, self.backend.max_drafts)
        return -1, 1 + drafts, SAMPLE, drafts

    def _answer(self) -> None:
        launched, rows = self.flights.popleft()
        result = launched.wait()
        tokens, drafted = ints(result.tokens), result.drafted or bytes(len(rows))
        logprobs = {entry.row: np.frombuffer(entry.values, "<f4").tolist() for entry in result.logprobs}
        assert len(drafted) == len(result.token_counts) == len(rows)
        for row, (request, drafts, samples) in enumerate(rows):
            count, verified = result.token_counts[row], drafted[row]
            assert samples <= count <= samples + verified and verified <= drafts
            run, tokens = tokens[:count], tokens[count:]
            values = logprobs.get(row, [])
            assert len(values) == (count if request.top is not None else 0)
            request.take(run, values)
            if samples:
                request.unanswered.pop(0)
                request.known -= 1 + drafts - count
                request.computed -= 1 + drafts - count
                self.drafted += verified
                self.accepted += count - 1
        assert not tokens

    def _check_snapshot(self) -> None:
        while self.flights:
            self._answer()
        residents = {entry.sequence_id: entry for entry in self.runner.snapshot().sequences}
        there = [request for request in self.requests if request.slot is not None]
        assert set(residents) == {request.number for request in there}
        for request in there:
            entry = residents[request.number]
            if not request.ended:
                assert ints(entry.tokens) == request.prompt + request.tokens
                assert (entry.computed, request.known) == (request.computed, request.length)
            assert ints(entry.blocks) == request.blocks

    def _admission(self, request: Drafting) -> plan_pb2.Admission:
        request.slot = self.free_slots.pop(self.dice.randrange(len(self.free_slots)))
        request.blocks = self._take_blocks(self.dice.randint(0, 2))
        request.known, request.computed = request.length, 0
        asked = {} if request.top is None else {"logprobs": request.top}
        return admission(
            request.slot,
            request.prompt + request.tokens,
            request.blocks,
            sequence_id=request.number,
            prompt_len=len(request.prompt),
            seed=request.seed,
            sample_index=request.sample_index,
            sampling=sampling(
                temperature=request.temperature, min_tokens=request.min_tokens, stop_ids=[IM_END_ID], **asked
            ),
        )

    def _take_blocks(self, count: int) -> list[int]:
        return [self.free_blocks.pop(self.dice.randrange(len(self.free_blocks))) for _ in range(count)]

    def _leave(self, request: Drafting) -> None:
        assert request.slot is not None
        self.free_slots.append(request.slot)
        self.free_blocks += request.blocks
        request.slot, request.blocks = None, []
