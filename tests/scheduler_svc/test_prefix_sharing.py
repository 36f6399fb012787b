"""Prefixes: what is hit, what is waited for, what is never shared; and that no stream can tell."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from protos import engine_pb2, plan_pb2
from runner_svc.hash_model import HashBackend
from scheduler_svc.prefix_sharing import STEPS_ASIDE
from scheduler_svc.scheduler import Scheduler
from scheduler_svc.sequence import FinishReason
from tests.support.in_process import Stack, Submitted

SIZE = 8
NO_EOS = 0.0
OUTPUT = 3


@dataclass
class Service:
    """A stack with one hash runner."""

    stack: Stack
    session: int

    @property
    def scheduler(self) -> Scheduler:
        return self.stack.engine.pool.schedulers[self.session]

    def advance(self, turns: int = 1) -> None:
        """Whole turns: everything sent is executed and comes back."""
        for _ in range(turns):
            self.stack.step()
            while self.stack.runners.execute(self.session):
                pass
            while self.stack.runners.deliver(self.session):
                pass

    def finish(self) -> None:
        for _ in range(5000):
            self.advance()
            if self.stack.engine.idle:
                self.stack.step()
                return
        raise AssertionError("never idle")

    def cached(self, request: Submitted, index: int = 0) -> int:
        """Tokens of a finished choice that came from the cache; its stream must be right."""
        assert request.first_sequence_id is not None and request.refused is None
        stream = self.stack.streams[request.first_sequence_id + index]
        assert stream.end is not None and stream.end.reason == FinishReason.LENGTH
        assert stream.tokens == request.expected(index, NO_EOS)
        return stream.end.cached_tokens


def service(slots: int = 4, num_blocks: int = 64, step_tokens: int = 256, **settings: object) -> Service:
    stack = Stack(**settings)
    backend = HashBackend(
        num_slots=slots,
        block_size=SIZE,
        num_blocks=num_blocks,
        max_step_tokens=step_tokens,
        context_length=1024,
        eos_probability=NO_EOS,
    )
    session = stack.add_runner(backend)
    stack.step()
    return Service(stack, session)


def prompt(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


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
    assert len(served.stack.engine.queue) == 7
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


def test_blocks_are_hit_only_once_a_result_has_confirmed_them() -> None:
    served = service(step_tokens=2 * SIZE)
    first = served.stack.submit(prompt(4 * SIZE), OUTPUT)
    second = served.stack.submit(prompt(4 * SIZE), OUTPUT)
    served.stack.step()
    served.stack.step()
    assert served.scheduler.table.num_running == 1
    served.stack.runners.execute(served.session)
    served.stack.step()
    assert served.scheduler.table.num_running == 1, "executed, but the result is not here"
    served.finish()
    assert [served.cached(first), served.cached(second)] == [0, 3 * SIZE]


def test_others_pass_those_who_wait_for_a_block() -> None:
    served = service(step_tokens=4 * SIZE)
    requests = [served.stack.submit(prompt(2 * SIZE + 1), OUTPUT) for _ in range(3)]
    passing = served.stack.submit(prompt(SIZE, seed=9), OUTPUT)
    served.stack.step()
    assert served.scheduler.table.num_running == 2
    served.finish()
    assert sorted(served.cached(request) for request in [*requests, passing]) == [0, 0, 2 * SIZE, 2 * SIZE]


def test_who_computes_a_block_ranks_as_high_as_who_waits_for_it() -> None:
    """Higher classes keep coming and take every step; the waiting one of them must not wait for the lowest class."""
    served = service(slots=8, step_tokens=SIZE, policy="priority", num_blocks=256)
    low = served.stack.submit(prompt(12 * SIZE), 40 * SIZE, priority=-5)
    served.advance()
    high = served.stack.submit(prompt(12 * SIZE), OUTPUT, priority=5)
    for number in range(60):
        served.stack.submit(prompt(2 * SIZE, seed=100 + number), 1, priority=5)
        served.advance()
    assert high.first_sequence_id is not None
    assert served.cached(high) == 11 * SIZE
    served.stack.front.put(cancel=engine_pb2.Cancel(handle=low.handle))
    served.finish()


@pytest.mark.parametrize("how", ["cancel", "disconnect"])
def test_when_the_owner_of_a_pending_block_goes_another_computes_it(how: str) -> None:
    served = service(step_tokens=SIZE)
    requests = [served.stack.submit(prompt(8 * SIZE + 1), OUTPUT) for _ in range(4)]
    served.advance(2)
    assert served.scheduler.table.num_running == 1
    message = engine_pb2.Cancel if how == "cancel" else engine_pb2.Disconnect
    served.stack.front.put(**{how: message(handle=requests[0].handle)})
    served.finish()
    hits = [served.cached(request) for request in requests[1:]]
    assert hits == [hits[0], 8 * SIZE, 8 * SIZE] and 0 < hits[0] < 8 * SIZE, "what was READY is not computed again"
    served.stack.assert_clean()


def test_who_waits_for_a_block_can_be_cancelled() -> None:
    served = service(step_tokens=SIZE)
    requests = [served.stack.submit(prompt(4 * SIZE + 1), OUTPUT) for _ in range(3)]
    served.advance()
    served.stack.front.put(cancel=engine_pb2.Cancel(handle=requests[1].handle))
    served.stack.step()
    assert len(served.stack.engine.queue) == 1
    served.finish()
    assert [served.cached(requests[0]), served.cached(requests[2])] == [0, 4 * SIZE]
    served.stack.assert_clean()


def test_those_who_come_back_are_found_behind_many_who_were_cancelled() -> None:
    served = service(step_tokens=SIZE)
    requests = [served.stack.submit(prompt(30 * SIZE + 1), OUTPUT) for _ in range(4 * STEPS_ASIDE)]
    served.advance(8)
    for request in requests[:-1]:
        served.stack.front.put(cancel=engine_pb2.Cancel(handle=request.handle))
    served.stack.step()
    assert served.scheduler.table.num_running == 1
    served.finish()
    assert 0 < served.cached(requests[-1]) < 30 * SIZE
    served.stack.assert_clean()


def test_a_runner_that_dies_takes_its_index_along() -> None:
    served = service(slots=8, step_tokens=SIZE)
    done = served.stack.submit(prompt(3 * SIZE), OUTPUT)
    served.finish()
    requests = [served.stack.submit(prompt(5 * SIZE + 1), OUTPUT) for _ in range(4)]
    served.advance()
    served.stack.runners.kill(served.session)
    served.stack.step()
    assert len(served.stack.engine.queue) == 4
    backend = HashBackend(
        num_slots=8, block_size=SIZE, num_blocks=64, max_step_tokens=64, context_length=1024, eos_probability=NO_EOS
    )
    served.session = served.stack.add_runner(backend)
    served.stack.step()
    (admission,) = served.stack.runners.plans[served.session][0][1].admissions
    assert admission.num_computed == 0
    served.finish()
    assert served.cached(done) == 0
    assert served.scheduler.prefill_tokens == 5 * SIZE + 4
    assert [served.cached(request) for request in requests] == [3 * SIZE, *[5 * SIZE] * 3]


def test_names_are_made_anew_for_a_runner_with_other_blocks() -> None:
    served = service(slots=2, step_tokens=SIZE)
    prompts = [prompt(3 * SIZE) + prompt(4 * SIZE, seed=seed) for seed in (2, 3, 2)]
    requests = [served.stack.submit(tokens, 4 * SIZE) for tokens in prompts]
    served.advance(5)
    served.stack.runners.kill(served.session)
    served.stack.step()
    backend = HashBackend(
        num_slots=2, block_size=2 * SIZE, num_blocks=64, max_step_tokens=64, context_length=1024, eos_probability=NO_EOS
    )
    served.session = served.stack.add_runner(backend)
    served.finish()
    for request in requests:
        served.cached(request)
    assert served.scheduler.cached_tokens > 0


def test_a_prefix_evicted_while_its_request_waits_is_computed_again() -> None:
    served = service(slots=1, num_blocks=8)
    served.stack.submit(prompt(4 * SIZE), OUTPUT)
    served.finish()
    big = served.stack.submit(prompt(7 * SIZE, seed=2), OUTPUT)
    again = served.stack.submit(prompt(4 * SIZE), OUTPUT)
    served.finish()
    assert [served.cached(big), served.cached(again)] == [0, 0]


def test_the_deepest_blocks_are_evicted_first() -> None:
    served = service(slots=1, num_blocks=8)
    served.stack.submit(prompt(4 * SIZE), OUTPUT)
    served.finish()
    served.stack.submit(prompt(4 * SIZE + 1, seed=2), OUTPUT)  # takes the four blank blocks and one of the cached
    again = served.stack.submit(prompt(5 * SIZE), OUTPUT)
    served.finish()
    assert served.cached(again) == 3 * SIZE


def test_a_hit_is_pinned_at_once() -> None:
    """Its blocks are free when it is seated; the fresh blocks of the same step must not be taken from them."""
    served = service(slots=4, num_blocks=8)
    served.stack.submit(prompt(4 * SIZE), OUTPUT)
    served.finish()
    again = served.stack.submit(prompt(4 * SIZE), OUTPUT)
    others = [served.stack.submit(prompt(SIZE, seed=seed), OUTPUT) for seed in range(2, 5)]
    served.finish()
    assert served.cached(again) == 3 * SIZE
    assert [served.cached(other) for other in others] == [0, 0, 0]
    served.stack.assert_clean()


def test_salts_and_tenants_isolate() -> None:
    served = service(isolate_tenants=True)
    served.stack.submit(prompt(3 * SIZE), OUTPUT, tenant="a", cache_salt="x")
    served.finish()
    same, salt, tenant, none = (
        served.stack.submit(prompt(3 * SIZE), OUTPUT, tenant=tenant, cache_salt=salt)
        for tenant, salt in (("a", "x"), ("a", "y"), ("b", "x"), ("a", ""))
    )
    served.finish()
    assert [served.cached(request) for request in (same, salt, tenant, none)] == [2 * SIZE, 0, 0, 0]


def test_tenants_share_unless_they_are_isolated() -> None:
    served = service()
    served.stack.submit(prompt(3 * SIZE), OUTPUT, tenant="a")
    served.finish()
    other = served.stack.submit(prompt(3 * SIZE), OUTPUT, tenant="b")
    served.finish()
    assert served.cached(other) == 2 * SIZE


def test_nothing_is_shared_when_it_is_turned_off() -> None:
    served = service(prefix_sharing=False)
    requests = [served.stack.submit(prompt(3 * SIZE), OUTPUT, n=2) for _ in range(2)]
    served.finish()
    assert [served.cached(request, index) for request in requests for index in (0, 1)] == [0] * 4
    assert served.scheduler.pool.num_cached == 0


def test_prompt_logprobs_need_every_position() -> None:
    served = service()
    sampling = plan_pb2.Sampling(top_p=1, repetition_penalty=1, prompt_logprobs=1)
    served.stack.submit(prompt(3 * SIZE), OUTPUT)
    served.finish()
    scored = served.stack.submit(prompt(3 * SIZE), OUTPUT, sampling=sampling)
    served.finish()
    assert served.cached(scored) == 0


def test_positions_whose_kv_depends_on_the_length_of_the_prompt_are_not_shared() -> None:
    stack = Stack()
    backend = HashBackend(
        num_slots=4, block_size=SIZE, num_blocks=64, max_step_tokens=64, context_length=256, eos_probability=NO_EOS
    )
    backend.model.prefix_positions = 2 * SIZE + 2
    served = Service(stack, stack.add_runner(backend))
    stack.step()
    stack.submit(prompt(2 * SIZE + 2), 2 * SIZE)
    served.finish()
    lengths = (2 * SIZE + 2, 2 * SIZE + 3, 4 * SIZE)
    requests = [stack.submit(prompt(length), OUTPUT) for length in lengths]
    served.finish()
    assert [served.cached(request) for request in requests] == [2 * SIZE, 0, 0]


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


def test_a_sequence_that_failed_shares_nothing() -> None:
    served = service()
    failing = served.stack.submit(prompt(3 * SIZE), OUTPUT)
    served.stack.step()
    served.stack.runners.execute(served.session)
    result = served.stack.runners.results[served.session][0].result
    result.statuses = bytes([plan_pb2.ROW_STATUS_NOT_FINITE])
    result.token_counts, result.tokens = bytes(1), b""
    served.finish()
    assert failing.first_sequence_id is not None
    end = served.stack.streams[failing.first_sequence_id].end
    assert end is not None and end.reason == FinishReason.ERROR
    again = served.stack.submit(prompt(3 * SIZE), OUTPUT)
    served.finish()
    assert served.cached(again) == 0


def test_ten_thousand_behind_one_block_cost_a_step_a_few_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    served = service(slots=4, step_tokens=SIZE, max_waiting_requests=20_000, max_waiting_tokens=10**7, check=False)
    requests = [served.stack.submit(prompt(40 * SIZE), OUTPUT) for _ in range(10_000)]
    served.stack.step()
    lookups = 0
    match = served.scheduler.prefix.match

    def counted(sequence: object) -> object:
        nonlocal lookups
        lookups += 1
        return match(sequence)  # type: ignore[arg-type]

    monkeypatch.setattr(served.scheduler.prefix, "match", counted)
    for _ in range(15):
        before = lookups
        served.advance()
        assert lookups - before <= 2 * STEPS_ASIDE, "two plans a turn"
    assert served.scheduler.table.num_running == 1 and lookups > 15
    for request in requests[40:]:
        served.stack.front.put(cancel=engine_pb2.Cancel(handle=request.handle))
    served.finish()
    assert sorted(served.cached(request) for request in requests[:40]) == [0] + [39 * SIZE] * 39
    served.stack.assert_clean()


@pytest.mark.parametrize("seed", range(3))
def test_random_conversations_give_the_same_with_and_without(seed: int) -> None:
    """Prompts from few stems, cut at any length, through a pool that evicts and preempts."""
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
