"""What two processes share nobody else has."""

from jdag.processes.net.shared_secrets import fresh_secret, secret_between


def test_two_are_known_to_each_other_by_what_nobody_else_is():
    session = fresh_secret()
    pairs = [("a#0", "b#0"), ("a#1", "b#0"), ("a#0", "c#0"), ("b#0", "c#0")]
    known = [secret_between(session, *pair) for pair in pairs]
    assert len(set(known)) == len(known)
    assert known == [secret_between(session, other, one) for one, other in pairs]
    assert known[0] != secret_between(fresh_secret(), *pairs[0])
