"""The least loaded runner with room is found whatever loads were noted before."""

from __future__ import annotations

from scheduler_svc.runners.size_class import SizeClass


def test_a_runner_whose_load_came_back_counts_once_among_those_that_are_asked() -> None:
    each = SizeClass(100)
    for load in (0.0, 1.0) * 10:
        each.note(1, load)
    each.note(1, 0.0)
    each.note(2, 5.0)
    for _ in range(2):
        asked: list[int] = []

        def has_room(session: int, asked: list[int] = asked) -> bool:
            asked.append(session)
            return session == 2

        assert each.least_loaded(has_room, 2) == 2
        assert asked == [1, 2]
