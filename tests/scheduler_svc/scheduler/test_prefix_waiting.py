"""Sequences whose next block is being computed are parked: others pass them, and they return to the queue."""

from __future__ import annotations

import pytest

from roster_protos import engine_pb2
from scheduler_svc.scheduler.prefix_cache import STEPS_ASIDE
from tests.support.policies import policy_named
from tests.support.sharing import OUTPUT, SIZE, prompt, service


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


def test_others_pass_sequences_that_wait_for_a_block() -> None:
    served = service(step_tokens=4 * SIZE)
    requests = [served.stack.submit(prompt(2 * SIZE + 1), OUTPUT) for _ in range(3)]
    passing = served.stack.submit(prompt(SIZE, seed=9), OUTPUT)
    served.stack.step()
    assert served.scheduler.table.num_running == 2
    served.finish()
    assert sorted(served.cached(request) for request in [*requests, passing]) == [0, 0, 2 * SIZE, 2 * SIZE]


def test_a_blocks_owner_ranks_as_high_as_a_sequence_that_waits_for_it() -> None:
    """Sequences of a high class keep arriving and use every step. One of them waits for a block of the lowest class,
    and must not wait as long as that."""
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


def test_a_blocks_owner_and_a_sequence_that_waits_for_it_do_not_rank_the_same() -> None:
    """Regression: with equal ranks and full memory, neither could be preempted for the other, and both stopped
    forever."""
    served = service(slots=4, step_tokens=SIZE, policy="priority", num_blocks=16)
    low = served.stack.submit(prompt(6 * SIZE), 8 * SIZE, priority=0)
    served.advance()
    high = served.stack.submit(prompt(6 * SIZE), 8 * SIZE, priority=5)
    served.finish()
    assert served.cached(high) == 5 * SIZE and served.scheduler.preemptions
    assert served.cached(low) == 0


def test_an_owner_returns_to_its_own_rank_when_its_blocks_are_computed() -> None:
    """Otherwise a long job of the lowest class that once shared a prompt with the highest would keep its rank."""
    served = service(slots=4, step_tokens=SIZE, policy="priority", num_blocks=16)
    low = served.stack.submit(prompt(6 * SIZE), 8 * SIZE, priority=-5)
    served.advance()
    request = served.stack.engine.requests.book.by_key("", low.submit.request_id)
    assert request is not None
    sequence, alone = request.sequences[0], request.sequences[0].rank
    high = served.stack.submit(prompt(6 * SIZE), 3 * SIZE, priority=5)
    served.advance()
    assert sequence.rank.ahead and sequence.rank < alone
    served.advance(6)
    assert sequence.rank == alone and sequence.scheduler is served.scheduler
    middle = served.stack.submit(prompt(8 * SIZE, seed=9), 2 * SIZE, priority=0)
    served.advance(3)
    assert sequence.preemptions == 1, "it gives way to the class between"
    served.finish()
    assert served.cached(high) == 5 * SIZE and served.cached(middle) == 0
    served.cached(low)


def test_ranks_under_another_policy_are_its_own() -> None:
    """This includes the rank of a sequence that was moved ahead of another under the former policy."""
    served = service(slots=4, step_tokens=SIZE, policy="priority", num_blocks=64)
    requests = []
    for priority in (0, 5):
        requests.append(served.stack.submit(prompt(8 * SIZE), OUTPUT, priority=priority))
        served.advance()
    first, second = (served.stack.engine.requests.book.by_key("", request.submit.request_id) for request in requests)
    assert first is not None and second is not None
    sequences = [first.sequences[0], second.sequences[0]]
    assert sequences[0].rank == sequences[0].rank.ahead_of(sequences[1].rank), "it computes what the second waits for"
    served.stack.engine.change_policy(policy_named("fcfs"))
    assert [sequence.rank.ahead for sequence in sequences] == [0, 0] and sequences[0].rank < sequences[1].rank
    assert [sequence.rank.serial for sequence in sequences] == [sequence.rank.own for sequence in sequences]
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


def test_a_sequence_that_waits_for_a_block_can_be_cancelled() -> None:
    served = service(step_tokens=SIZE)
    requests = [served.stack.submit(prompt(4 * SIZE + 1), OUTPUT) for _ in range(3)]
    served.advance()
    served.stack.front.put(cancel=engine_pb2.Cancel(handle=requests[1].handle))
    served.stack.step()
    assert len(served.stack.engine.requests.queue) == 1
    served.finish()
    assert [served.cached(requests[0]), served.cached(requests[2])] == [0, 4 * SIZE]
    served.stack.assert_clean()


def test_returning_sequences_are_found_behind_many_cancelled_ones() -> None:
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


def test_a_flush_brings_back_sequences_that_wait_for_a_block() -> None:
    served = service(step_tokens=SIZE)
    requests = [served.stack.submit(prompt(8 * SIZE + 1), OUTPUT) for _ in range(3)]
    served.advance(2)
    assert served.scheduler.table.num_running == 1
    served.stack.front.put(flush_prefixes=engine_pb2.FlushPrefixes(handle=1))
    served.finish()
    # The second computes the prefix again, and the third waits for it.
    assert sorted(served.cached(request) for request in requests) == [0, 0, 8 * SIZE]
