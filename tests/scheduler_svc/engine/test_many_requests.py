"""Thousands of requests through engine and hash runner, each compared exactly with its solo output.

`ROSTER_TEST_REQUESTS=100000 pytest tests/scheduler_svc/engine/test_many_requests.py` runs the full count.
"""

from __future__ import annotations

import os
import random
import time

import pytest

from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.plan.plan_draft import pack
from tests.support.in_process import Stack

EOS_PROBABILITY = 1 / 32
NUM_REQUESTS = int(os.environ.get("ROSTER_TEST_REQUESTS", "2000"))


@pytest.mark.timeout(3600)
def test_every_stream_equals_its_solo_output() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    stack = Stack(depth=2, check=False, max_waiting_requests=1 << 20)
    backend = HashBackend(
        num_slots=48,
        block_size=8,
        num_blocks=128,
        max_step_tokens=256,
        context_length=256,
        eos_probability=EOS_PROBABILITY,
    )
    session = stack.add_runner(backend)
    start = time.monotonic()
    for _ in range(NUM_REQUESTS):
        sampling = plan_pb2.Sampling(
            temperature=rng.choice((0.0, 1.0)), top_p=1, repetition_penalty=1, stop_ids=pack([IM_END_ID])
        )
        prompt = [rng.randrange(256) for _ in range(min(100, int(rng.expovariate(1 / 16)) + 1))]
        stack.submit(prompt, min(100, int(rng.expovariate(1 / 16)) + 1), sampling=sampling)
        for _ in range(rng.randrange(4)):
            stack.turn(rng)
    stack.run(rng, max_turns=100 * NUM_REQUESTS)
    served_s = time.monotonic() - start
    for request in stack.requests.values():
        assert request.first_sequence_id is not None
        assert stack.streams[request.first_sequence_id].tokens == request.expected(0, EOS_PROBABILITY)
    stack.assert_clean()
    preemptions = stack.engine.pool.schedulers[session].preemptions
    print(f"seed {seed}: {NUM_REQUESTS} requests in {served_s:.0f} s, {preemptions} preemptions")
    assert preemptions > NUM_REQUESTS / 100
