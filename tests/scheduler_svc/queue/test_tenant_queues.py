"""Both queues against a list that is sorted each time, under random operations."""

from __future__ import annotations

import random
from itertools import islice, product
from typing import Any

import pytest

from roster_protos import engine_pb2
from scheduler_svc.model.intake import build_request
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.policy.rank import Rank
from scheduler_svc.queue.tenant_queues import TenantQueues
from scheduler_svc.queue.waiting_queue import WaitingQueue
from tests.support.thoroughness import in_turn


def sequence(number: int, tenant: str, key: float) -> Sequence:
    prompt = pack([1] * (number % 5 + 1))
    submit = engine_pb2.Submit(handle=number, tenant=tenant, request_id=str(number), prompt=prompt, n=1, max_tokens=9)
    made = build_request(submit, b"", number, 0.0).sequences[0]
    made.rank = Rank.of((key,), number)
    return made


class Model:
    """Reference for the queues, by sorting."""

    def __init__(self, counters: dict[str, float]) -> None:
        self.counters = counters
        self.waiting: list[Sequence] = []
        self.aside: set[int] = set()

    def order(self, by_tenant: bool) -> list[Sequence]:
        def place(s: Sequence) -> Any:
            tenant = s.request.tenant
            return ((self.counters[tenant], tenant) if by_tenant else (), s.rank)

        return sorted((s for s in self.waiting if s.id not in self.aside), key=place)


@pytest.mark.parametrize(("by_tenant", "seed"), in_turn(product((False, True), range(6)), in_ci=4))
def test_order_is_that_of_sorting(seed: int, by_tenant: bool) -> None:
    rng = random.Random(seed)
    counters = dict.fromkeys("abcdef", 0.0)
    model = Model(counters)
    queue: WaitingQueue | TenantQueues = WaitingQueue()
    if by_tenant:
        queue = TenantQueues(counters.__getitem__, lambda tenant, by: pytest.fail("no arrival, no lift"))
    for number in range(1, 1500):
        action = rng.randrange(7)
        if action <= 2 or not model.waiting:
            new = sequence(number, rng.choice("abcdef"), float(rng.randrange(50)))
            queue.push(new)
            model.waiting.append(new)
        elif action == 3 and queue.peek() is not None:
            first = queue.pop()
            assert first is model.order(by_tenant)[0]
            model.waiting.remove(first)
            counters[first.request.tenant] += rng.randrange(20)
        elif action == 4:
            gone = rng.choice(model.waiting)
            queue.discard(gone)
            queue.discard(gone)
            model.waiting.remove(gone)
            model.aside.discard(gone.id)
        elif action == 5:
            moved = rng.choice(model.waiting)
            if moved.id in model.aside:
                queue.unpark(moved)
                model.aside.remove(moved.id)
            else:
                queue.park(moved)
                model.aside.add(moved.id)
        else:
            counters[rng.choice("abcdef")] += rng.randrange(20)
        order = model.order(by_tenant)
        assert queue.peek() is (order[0] if order else None)
        assert len(queue) == len(model.waiting)
        assert queue.num_tokens == sum(len(s.tokens) for s in model.waiting)
        assert {s.id for s in queue} == {s.id for s in model.waiting}
        if by_tenant and order:
            order = [s for s in order if s.request.tenant == order[0].request.tenant]
        looked_at = rng.choice([0, 0, 1, 5, len(order)])
        assert list(islice(queue.in_order(), looked_at)) == order[:looked_at]


def test_a_sequence_may_come_back_under_another_rank() -> None:
    queue = WaitingQueue()
    first, second = sequence(1, "a", 1.0), sequence(2, "a", 2.0)
    queue.push(first)
    queue.push(second)
    queue.discard(first)
    first.rank = Rank.of((3.0,), 1)
    queue.push(first)
    assert [queue.pop(), queue.pop()] == [second, first]
    with pytest.raises(IndexError):
        queue.pop()


def test_a_tenant_that_comes_back_is_lifted_to_the_least_that_waits() -> None:
    counters = {"busy": 100.0, "busier": 130.0, "back": 7.0, "later": 0.0}
    lifts: dict[str, float] = {}

    def lift(tenant: str, by: float) -> None:
        lifts[tenant] = by
        counters[tenant] += by

    queue = TenantQueues(counters.__getitem__, lift)
    queue.arrive("busy")
    assert not lifts, "the first tenant ever has no other to compare with"
    queue.push(sequence(1, "busy", 0))
    queue.arrive("busier")
    queue.push(sequence(2, "busier", 0))
    queue.arrive("back")
    assert lifts == {"back": 93.0}
    queue.push(sequence(3, "back", 0))
    queue.arrive("back")
    assert lifts == {"back": 93.0}, "it waits already"
    while queue:
        queue.pop()
    queue.arrive("later")
    assert counters["later"] == 130.0, "no tenant waits: lifted to the one that left last"
