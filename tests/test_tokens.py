"""One-time tokens: good once, for a while, and not without number."""

import pytest

from jdag.errors import JoinError
from jdag.rpc.tokens import (
    TOKEN_BYTES,
    TOKENS_MAX,
    Tokens,
    fresh_secret,
    secret_between,
)


def test_a_token_lets_one_worker_in_and_only_once():
    tokens = Tokens()
    issued = [tokens.issue(name, number) for number, name in enumerate("abc")]
    assert len({*issued}) == 3
    assert all(len(token) == TOKEN_BYTES for token in issued)
    assert tokens.use(issued[1]) == ("b", 1)
    assert tokens.use(issued[1]) is None
    assert tokens.use(issued[0]) == ("a", 0)
    assert len(tokens) == 1


def test_what_was_never_issued_lets_nobody_in():
    tokens = Tokens()
    token = tokens.issue("a", 0)
    for other in (b"", bytes(TOKEN_BYTES), token[:-1], token + b"x"):
        assert tokens.use(other) is None
    assert tokens.use(token) == ("a", 0)


def test_a_token_expires():
    now_ns = [0]
    tokens = Tokens(life_s=5.0, clock_ns=lambda: now_ns[0])
    late, in_time = tokens.issue("a", 0), tokens.issue("b", 0)
    now_ns[0] = 4_999_999_999
    assert tokens.use(in_time) == ("b", 0)
    now_ns[0] = 5_000_000_000
    assert len(tokens) == 0
    assert tokens.use(late) is None


def test_there_are_never_more_than_a_bound():
    tokens = Tokens()
    for _ in range(TOKENS_MAX):
        tokens.issue("a", 0)
    with pytest.raises(JoinError, match=f"{TOKENS_MAX} tokens are issued"):
        tokens.issue("a", 0)


def test_two_are_known_to_each_other_by_what_nobody_else_is():
    session = fresh_secret()
    pairs = [("a#0", "b#0"), ("a#1", "b#0"), ("a#0", "c#0"), ("b#0", "c#0")]
    known = [secret_between(session, *pair) for pair in pairs]
    assert len(set(known)) == len(known)
    assert known == [secret_between(session, other, one) for one, other in pairs]
    assert known[0] != secret_between(fresh_secret(), *pairs[0])
