"""Cancellation counted in steps, not in time: a cancelled sequence is in no later plan, whatever was in flight."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import product

import pytest

from roster_protos import engine_pb2
from runner_svc.backends.hash_backend import HashBackend
from tests.support.in_process import Stack
from tests.support.thoroughness import choice


@pytest.mark.parametrize(
    ("depth", "way"),
    choice(
        list(product((1, 2, 3), ("cancel", "disconnect", "cancel_by_id"))),
        in_ci=[(1, "cancel"), (2, "disconnect"), (3, "cancel_by_id")],
    ),
)
def test_a_cancelled_sequence_is_in_no_later_plan(depth: int, way: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    stack = Stack(depth=depth, max_waiting_requests=1000)
    backend = HashBackend(
        num_slots=4, block_size=4, num_blocks=40, max_step_tokens=24, context_length=128, eos_probability=0
    )
    session = stack.add_runner(backend)
    stack.front.put(watch=engine_pb2.Watch(on=True))
    cancelled_at: dict[str, int] = {}
    ended_at: dict[str, int] = {}
    planned_at: dict[str, int] = defaultdict(int)
    for step in range(1, 600):
        if step % 3 == 1 and step < 400:
            stack.submit([rng.randrange(256) for _ in range(rng.randrange(1, 40))], rng.randrange(1, 60))
        candidates = [r for r in stack.requests.values() if r.submit.request_id not in cancelled_at]
        if candidates and rng.random() < 0.25:
            request = rng.choice(candidates)
            end_it(stack, way, request.handle, request.submit.request_id)
            cancelled_at[request.submit.request_id] = step
        stack.step()
        for message in stack.others:
            for row in message.step_report.rows:
                planned_at[row.sequence.request_id] = step
        stack.others.clear()
        for request in stack.requests.values():
            identity, first = request.submit.request_id, request.first_sequence_id
            if first is not None and stack.streams[first].end is not None:
                ended_at.setdefault(identity, step)
        for _ in range(rng.randrange(3)):
            rng.choice((stack.runners.execute, stack.runners.deliver))(session)
    assert len(cancelled_at) > 50
    really = 0
    for identity, step in cancelled_at.items():
        assert planned_at[identity] < step, f"{identity} was planned after its cancellation"
        assert ended_at[identity] <= step, f"{identity} ended {ended_at[identity] - step} steps later"
        really += ended_at[identity] == step
    assert really > 20  # others had already ended
    for request in stack.requests.values():
        stack.front.put(cancel=engine_pb2.Cancel(handle=request.handle))
    stack.run(rng)
    stack.assert_clean()


def end_it(stack: Stack, way: str, handle: int, request_id: str) -> None:
    if way == "cancel":
        stack.front.put(cancel=engine_pb2.Cancel(handle=handle))
    elif way == "disconnect":
        stack.front.put(disconnect=engine_pb2.Disconnect(handle=handle))
    else:
        stack.front.put(cancel_by_id=engine_pb2.CancelById(handle=1 << 40, request_id=request_id))


def test_a_client_that_lost_its_connection_does_not_find_the_rest_cut_short() -> None:
    """One of two choices had ended: the request is forgotten, so that the returning client sends it again."""
    stack = Stack(retention_s=60, retention_requests=100)
    session = stack.add_runner(HashBackend(num_slots=4, block_size=4, num_blocks=40, eos_probability=0))
    request = stack.submit([1, 2, 3], 20, n=2)
    for _ in range(6):
        stack.step()
        stack.runners.execute(session)
        stack.runners.deliver(session)
    stack.front.put(cut=engine_pb2.Cut(sequence_id=request.first_sequence_id, num_tokens=2, stop_string="x"))
    stack.front.put(disconnect=engine_pb2.Disconnect(handle=request.handle))
    stack.step()
    assert stack.engine.requests.idle
    assert stack.engine.requests.book.by_key("", request.submit.request_id) is None, (
        "its Attach would find one choice cut short"
    )
