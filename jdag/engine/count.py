"""The dependencies of a pass on one worker: each edge counted is one to be awaited."""

from jdag.engine.graph import Fragment, LeafEnd, Node, RecvEnd, SendEnd, Vertex
from jdag.engine.tree import Due, Pass
from jdag.engine.vocabulary import Path


def count(fragment: Fragment, live: Pass) -> Vertex | None:
    """Count every edge behind the roots and the unspent sends here.

    Each unspent send is one dependency of its own, owed until its cotangents come. If
    the graph is not retained, what is counted is spent by that.

    Returns:
        None, or a vertex that was reached although an earlier pass had spent it.
    """
    spends = not live.retain
    stack: list[Vertex] = []
    values = [fragment.values[root.key] for root in live.roots]
    for send in fragment.sends.values():
        if not send.spent:
            send.spent = spends
            live.owed[send.path] = send
            values.extend(value for value in send.inputs if value is not None)
    live.unreported += len(live.owed)
    dues = live.dues
    while True:
        for value in values:
            vertex = value.producer
            if vertex is None:
                continue  # It was never here: its call holds the failure.
            due = dues.get(vertex)
            if due is None:
                if vertex.spent:
                    return vertex
                if type(vertex) is LeafEnd:
                    due = dues[vertex] = Due(len(vertex.outputs))
                else:
                    vertex.spent = spends
                    due = dues[vertex] = Due(len(vertex.outputs))
                    if vertex.inputs:
                        stack.append(vertex)
            due.remaining += 1
        if not stack:
            return None
        values = stack.pop().inputs  # type: ignore[assignment]  # Never a SendEnd.


def path_of(vertex: Vertex) -> Path:
    """The path of the call that made a vertex; a leaf has none."""
    return () if isinstance(vertex, LeafEnd) else vertex.path


def describe(vertex: Vertex) -> str:
    """Name a vertex for an error: what it is, of which call, from where."""
    match vertex:
        case Node(function=function, path=path, call_site=site):
            return f"{getattr(function, 'name', function)} (call {path}, {site})"
        case SendEnd(function=function, path=path, call_site=site):
            return f"the send to {function} (call {path}, {site})"
        case RecvEnd(path=path, source=source):
            return f"the recv from {source!r} of call {path}"
        case _:
            return f"{vertex.leaf}"
