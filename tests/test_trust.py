"""Who may say what of a context."""

from typing import Any

import pytest

from jdag.engine.vocabulary import (
    Acknowledge,
    ContextId,
    Discard,
    Ended,
    Failure,
    Primal,
    Release,
    Released,
)
from jdag.errors import ProtocolError
from jdag.rpc.trust import check

NAMES = ("a", "b", "c")
OF_A = ContextId(0, 7, 0)
GONE = Failure("WorkerLost", "worker 'c' is lost", "c")


def said(message: Any, sender: str, here: str, **known: int) -> None:
    check(message, sender, here, NAMES, known)


def test_only_its_owner_ends_a_context() -> None:
    release = Release(OF_A, (), abort=False)
    said(release, "a", "b")
    with pytest.raises(ProtocolError, match="from 'c' to 'b': its owner is 'a'"):
        said(release, "c", "b")
    with pytest.raises(ProtocolError, match="its owner is 'a#1'"):
        said(Release(ContextId(0, 7, 1), (), abort=False), "a", "b", a=1)


def test_what_is_for_the_owner_comes_to_no_other() -> None:
    said(Released(OF_A, ()), "b", "a")
    with pytest.raises(ProtocolError, match="from 'c' to 'b': its owner is 'a'"):
        said(Released(OF_A, ()), "c", "b")


def test_a_context_of_an_incarnation_that_nobody_knows_is_refused() -> None:
    later = ContextId(1, 3, 2)
    for known in ({}, {"b": 1}):
        with pytest.raises(
            ProtocolError, match="incarnation 2 of 'b' is not known here"
        ):
            said(Acknowledge(later, (1,)), "c", "a", **known)
    said(Acknowledge(later, (1,)), "c", "a", b=2)


def test_values_are_from_whom_they_say_and_a_loss_may_be_told_by_others() -> None:
    said(Primal(OF_A, (1,), "c", (None,)), "c", "b")
    said(Primal(OF_A, (1,), "c", (GONE, GONE)), "a", "b")
    with pytest.raises(ProtocolError, match="values of 'c' came from 'a'"):
        said(Primal(OF_A, (1,), "c", (GONE, None)), "a", "b")


def test_what_names_no_context_is_for_the_engine_to_judge() -> None:
    said(Acknowledge(None, (1,)), "c", "a")
    said(Discard(OF_A, ()), "c", "b")


def test_ended_is_heard_by_the_owner_alone() -> None:
    ended = Ended.__new__(Ended)
    object.__setattr__(ended, "context", OF_A)
    with pytest.raises(ProtocolError, match="a Ended of"):
        said(ended, "c", "b")
