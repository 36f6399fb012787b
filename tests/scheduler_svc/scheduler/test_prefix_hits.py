"""Which blocks of a prompt are hit, and that streams do not depend on hits."""

from __future__ import annotations

import random

import pytest

from roster_protos import engine_pb2, plan_pb2
from runner_svc.backends.hash_backend import HashBackend
from tests.support.in_process import Stack
from tests.support.sharing import NO_EOS, OUTPUT, SIZE, prompt, service
from tests.support.thoroughness import choice

BOUNDARIES = [1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE - 1, 2 * SIZE, 2 * SIZE + 1, 5 * SIZE]


@pytest.mark.parametrize("length", BOUNDARIES)
def test_a_prompt_again_hits_all_full_blocks_but_computes_its_last_token(length: int) -> None:
    served = service()
    first = served.stack.submit(prompt(length), OUTPUT)
    served.finish()
    again = served.stack.submit(prompt(length), OUTPUT)
    served.finish()
    assert served.cached(first) == 0
    assert served.cached(again) == (length - 1) // SIZE * SIZE
    assert served.scheduler.cached_tokens == served.cached(again)
    served.stack.assert_clean()


@pytest.mark.parametrize("common", BOUNDARIES)
def test_prompts_share_the_blocks_before_they_part(common: int) -> None:
    served = service()
    served.stack.submit(prompt(common) + prompt(20, seed=2), OUTPUT)
    served.finish()
    parting = [*prompt(common), (prompt(1, seed=2)[0] + 1) % 256]
    other = served.stack.submit(parting, OUTPUT)
    served.finish()
    assert served.cached(other) == common // SIZE * SIZE


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_what_was_generated_is_hit_by_the_next_turn_of_a_conversation(extra: int) -> None:
    served = service()
    length = 3 * SIZE + extra - OUTPUT + 1  # the last token sampled has no KV
    first = served.stack.submit(prompt(length), OUTPUT)
    served.finish()
    assert first.first_sequence_id is not None
    turn = prompt(length) + served.stack.streams[first.first_sequence_id].tokens + prompt(10, seed=3)
    second = served.stack.submit(turn, OUTPUT)
    served.finish()
    assert served.cached(second) == (length + OUTPUT - 1) // SIZE * SIZE


def test_eight_identical_prompts_at_once_are_computed_once() -> None:
    served = service(slots=8)
    length = 5 * SIZE + 3
    requests = [served.stack.submit(prompt(length), OUTPUT) for _ in range(8)]
    served.stack.step()
    assert served.scheduler.table.num_running == 1, "the others wait for its blocks"
    assert len(served.stack.engine.requests.queue) == 7
    served.finish()
    hits = sorted(served.cached(request) for request in requests)
    assert hits == [0] + [5 * SIZE] * 7
    assert served.scheduler.prefill_tokens == length + 7 * 3
    served.stack.assert_clean()


def test_choices_share_their_prompt() -> None:
    served = service(slots=8)
    length = 4 * SIZE + 1
    sampling = plan_pb2.Sampling(temperature=1, top_p=1, repetition_penalty=1)
    request = served.stack.submit(prompt(length), OUTPUT, n=4, sampling=sampling)
    served.finish()
    assert [served.cached(request, index) for index in range(4)] == [0] + [4 * SIZE] * 3
    assert served.scheduler.prefill_tokens == length + 3


def test_a_preempted_sequence_hits_its_own_blocks() -> None:
    served = service(slots=2, num_blocks=8, prefix_sharing=True)
    first, second = (served.stack.submit(prompt(SIZE + 1, seed=seed), 4 * SIZE) for seed in (1, 2))
    readmitted: list[int] = []
    while not readmitted:
        served.stack.step()
        plans = [plan for _, plan in served.stack.runners.plans[served.session]]
        readmitted += [a.num_computed for plan in plans for a in plan.admissions if len(a.tokens) // 4 > a.prompt_len]
        served.advance()
    assert readmitted[0] >= SIZE
    served.finish()
    assert served.scheduler.preemptions > 0
    assert [served.cached(first), served.cached(second)] == [0, 0], "usage tells of the first admission"


@pytest.mark.parametrize("seed", choice(range(3), in_ci=(0, 1)))
def test_random_conversations_give_the_same_with_and_without(seed: int) -> None:
    """Prompts from a few stems, cut at any length, in a pool that causes eviction and preemption."""
    streams: list[list[list[int]]] = []
    hits = []
    for sharing in (True, False):
        rng = random.Random(seed)
        stack = Stack(prefix_sharing=sharing, depth=1 + seed % 3)
        backend = HashBackend(
            num_slots=5, block_size=4, num_blocks=40, max_step_tokens=24, context_length=256, eos_probability=NO_EOS
        )
        session = stack.add_runner(backend)
        for _ in range(60):
            stem = prompt(rng.randint(1, 90), seed=rng.randrange(3))
            stack.submit(stem, rng.randint(1, 30), n=rng.choice((1, 1, 3)), cache_salt=rng.choice(("", "", "s")))
            for _ in range(rng.randrange(8)):
                stack.turn(rng)
        stack.run(rng)
        for request in stack.requests.values():
            assert request.first_sequence_id is not None
            for index in range(request.submit.n):
                assert stack.streams[request.first_sequence_id + index].tokens == request.expected(index, NO_EOS)
        hits.append(stack.engine.pool.schedulers[session].cached_tokens)
        streams.append([stream.tokens for _, stream in sorted(stack.streams.items())])
        stack.assert_clean()
    assert streams[0] == streams[1]
    assert hits[0] > 100 and hits[1] == 0


def test_nothing_that_goes_on_from_before_a_flush_is_hit_after_it() -> None:
    """Blocks filled by decoding are named when their sequence leaves; a flush before that applies to them too."""
    served = service()
    running = served.stack.submit(prompt(3 * SIZE), 4 * SIZE)
    served.advance(SIZE)
    assert served.scheduler.table.num_running == 1
    served.stack.front.put(flush_prefixes=engine_pb2.FlushPrefixes(handle=1))
    served.finish()
    assert running.first_sequence_id is not None
    assert served.scheduler.pool.num_named == 0
    turn = prompt(3 * SIZE) + served.stack.streams[running.first_sequence_id].tokens
    for hit in (0, 6 * SIZE):
        request = served.stack.submit(turn, OUTPUT)
        served.finish()
        assert served.cached(request) == hit
    served.stack.assert_clean()
