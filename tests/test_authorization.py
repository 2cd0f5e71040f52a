"""Who may say what of a context."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from jdag.engine.protocol import (
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
from jdag.rpc.authorization import check
from tests.rpc_breaking import Breaking, breaking
from tests.stream_cases import soon
from tests.test_mad_peers import small_program

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
    with pytest.raises(ProtocolError, match="from 'c' to 'a': its owner is 'a'"):
        said(release, "c", "a")
    with pytest.raises(ProtocolError, match="its owner is 'a#1'"):
        said(Release(ContextId(0, 7, 1), (), abort=False), "a", "b", a=1)


def test_what_is_for_the_owner_comes_to_no_other() -> None:
    said(Released(OF_A, ()), "b", "a")
    with pytest.raises(ProtocolError, match="from 'c' to 'b': its owner is 'a'"):
        said(Released(OF_A, ()), "c", "b")
    with pytest.raises(ProtocolError, match="from 'a' to 'b': its owner is 'a'"):
        said(Released(OF_A, ()), "a", "b")
    with pytest.raises(ProtocolError, match="a Ended of"):
        said(Ended(OF_A, 1, (), (), (), None), "c", "b")
    # What names no owner is for the engine to judge.
    said(Acknowledge(None, ((1,),)), "c", "a")
    said(Discard(OF_A, ()), "c", "b")


def test_a_context_of_an_incarnation_that_nobody_knows_is_refused() -> None:
    later = ContextId(1, 3, 2)
    for known in ({}, {"b": 1}):
        with pytest.raises(
            ProtocolError, match="incarnation 2 of 'b' is not known here"
        ):
            said(Acknowledge(later, ((1,),)), "c", "a", **known)
    said(Acknowledge(later, ((1,),)), "c", "a", b=2)


def test_values_are_from_whom_they_say_and_a_loss_may_be_told_by_others() -> None:
    said(Primal(OF_A, (1,), "c", (None,)), "c", "b")
    said(Primal(OF_A, (1,), "c", (GONE, GONE)), "a", "b")
    with pytest.raises(ProtocolError, match="values of 'c' came from 'a'"):
        said(Primal(OF_A, (1,), "c", (GONE, None)), "a", "b")


def lost_of(nodes: Breaking, lie: Any) -> str:
    """Why `b` and then main have lost `c`, which says this to `b`."""
    liar, told = nodes.nodes["c"], nodes.nodes["b"]
    values = [np.ones(3)] * getattr(lie, "failures", ()).count(None)
    with liar._loop:
        liar.peers.connections["b"].send(lie, values)
    for node in (told, nodes.nodes["a"]):
        soon(partial(node.peers.gone.__contains__, "c"))
    assert told.peers.gone["c"] == nodes.nodes["a"].peers.gone["c"]
    return told.peers.gone["c"]


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (Release(OF_A, (), abort=True), "a Release of 0.7 from 'c' to 'b': its owner"),
        (Primal(OF_A, (1,), "a", (GONE, None)), "values of 'a' came from 'c'"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_who_speaks_for_another_is_lost_by_name_and_the_others_go_on(
    lie: Any, words: str
) -> None:
    with breaking() as nodes:
        before = small_program(nodes.cluster)
        assert words in lost_of(nodes, lie)
        assert small_program(nodes.cluster) == before
        assert "c" not in nodes.nodes["a"].peers.incarnations
