"""Tickets: valid once, for a while, and not without number."""

import pytest

from jdag.errors import JoinError
from jdag.rpc.tickets import (
    LIFE_NS,
    TICKET_BYTES,
    TICKETS_MAX,
    Tickets,
    fresh_secret,
    secret_between,
)


def test_a_ticket_lets_one_worker_in_and_only_once():
    tickets = Tickets()
    issued = [tickets.issue(name, number) for number, name in enumerate("abc")]
    assert len({*issued}) == 3
    assert all(len(ticket) == TICKET_BYTES for ticket in issued)
    assert tickets.redeem(issued[1]) == ("b", 1)
    assert tickets.redeem(issued[1]) is None
    assert tickets.redeem(issued[0]) == ("a", 0)
    assert len(tickets._issued) == 1


def test_what_was_never_issued_lets_nobody_in():
    tickets = Tickets()
    ticket = tickets.issue("a", 0)
    for other in (b"", bytes(TICKET_BYTES), ticket[:-1], ticket + b"x"):
        assert tickets.redeem(other) is None
    assert tickets.redeem(ticket) == ("a", 0)


def test_a_ticket_expires(monkeypatch: pytest.MonkeyPatch):
    now_ns = [0]
    monkeypatch.setattr("time.monotonic_ns", lambda: now_ns[0])
    tickets = Tickets()
    late, in_time = tickets.issue("a", 0), tickets.issue("b", 0)
    now_ns[0] = LIFE_NS - 1
    assert tickets.redeem(in_time) == ("b", 0)
    now_ns[0] = LIFE_NS
    assert tickets.redeem(late) is None
    assert tickets._issued == []


def test_there_are_never_more_than_a_bound():
    tickets = Tickets()
    for _ in range(TICKETS_MAX):
        tickets.issue("a", 0)
    with pytest.raises(JoinError, match=f"{TICKETS_MAX} tickets are issued"):
        tickets.issue("a", 0)


def test_two_are_known_to_each_other_by_what_nobody_else_is():
    session = fresh_secret()
    pairs = [("a#0", "b#0"), ("a#1", "b#0"), ("a#0", "c#0"), ("b#0", "c#0")]
    known = [secret_between(session, *pair) for pair in pairs]
    assert len(set(known)) == len(known)
    assert known == [secret_between(session, other, one) for one, other in pairs]
    assert known[0] != secret_between(fresh_secret(), *pairs[0])
