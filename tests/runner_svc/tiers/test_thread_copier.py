"""The copier with threads: what it moves, in which order, and the troubles that tests ask for."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from runner_svc.tiers.kv_copier import Direction, DoneTicket, Tickets
from runner_svc.tiers.thread_copier import CopyTrouble, ThreadCopier

NONE = Tickets.none()


def regions(seed: int = 0) -> list[NDArray[np.uint8]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, shape, np.uint8) for shape in ((6, 9, 32), (1, 9, 5))]


def tickets(*pairs: list[tuple[int, int]]) -> Tickets:
    flat = [pair for ticket in pairs for pair in ticket]
    return Tickets(
        np.array([source for source, _ in flat], np.int32),
        np.array([target for _, target in flat], np.int32),
        np.array([len(ticket) for ticket in pairs], np.int32),
    )


def done_of(copier: ThreadCopier) -> list[tuple[Direction, int]]:
    copier.finish()
    return [(ticket.direction, ticket.ordinal) for ticket in copier.take_done()]


def test_all_regions_of_a_block_go_out_and_come_back() -> None:
    cache = regions()
    copier = ThreadCopier(cache, 4)
    assert copier.block_bytes == 6 * 32 + 5
    kept = [region.copy() for region in cache]
    copier.start(tickets([(1, 4), (7, 2)], [(3, 1)]), NONE)
    assert done_of(copier) == [(Direction.OFFLOAD, 1), (Direction.OFFLOAD, 2)]
    for region in cache:
        region[:] = 0
    copier.start(NONE, tickets([(2, 7)], [(4, 8), (1, 3)]))
    assert done_of(copier) == [(Direction.LOAD, 1), (Direction.LOAD, 2)]
    for region, was in zip(cache, kept, strict=True):
        assert (region[:, [7, 8, 3]] == was[:, [7, 1, 3]]).all()
        assert not region[:, [0, 1, 2, 4, 5, 6]].any()


def test_directions_go_on_beside_each_other_and_each_in_order() -> None:
    copier = ThreadCopier(regions(), 8, CopyTrouble(delay_s=0.02, seed=1))
    woken = threading.Semaphore(0)
    copier.on_done = woken.release
    copier.start(tickets([(1, 1)], [(2, 2)], [(3, 3)]), tickets([(4, 4)], [(5, 5)]))
    assert copier.in_flight > 0
    seen: list[DoneTicket] = []
    while len(seen) < 5:
        assert woken.acquire(timeout=20)
        seen += copier.take_done()
    for direction, count in ((Direction.OFFLOAD, 3), (Direction.LOAD, 2)):
        assert [ticket.ordinal for ticket in seen if ticket.direction is direction] == list(range(1, count + 1))
    assert not copier.in_flight and all(ticket.us >= 0 for ticket in seen)


def test_a_copy_is_beside_what_computes() -> None:
    """A block that is written in the middle of its ticket, which a plan may not do, arrives torn or changed."""
    cache = regions()
    copier = ThreadCopier(cache, 8, CopyTrouble(delay_s=0.3, seed=3))
    kept = cache[0].copy()
    copier.start(tickets([(block, block) for block in range(1, 9)]), NONE)
    time.sleep(0.01)
    cache[0][:] = 0
    copier.finish()
    copier.start(NONE, tickets([(block, block) for block in range(1, 9)]))
    copier.finish()
    assert not (cache[0][:, 1:] == kept[:, 1:]).all()


@pytest.mark.parametrize("lost", [0.0, 0.4, 1.0])
def test_troubles_are_the_same_for_the_same_seed(lost: float) -> None:
    def fates(seed: int) -> list[bool]:
        copier = ThreadCopier(regions(), 8, CopyTrouble(lost=lost, seed=seed))
        copier.start(tickets(*[[(1, 1)]] * 40), NONE)
        copier.finish()
        return [ticket.is_lost for ticket in copier.take_done()]

    assert fates(5) == fates(5)
    assert (fates(5) == fates(6)) == (lost != 0.4)
    assert sum(fates(5)) == {0.0: 0, 1.0: 40}.get(lost, sum(fates(5)))


def test_ordinals_begin_again() -> None:
    copier = ThreadCopier(regions(), 8)
    copier.start(tickets([(1, 1)], [(2, 2)]), NONE)
    copier.finish()
    copier.restart()
    assert copier.take_done() == []  # those of the session before
    copier.start(tickets([(1, 1)]), tickets([(2, 2)]))
    assert sorted(done_of(copier), key=str) == [(Direction.LOAD, 1), (Direction.OFFLOAD, 1)]


def test_an_error_ends_what_is_in_flight_and_is_raised_until_a_restart() -> None:
    copier = ThreadCopier(regions(), 8)
    copier.start(tickets([(1, 1)], [(99, 2)], [(3, 3)]), NONE)  # there is no block 99
    for call in (copier.finish, copier.take_done, lambda: copier.start(NONE, NONE)):
        with pytest.raises(IndexError):
            call()
    assert not copier.in_flight
    copier.restart()
    copier.start(tickets([(3, 3)]), NONE)
    assert done_of(copier) == [(Direction.OFFLOAD, 1)]


def test_tickets_are_split_by_their_counts() -> None:
    split = tickets([(1, 2), (3, 4)], [(5, 6)]).split()
    assert [(sources.tolist(), targets.tolist()) for sources, targets in split] == [([1, 3], [2, 4]), ([5], [6])]
    assert NONE.split() == []
