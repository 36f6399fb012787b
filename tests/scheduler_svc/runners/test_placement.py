"""Placement of sequences on several runners; no sequence gets lost."""

from __future__ import annotations

import random
import time

import pytest

from runner_svc.backends.hash_backend import HashBackend
from runner_svc.execution.runner import Runner
from scheduler_svc.queue.waiting_queue import WaitingQueue
from scheduler_svc.runners.placement import Placement, _landmarks
from scheduler_svc.scheduler.scheduler import Scheduler
from tests.support.in_process import Stack, Submitted
from tests.support.lockstep import advance, advance_until_idle

NO_EOS = 0.0


def backend(slots: int = 4, num_blocks: int = 64, block_size: int = 4) -> HashBackend:
    return HashBackend(
        num_slots=slots,
        block_size=block_size,
        num_blocks=num_blocks,
        max_step_tokens=32,
        context_length=256,
        eos_probability=NO_EOS,
    )


def stack_with(runners: int, **settings: object) -> Stack:
    stack = Stack(**settings)
    for _ in range(runners):
        stack.add_runner(backend())
    stack.step()
    return stack


def finish(stack: Stack, requests: list[Submitted]) -> None:
    advance_until_idle(stack)
    for request in requests:
        for index, stream in enumerate(request.streams):
            assert stream.tokens == request.expected(index, NO_EOS)
    stack.assert_clean()


def running(stack: Stack) -> dict[int, int]:
    return {session: s.table.num_running for session, s in stack.engine.pool.schedulers.items()}


def test_new_work_spreads_by_load() -> None:
    stack = stack_with(3)
    requests = [stack.submit([number], 40) for number in range(6)]
    advance(stack, 2)
    assert list(running(stack).values()) == [2, 2, 2]
    finish(stack, requests)


def test_no_sequence_waits_behind_a_long_prompt_if_another_runner_is_free() -> None:
    """By slots alone the runner with the long prompt would be the less loaded."""
    stack = stack_with(2, policy_parameters={"step_tokens": 16})
    requests = [stack.submit([number], 60) for number in range(4)]
    advance(stack, 3)
    requests.append(stack.submit([7] * 200, 4))
    advance(stack, 2)
    busy = next(s for s in stack.engine.pool.schedulers.values() if s.table.backlog)
    assert 100 < busy.table.backlog < 200
    requests += [stack.submit([number] * 10, 30) for number in (8, 9)]
    advance(stack, 5)
    assert all(len(request.streams[0].tokens) for request in requests[-2:])
    assert busy.table.backlog
    assert sorted(running(stack).values()) == [3, 4]
    finish(stack, requests)


def test_a_prefix_draws_its_like_unless_the_runner_is_much_busier() -> None:
    stack = stack_with(2, prefix_sharing=True)
    prefix = [9, 8, 7, 6] * 8
    first = stack.submit([*prefix, 1], 60)
    other = stack.submit([5], 60)
    advance(stack, 5)
    home = next(s for s in stack.engine.pool.schedulers.values() if len(s.table.running()[0].log) > 30)
    second = stack.submit([*prefix, 2], 60)
    advance(stack, 2)
    assert home.table.num_running == 2 and home.cached_tokens == 32
    filler = [stack.submit([40 + number], 60) for number in range(2)]
    advance(stack, 2)
    third = stack.submit([9, 8, 7, 6, 3], 60)  # 4 positions are not worth a busier runner
    advance(stack, 2)
    assert max(running(stack).values()) <= 4
    finish(stack, [first, other, second, *filler, third])


def test_a_runner_that_joins_takes_load_at_once() -> None:
    stack = stack_with(1)
    requests = [stack.submit([number], 50) for number in range(10)]
    advance(stack, 3)
    assert list(running(stack).values()) == [4]
    joined = stack.add_runner(backend())
    advance(stack, 2)
    assert running(stack)[joined] == 4
    finish(stack, requests)


@pytest.mark.parametrize("how", ["leave", "kill"])
def test_the_sequences_of_a_runner_that_goes_run_elsewhere(how: str) -> None:
    stack = stack_with(2)
    requests = [stack.submit([number, number], 60, n=2) for number in range(6)]
    advance(stack, 5)
    gone, stays = list(stack.runners.runners)
    if how == "kill":
        stack.runners.kill(gone)
    else:
        plans = len(stack.engine.pool.schedulers[gone].in_flight)
        assert plans
        stack.runners.leave(gone)
        stack.step()
        assert not stack.runners.plans[gone] or gone in stack.engine.pool.schedulers, "it finishes its plans in flight"
    advance(stack, 3)
    assert list(stack.engine.pool.schedulers) == [stays]
    finish(stack, requests)


def test_runners_come_and_go_all_the_time() -> None:
    for seed in range(6):
        rng = random.Random(seed)
        stack = stack_with(2, depth=rng.randrange(1, 4), prefix_sharing=bool(seed % 2), no_runner_s=1e9)
        prefixes = [[rng.randrange(4) for _ in range(rng.randrange(30))] for _ in range(3)]
        requests = []
        for _ in range(400):
            if rng.random() < 0.1:
                prompt = [*rng.choice(prefixes), rng.randrange(4)]
                requests.append(stack.submit(prompt, rng.randrange(1, 40), n=rng.choice([1, 1, 3])))
            if rng.random() < 0.04 and len(stack.runners.runners) < 5:
                stack.add_runner(backend(slots=rng.randrange(1, 5), num_blocks=rng.randrange(50, 80)))
            sessions = list(stack.runners.runners)
            if rng.random() < 0.02 and len(sessions) > 1:
                stack.runners.leave(rng.choice(sessions))
            stack.turn(rng)
        finish(stack, requests)


def test_placing_costs_the_same_with_a_thousand_runners() -> None:
    """Counts the runners that are checked for room, instead of measuring time."""
    queue = WaitingQueue()
    placement = Placement(lambda: queue, lambda session: None)
    asked = 0
    has_room = placement._has_room

    def counting(session: int, sequence: object) -> bool:
        nonlocal asked
        asked += 1
        return has_room(session, sequence)  # type: ignore[arg-type]

    placement._has_room = counting  # type: ignore[method-assign, assignment]
    hello = Runner(backend()).hello()
    for session in range(1000):
        placement.join(session, Scheduler(hello))
    stack = stack_with(1)
    requests = [stack.submit([number % 50], 5) for number in range(1000)]
    stack.step()
    sequences = [s for request in stack.engine.requests.book.live() for s in request.sequences]
    assert len(requests) == len(sequences) == 1000
    begin = time.monotonic()
    for sequence in sequences:
        sequence.scheduler = None
        queue.push(sequence)
    placement.place()
    print(f"{(time.monotonic() - begin) * 1e3:.1f} ms for 1,000 sequences")
    assert asked <= 2000
    assert all(placement.queue_for(session).num_waiting == 1 for session in range(1000))  # type: ignore[union-attr]


def test_landmarks_are_few_and_include_the_longest() -> None:
    for count in range(40):
        names = [bytes([number]) for number in range(count)]
        landmarks = _landmarks(names)
        assert landmarks == sorted(landmarks) and set(landmarks) <= set(names) and len(landmarks) <= 7
        assert not names or (landmarks[-1] == names[-1] and landmarks[0] == names[0])
