"""Speculation in the whole engine: whatever is drafted, each stream is the one without drafts."""

from __future__ import annotations

import random

import pytest

from roster_protos import engine_pb2, plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.model.sequence import FinishReason
from scheduler_svc.plan.plan_draft import pack
from tests.support.drafters import LateHash, drafting_backend
from tests.support.in_process import Stack, Submitted
from tests.support.scripted_drafts import RandomDrafts
from tests.support.thoroughness import count

EOS_PROBABILITY = 1 / 40
STOP_IDS = [IM_END_ID, 7, 8, 9, 10, 11]
STEM = [0, 1, 2, 3, 3, 2, 1, 0] * 3


def backend(rng: random.Random, kind: type[HashBackend] = HashBackend, **options: int) -> HashBackend:
    sizes = {"num_slots": 4, "block_size": 4, "num_blocks": 26, "max_step_tokens": 14, "context_length": 96, **options}
    return drafting_backend(kind, rng, eos_probability=EOS_PROBABILITY, max_drafts=5, **sizes)


def submit(stack: Stack, rng: random.Random, number: int) -> Submitted:
    sampling = plan_pb2.Sampling(
        temperature=rng.choice([0.0, 1.0]), top_p=1, repetition_penalty=1, min_tokens=rng.choice([0, 0, 5])
    )
    if rng.random() < 0.8:
        sampling.stop_ids = pack(STOP_IDS)
    if rng.random() < 0.3:
        sampling.logprobs = rng.randint(0, 2)
    if rng.random() < 0.15:
        sampling.prompt_logprobs = 1
    prompt = [*STEM[: rng.randint(0, 24)], *(rng.randrange(4) for _ in range(rng.randint(1, 8)))]
    return stack.submit(
        prompt,
        rng.randint(1, 40),
        n=rng.choice([1, 1, 2]),
        seed=number,
        sampling=sampling,
        tenant=rng.choice("abc"),
        no_speculation=rng.random() < 0.2,
    )


def assert_exact(request: Submitted) -> None:
    for index, stream in enumerate(request.streams):
        expected = request.expected(index, EOS_PROBABILITY)
        assert stream.end is not None
        drafted, accepted = stream.end.drafted_tokens, stream.end.accepted_tokens
        assert accepted <= min(drafted, len(stream.tokens)) and not (request.submit.no_speculation and drafted)
        if stream.end.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert stream.tokens == expected
        else:
            assert stream.tokens == expected[: len(stream.tokens)]


@pytest.mark.parametrize("seed", range(count(200, in_ci=4)))
def test_streams_are_those_without_speculation(seed: int) -> None:
    rng = random.Random(seed)
    stack = Stack(depth=rng.randint(1, 3))
    stack.drafts = RandomDrafts(rng)
    stack.add_runner(backend(rng, rng.choice([HashBackend, LateHash])))
    requests = []
    for number in range(10):
        requests.append(submit(stack, rng, number))
        for _ in range(rng.randint(0, 30)):
            stack.turn(rng)
    cancelled = rng.sample(requests, 2)
    for request in cancelled:
        stack.front.put(cancel=engine_pb2.Cancel(handle=request.handle))
    stack.run(rng)
    for request in requests:
        assert_exact(request)
    stack.assert_clean()
