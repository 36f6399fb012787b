"""The hash backend against its reference, over random plans: chunks, preemption, late rows, any mix of rows."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.hash_backend import HashBackend, expected_tokens
from runner_svc.backends.hash_tokens import TokenPicker, expected_logprobs
from runner_svc.execution.runner import Runner
from runner_svc.sampling.noise import mix64
from tests.support.plans import SAMPLE, admission, ints, plan, sampling

VOCAB_SIZE = 300
EOS_PROBABILITY = 1 / 20


@dataclass
class Request:
    """One sequence of the random driver."""

    sequence_id: int
    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int
    sample_index: int
    min_tokens: int
    tokens: list[int] = field(default_factory=list)
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def known(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def ended(self) -> bool:
        return len(self.tokens) == self.max_tokens or self.tokens[-1:] == [IM_END_ID]

    def expected(self) -> list[int]:
        return expected_tokens(
            self.prompt,
            self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            sample_index=self.sample_index,
            min_tokens=self.min_tokens,
            stop_ids=[IM_END_ID],
            eos_probability=EOS_PROBABILITY,
            vocab_size=VOCAB_SIZE,
        )


class RandomDriver:
    """Makes random plans: a sequence in a slot gets a random chunk, is preempted, or has no row."""

    def __init__(self, dice: random.Random, num_requests: int) -> None:
        self.dice = dice
        self.block_size = dice.choice([1, 3, 8, 16])
        self.num_blocks = 400 // self.block_size
        backend = HashBackend(
            num_slots=6,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            vocab_size=VOCAB_SIZE,
            eos_probability=EOS_PROBABILITY,
        )
        self.runner = Runner(backend)
        self.free_blocks = list(range(1, self.num_blocks + 1))
        self.free_slots = list(range(6))
        self.requests = [
            Request(
                sequence_id=number,
                prompt=[dice.randrange(VOCAB_SIZE) for _ in range(dice.randint(1, 60))],
                max_tokens=dice.randint(1, 40),
                temperature=dice.choice([0.0, 1.0]),
                seed=dice.getrandbits(64),
                sample_index=dice.randrange(3),
                min_tokens=dice.choice([0, 0, 15]),
            )
            for number in range(num_requests)
        ]

    def run(self) -> None:
        number = 0
        while waiting := [request for request in self.requests if not request.ended]:
            number += 1
            self._step(number, waiting)
            assert number < 5000

    def _step(self, number: int, waiting: list[Request]) -> None:
        dice = self.dice
        releases, admissions, appends, extents, rows = [], [], [], [], []
        for request in self.requests:
            if request.slot is not None and (request.ended or dice.random() < 0.03):
                releases.append(request.slot)
                self._leave(request)
        for request in dice.sample(waiting, min(3, len(waiting))):
            # Half of the pool stays free for appends.
            if request.slot is None and self.free_slots and len(self.free_blocks) > self.num_blocks // 2:
                request.slot = self.free_slots.pop(dice.randrange(len(self.free_slots)))
                request.blocks = self._take_blocks(dice.randint(0, 2))
                admissions.append(self._admission(request))
        for request in waiting:
            lag = request.known - request.computed
            if request.slot is None or dice.random() < 0.1:
                continue
            count = lag if dice.random() < 0.5 else dice.randint(1, lag)
            missing = -(-(request.computed + count) // self.block_size) - len(request.blocks)
            if missing > len(self.free_blocks):
                continue
            for block in self._take_blocks(max(0, missing)):
                appends.append((request.slot, len(request.blocks), block))
                request.blocks.append(block)
            extents.append((request.slot, request.computed, count, SAMPLE if count == lag else 0))
            rows.append(request)
            request.computed += count
        dice.shuffle(appends)
        appends.sort(key=lambda append: append[1])  # ordered within each slot, slots mixed
        result = self.runner.execute(
            number, plan(releases=releases, admissions=admissions, appends=appends, extents=extents)
        )
        tokens = iter(ints(result.tokens))
        for request, count in zip(rows, result.token_counts, strict=True):
            request.tokens += [next(tokens) for _ in range(count)]

    def _admission(self, request: Request) -> plan_pb2.Admission:
        assert request.slot is not None
        return admission(
            request.slot,
            request.prompt + request.tokens,
            request.blocks,
            sequence_id=request.sequence_id,
            prompt_len=len(request.prompt),
            seed=request.seed,
            sample_index=request.sample_index,
            sampling=sampling(temperature=request.temperature, min_tokens=request.min_tokens, stop_ids=[IM_END_ID]),
        )

    def _take_blocks(self, count: int) -> list[int]:
        return [self.free_blocks.pop(self.dice.randrange(len(self.free_blocks))) for _ in range(count)]

    def _leave(self, request: Request) -> None:
        assert request.slot is not None
        self.free_slots.append(request.slot)
        self.free_blocks += request.blocks
        request.slot, request.blocks, request.computed = None, [], 0


def test_any_schedule_gives_the_tokens_of_the_twin() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(8):
        driver = RandomDriver(dice, 12)
        driver.run()
        for request in driver.requests:
            assert request.tokens == request.expected(), request


def _generate(runner: Runner, blocks: list[int], **fields: object) -> list[int]:
    """Returns the first two tokens after a 20-token prompt in the given blocks of 16."""
    runner.reset()
    prompt = admission(0, list(range(20)), blocks, **fields)
    first = runner.execute(1, plan(admissions=[prompt], extents=[(0, 0, 20, SAMPLE)]))
    second = runner.execute(2, plan(extents=[(0, 20, 1, SAMPLE)]))
    return ints(first.tokens) + ints(second.tokens)


def test_a_prefix_hit_gives_the_same_tokens_and_a_wrong_one_does_not() -> None:
    runner = Runner(HashBackend())
    right = _generate(runner, [1, 2])
    prompt, prefix = list(range(20)), list(range(16))

    def hit(blocks: list[int]) -> list[int]:
        admitted = admission(1, prompt, blocks, num_computed=16)
        return ints(runner.execute(3, plan(admissions=[admitted], extents=[(1, 16, 4, SAMPLE)])).tokens)

    assert hit([1, 5]) == right[:1]
    _generate(runner, [1, 2])
    assert hit([9, 5]) != right[:1]  # block 9 was never written
    # A block with the right tokens, computed after another prefix.
    _generate(runner, [1, 2])
    stranger = admission(2, [7] * 16 + prefix, [11, 12])
    runner.execute(3, plan(admissions=[stranger], extents=[(2, 0, 32, 0)]))
    admitted = admission(1, prompt, [12, 5], num_computed=16)
    assert ints(runner.execute(4, plan(admissions=[admitted], extents=[(1, 16, 4, SAMPLE)])).tokens) != right[:1]


def test_a_block_that_another_sequence_overwrites_changes_the_tokens() -> None:
    runner = Runner(HashBackend())
    right = _generate(runner, [1, 2])
    runner.reset()
    both = [admission(0, list(range(20)), [1, 2]), admission(1, list(range(50, 70)), [3, 1])]
    runner.execute(1, plan(admissions=both, extents=[(1, 0, 16, 0), (0, 0, 19, 0)]))
    runner.execute(2, plan(extents=[(1, 16, 4, 0)]))  # writes into block 1, which is slot 0's
    assert ints(runner.execute(3, plan(extents=[(0, 19, 1, SAMPLE)])).tokens) != right[:1]


def test_copied_blocks_serve_as_the_originals() -> None:
    runner = Runner(HashBackend())
    right = _generate(runner, [1, 2])
    copied = admission(1, list(range(20)), [7, 8], num_computed=19)
    result = runner.execute(3, plan(admissions=[copied], copies=[(1, 7), (2, 8)], extents=[(1, 19, 1, SAMPLE)]))
    assert ints(result.tokens) == right[:1]


def test_noise_depends_on_seed_sample_index_and_position_only_with_a_temperature() -> None:
    runner = Runner(HashBackend(vocab_size=100_000))
    warm = sampling(temperature=0.7)
    base = _generate(runner, [1, 2], sampling=warm, seed=1, sample_index=0)
    assert _generate(runner, [4, 3], sampling=warm, seed=1, sample_index=0) == base
    assert _generate(runner, [1, 2], sampling=warm, seed=2, sample_index=0) != base
    assert _generate(runner, [1, 2], sampling=warm, seed=1, sample_index=1) != base
    assert _generate(runner, [1, 2], seed=1) == _generate(runner, [1, 2], seed=2, sample_index=5)


def test_eos_comes_at_its_rate_and_never_before_min_tokens() -> None:
    picker = TokenPicker(VOCAB_SIZE, EOS_PROBABILITY)
    picks = [picker.pick(mix64(value), 0, (), None) for value in range(20_000)]
    rate = picks.count(IM_END_ID) / len(picks)
    assert abs(rate - EOS_PROBABILITY) < 4 * (EOS_PROBABILITY / len(picks)) ** 0.5
    assert set(picks) - {IM_END_ID} == {*range(256), *range(259, VOCAB_SIZE)}
    assert IM_END_ID not in [picker.pick(mix64(value), 0, [IM_END_ID], None) for value in range(20_000)]


def test_logprobs_are_those_of_the_twin() -> None:
    runner = Runner(HashBackend())
    asked = sampling(logprobs=2, prompt_logprobs=1)
    admissions = [admission(3, [1], [9]), admission(0, [10, 11, 12, 13, 14], [1], prompt_len=4, sampling=asked)]
    first = runner.execute(1, plan(admissions=admissions, extents=[(3, 0, 1, SAMPLE), (0, 0, 2, 0)]))
    second = runner.execute(2, plan(extents=[(3, 1, 1, SAMPLE), (0, 2, 3, SAMPLE)]))
    (chunk,), (rest,), (sampled,) = first.prompt_logprobs, second.prompt_logprobs, second.logprobs
    assert not first.logprobs
    # Position 0 has no logprob; position 4 is output, not prompt.
    assert (chunk.row, chunk.first_position, chunk.top) == (1, 1, 1)
    _check_logprobs(chunk, [(11, 1), (12, 2)])
    assert (rest.row, rest.first_position) == (1, 3)
    _check_logprobs(rest, [(13, 3)])
    assert (sampled.row, sampled.first_position, sampled.top) == (1, 0, 2)
    _check_logprobs(sampled, [(ints(second.tokens)[1], 5)])


def _check_logprobs(row: plan_pb2.RowLogprobs, tokens: list[tuple[int, int]]) -> None:
    twins = [expected_logprobs(token, position, row.top, 259) for token, position in tokens]
    assert np.frombuffer(row.values, "<f4").tolist() == pytest.approx([value for value, _, _ in twins])
    assert ints(row.top_ids) == [token for _, ids, _ in twins for token in ids]
    assert np.frombuffer(row.top_values, "<f4").tolist() == pytest.approx([v for _, _, values in twins for v in values])
