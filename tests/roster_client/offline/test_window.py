"""How many requests are in flight after refusals and answers."""

from __future__ import annotations

import asyncio

import pytest

from roster_client.offline.window import Window


async def entered(window: Window, count: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(window.enter()) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


def inside(tasks: list[asyncio.Task[None]]) -> int:
    return sum(task.done() and not task.cancelled() for task in tasks)


async def test_places_are_given_in_order_up_to_the_limit() -> None:
    window = Window(2)
    tasks = await entered(window, 4)
    assert [task.done() for task in tasks] == [True, True, False, False]
    window.leave()
    await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [True, True, True, False]
    tasks[3].cancel()
    await asyncio.sleep(0)
    window.leave()
    assert inside(await entered(window, 1)) == 1


async def test_a_place_that_a_cancelled_caller_just_got_is_free_again() -> None:
    window = Window(1)
    tasks = await entered(window, 2)
    window.leave()
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    assert inside(await entered(window, 1)) == 1


async def test_callers_cancelled_while_places_become_free_just_end() -> None:
    window = Window(1)
    waiting = (await entered(window, 3))[1:]
    for task in waiting:
        task.cancel()
    window.leave()  # passes over both before they run
    await asyncio.wait(waiting)
    assert all(task.cancelled() for task in waiting)
    assert inside(await entered(window, 1)) == 1


async def test_a_refusal_waits_for_the_given_time_or_an_answer() -> None:
    window = Window(8)
    assert inside(await entered(window, 8)) == 8
    for _ in range(5):
        window.refused(30.0)
        window.leave()
    more = await entered(window, 5)
    assert inside(more) == 0
    window.answered()
    window.leave()
    await asyncio.sleep(0)
    assert inside(more) == 1  # as many as the server had admitted
    for _ in range(4):
        window.answered()
    window.leave()
    await asyncio.sleep(0)
    assert inside(more) == 3  # and one more after some answers
    window.refused(0.02)
    window.leave()
    assert inside(more) == 3
    for _ in range(2):
        window.leave()
    await asyncio.sleep(0.1)
    assert inside(more) > 3


@pytest.mark.parametrize("retry_after_s", [None, 0.0])
async def test_one_request_is_always_let_in(retry_after_s: float | None) -> None:
    window = Window(1)
    await entered(window, 1)
    window.refused(retry_after_s)
    window.leave()
    await asyncio.wait_for(window.enter(), 5)
