"""Tickets end in order: a named one ends all before it, and those that were not named are lost."""

from __future__ import annotations

import pytest

from scheduler_svc.kv.copy_times import CopyTimes
from scheduler_svc.kv.naming_secret import NamingSecret
from scheduler_svc.kv.tickets import Ticket, TicketLine, UnknownTicket


def line(sent: int, unsent: int = 0) -> TicketLine[Ticket]:
    tickets: TicketLine[Ticket] = TicketLine()
    for number in range(sent + unsent):
        if number == sent:
            tickets.send(plan=1)
        tickets.add(Ticket([number + 1], [number + 1]))
    if not unsent:
        tickets.send(plan=1)
    return tickets


def numbers(tickets: list[Ticket]) -> list[int]:
    return [ticket.number for ticket in tickets]


def test_a_confirmed_ticket_ends_those_before_it() -> None:
    tickets = line(5)
    done, lost = tickets.confirm([1, 4])
    assert (numbers(done), numbers(lost)) == ([1, 4], [2, 3])
    assert tickets.confirm([2]) == ([], []), "it has ended"
    assert numbers(tickets.lose()) == [5] and not len(tickets)


@pytest.mark.parametrize("named", [[4], [0], [2, 7], [-1, 1]])
def test_a_ticket_that_was_never_sent_is_refused_and_nothing_changes(named: list[int]) -> None:
    tickets = line(3, unsent=1)
    with pytest.raises(UnknownTicket):
        tickets.confirm(named)
    assert len(tickets.in_flight) == 3 and len(tickets) == 4


def test_numbers_go_on_over_plans() -> None:
    tickets = line(2, unsent=2)
    assert numbers(tickets.send(plan=9)) == [3, 4]
    assert [ticket.plan for ticket in tickets.in_flight] == [1, 1, 9, 9]


def test_copies_wait_for_those_before_them() -> None:
    times = CopyTimes(1_000_000)
    assert times.plan(10, now_s=1.0) == pytest.approx(1.01)
    assert times.plan(10, now_s=1.0) == pytest.approx(1.02)
    assert times.wait_s(1.0) == pytest.approx(0.02) and times.wait_s(2.0) == 0
    times.rest()
    assert times.wait_s(1.0) == 0


def test_times_are_corrected_by_what_copies_took() -> None:
    times = CopyTimes(1_000_000)
    for _ in range(40):
        times.note(64, 64 * 0.002)
    assert times.seconds(1) == pytest.approx(0.002, rel=0.01)
    unknown = CopyTimes(0)
    assert not unknown.known and unknown.seconds(5) == 0
    unknown.note(4, 0.0)
    assert unknown.known


def test_a_secret_is_adopted_only_before_its_first_use() -> None:
    former = NamingSecret().value
    secret = NamingSecret()
    assert secret.adopt(former) and secret.value == former
    used = NamingSecret()
    own = used.value
    assert not used.adopt(former) and used.value == own and used.adopt(own)
    assert not NamingSecret().adopt(b"short")
