"""The states of workers, and what may follow: one table that code and errors read."""

import pytest

from jdag.errors import JoinError
from jdag.processes.session.membership import (
    ABSENT,
    IDLE,
    LEASE,
    MEMBER,
    Membership,
    Transitions,
    after,
)
from jdag.processes.session.requests import WorkerAddress
from tests.tools.error_texts import fails_with

NOBODY = WorkerAddress(incarnation=0, data="", allow=())
TABLES = {"member": MEMBER, "lease": LEASE}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_an_event_leads_on_as_the_table_says_or_names_the_states(table: Transitions):
    states = sorted({*[state for state, _ in table], *table.values()})
    events = sorted({event for _, event in table})
    for state in states:
        for event in events:
            if (state, event) in table:
                assert after(table, "it", state, event) == table[state, event]
                continue
            with pytest.raises(JoinError) as caught:
                after(table, "it", state, event)
            allowed = [one for one, known in table if known == event]
            assert str(caught.value) == (
                f"cannot {event} it: it is {state}; expected {' or '.join(allowed)}"
            )


@pytest.mark.parametrize("first", [ABSENT, IDLE])
def test_every_state_is_reached(first: str):
    table = MEMBER if first == ABSENT else LEASE
    reached = [first]
    for state in reached:
        following = [to for (one, _), to in table.items() if one == state]
        reached += [to for to in dict.fromkeys(following) if to not in reached]
    assert sorted(reached) == sorted({*table.values(), first})


def test_a_lost_worker_comes_back_as_the_next_incarnation():
    members = Membership("m", ["m", "a", "b"])
    assert members.next_incarnation("a") == 0
    for name in "ab":
        members.attach(name, 0)
    with fails_with(JoinError, "processes.a_has_joined_already"):
        members.next_incarnation("a")
    members.lose("a", 0, "it was silent")
    assert (members.lost, members.joined) == ({"a": "it was silent"}, ("b",))
    assert members.next_incarnation("a") == 1
    members.attach("a", 1)
    assert (members.lost, members.joined) == ({}, ("a", "b"))
    members.lose("a", 0, "that was the former one")
    assert members.incarnations == {"m": 0, "a": 1, "b": 0}


def test_a_newer_incarnation_replaces_one_that_nobody_missed():
    members = Membership("w", ["m", "w", "v"])
    members.attach("v", 0, NOBODY)
    members.attach("v", 2)
    members.attach("v", 2)  # Told twice.
    assert members["v"].incarnation == 2 and members.joined == ("v",)
    assert members.announced == {}  # Its address is not that of the former one.
    with fails_with(JoinError, "processes.incarnation_1_was_replaced"):
        members.attach("v", 1)


def test_more_may_become_known_of_a_worker_that_has_joined():
    members = Membership("w", ["m", "w", "v"])
    members.attach("v", 0)
    members.attach("v", 0, NOBODY, is_dialled=True)
    members.attach("v", 0)
    assert members.announced == {"v": NOBODY} and members["v"].is_dialled


def test_only_the_process_that_has_a_name_is_admitted():
    members = Membership("w", ["m", "w", "v"])
    members.attach("v", 1)
    members.admit("v", 1)
    with fails_with(JoinError, "processes.incarnation_0_was_replaced") as caught:
        members.admit("v", 0)
    assert caught.value.given_up
    for name in "wx":
        with fails_with(JoinError, "processes.is_not_a_peer"):
            members.admit(name, 0)
    members.lose("v", 1, "it was silent")
    with fails_with(JoinError, "processes.w_has_given_up_v") as caught:
        members.admit("v", 1)
    assert caught.value.given_up
