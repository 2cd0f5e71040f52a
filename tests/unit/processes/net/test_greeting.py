"""Greetings without sockets: who knows the secret is let in, once, as who it is."""

from typing import NamedTuple

import pytest

from jdag.errors import JoinError
from jdag.processes.net.greeting import (
    ANSWER_BYTES,
    GIVEN_UP,
    HELLO_BYTES,
    OPENING,
    UNKNOWN,
    VERDICT,
    WELCOME,
    ConnectionPair,
    answered,
    hello_answer,
    is_by,
    opened,
    opening,
)
from jdag.processes.net.handshake import PROTOCOL
from tests.tools.error_texts import fails_with

PAIR = ConnectionPair("a#2", "b", "what a#2 and b share in their session")


class Heard(NamedTuple):
    """What the ends of a connection have said, in turn."""

    ours: bytes
    hello: bytes
    answer: bytes


def hello_to(ours: bytes, pair: ConnectionPair = PAIR, received: int = 7) -> bytes:
    said = opening(received)
    return said + pair.proof("dialler", ours, said)


@pytest.fixture
def heard() -> Heard:
    ours = opening()
    hello = hello_to(ours)
    return Heard(ours, hello, hello_answer(PAIR, ours, hello, WELCOME, 41))


def flipped(record: bytes, at: int) -> bytes:
    return record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]


def test_each_end_proves_itself_and_learns_what_the_other_has_received(heard: Heard):
    assert (len(heard.hello), len(heard.answer)) == (HELLO_BYTES, ANSWER_BYTES)
    assert is_by(PAIR, heard.ours, heard.hello) and opened(heard.hello, "", "") == 7
    assert answered(PAIR, *heard) == 41


def test_what_was_overheard_is_of_no_use_on_another_connection(heard: Heard):
    for _ in range(3):
        assert not is_by(PAIR, opening(), heard.hello)
        with fails_with(ConnectionError, "processes.does_not_prove"):
            answered(PAIR, heard.ours, hello_to(heard.ours), heard.answer)


def test_what_one_end_says_is_of_no_use_as_the_other_end(heard: Heard):
    said = heard.answer[: VERDICT.size]
    by_dialler = PAIR.proof("dialler", heard.ours, heard.hello, said)
    with fails_with(ConnectionError, "processes.does_not_prove"):
        answered(PAIR, heard.ours, heard.hello, said + by_dialler)
    said = heard.hello[: OPENING.size]
    by_listener = PAIR.proof("listener", heard.ours, said)
    assert not is_by(PAIR, heard.ours, said + by_listener)


@pytest.mark.parametrize(
    "other",
    [
        {"dialler": "b", "listener": "a#2"},
        {"dialler": "a"},
        {"dialler": "c"},
        {"listener": "b#1"},
        {"secret": PAIR.secret[:-1]},
        {"secret": ""},
    ],
    ids=["direction", "incarnation", "worker", "listener", "session", "no secret"],
)
def test_a_proof_is_of_both_workers_their_direction_and_session(
    heard: Heard, other: dict[str, str]
):
    pair = PAIR._replace(**other)
    assert not is_by(pair, heard.ours, heard.hello)
    assert not is_by(PAIR, heard.ours, hello_to(heard.ours, pair))
    theirs = hello_answer(pair, heard.ours, heard.hello, WELCOME, 41)
    with fails_with(ConnectionError, "processes.does_not_prove"):
        answered(PAIR, heard.ours, heard.hello, theirs)


def test_no_byte_of_what_was_said_can_be_changed(heard: Heard):
    for at in range(HELLO_BYTES):
        assert not is_by(PAIR, heard.ours, flipped(heard.hello, at)), at
    for at in range(OPENING.size):
        assert not is_by(PAIR, flipped(heard.ours, at), heard.hello), at
    for at in range(ANSWER_BYTES):
        changed = heard._replace(answer=flipped(heard.answer, at))
        with pytest.raises((ConnectionError, JoinError)) as caught:
            answered(PAIR, *changed)
        assert not getattr(caught.value, "given_up", False), at


def test_a_refusal_is_told_and_only_who_proves_itself_is_believed_to_give_up():
    ours = opening()
    hello = hello_to(ours)
    with fails_with(JoinError, "processes.worker_b_does_not_know_it") as caught:
        answered(PAIR, ours, hello, hello_answer(None, ours, hello, UNKNOWN))
    assert not caught.value.given_up
    with fails_with(JoinError, "processes.worker_b_has_given_it_up") as caught:
        answered(PAIR, ours, hello, hello_answer(PAIR, ours, hello, GIVEN_UP))
    assert caught.value.given_up
    with fails_with(ConnectionError, "processes.does_not_prove"):
        answered(PAIR, ours, hello, hello_answer(None, ours, hello, GIVEN_UP))


@pytest.mark.parametrize("theirs", [PROTOCOL - 1, PROTOCOL + 1])
def test_another_version_is_named_with_both(theirs: int):
    with pytest.raises(JoinError) as caught:
        opened(OPENING.pack(b"jdag", theirs, b"", 0), "worker 'b'", "this process")
    older = "worker 'b'" if theirs < PROTOCOL else "this process"
    assert str(caught.value) == (
        f"worker 'b' uses version {theirs} of jdag's protocol, and this process "
        f"uses version {PROTOCOL}; upgrade jdag for {older}"
    )


def test_what_is_no_greeting_is_said_to_be_none():
    with fails_with(ConnectionError, "processes.does_not_speak_jdags_protocol"):
        opened(b"HTTP".ljust(HELLO_BYTES), "it", "this worker")
