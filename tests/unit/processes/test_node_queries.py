"""What nodes ask each other beside their engines."""

import pytest

from jdag.errors import JdagError, ProtocolError
from tests.tools.error_texts import fails_with
from tests.tools.rpc_nodes import cluster


def test_settling_has_an_end_and_says_who_does_not_settle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with cluster(("a", "b")) as c:
        c.driver.settle()
        questions = c.nodes["b"]._queries
        quiet = questions.quiet_now
        questions.quiet_now = lambda: {**quiet(), "idle": False}
        with monkeypatch.context() as patched:
            patched.setattr("jdag.processes.node_queries.SETTLE_S", 0.2)
            with fails_with(JdagError, "processes.not_settled_in_time"):
                c.driver.settle()
        del questions.quiet_now
        c.driver.settle()


def test_acknowledgements_that_are_under_way_are_counted_as_messages_are() -> None:
    with cluster(("a", "b")) as c:
        c.put("b", 1.0)
        c.driver.settle()
        (a, b) = (node.peers.connections for node in c.nodes.values())
        assert a["b"].sent.messages == b["a"].bundles.told == 1
        quiet = [node._queries.quiet() for node in c.nodes.values()]
        assert [(node["sent"], node["got"]) for node in quiet] == [(1, 1), (1, 1)]


def test_a_node_without_a_trace_has_none_to_send() -> None:
    with cluster(("a", "b")) as c:
        for asked in ({"what": "trace", "from": 0}, {"what": "weather"}):
            with fails_with(ProtocolError, "processes.unknown_query"):
                c.nodes["b"]._queries.answer(asked)
