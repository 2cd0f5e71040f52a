"""The dependencies of a pass on one worker: each edge counted is one to be awaited.

FAST counts once, on first sight of the pass: everything behind the roots and all sends
here. SMART counts what the roots need and nothing else, as marks come: from the roots
here, and from each slot of a send that a recv elsewhere is known to need. A recv that
is reached hands its slots on, each once.
"""

from collections.abc import Iterable

from jdag.engine.graph import Fragment, LeafEnd, Node, RecvEnd, SendEnd, Value, Vertex
from jdag.engine.share import Due, Pass
from jdag.engine.vocabulary import Marked, Mode, Path


def count(fragment: Fragment, live: Pass) -> Node | None:
    """Count every edge behind the roots here and, in FAST, behind all unspent sends."""
    values = [fragment.values[root.key] for root in live.roots]
    if live.mode is Mode.FAST:
        for send in fragment.sends.values():
            slots = [slot for slot, spent in enumerate(send.spent) if not spent]
            if slots:
                values.extend(_owe(live, send, slots))
    return _walk(live, values)


def mark(fragment: Fragment, live: Pass, transfers: Iterable[Marked]) -> Node | None:
    """Count every edge behind these slots of sends here."""
    values: list[Value] = []
    for marked in transfers:
        slots = [slot for slot, here in enumerate(marked.slots) if here]
        values.extend(_owe(live, fragment.sends[marked.path], slots))
    return _walk(live, values)


def _owe(live: Pass, send: SendEnd, slots: list[int]) -> list[Value]:
    """Count slots of a send: the send is one dependency, owed until it is answered."""
    counted = live.counted.get(send.path)
    if counted is None:
        counted = live.counted[send.path] = [False] * len(send.inputs)
        live.owed[send.path] = send
        live.unreported += 1
    values = []
    for slot in slots:
        value = send.inputs[slot]
        assert value is not None and not counted[slot], (send.path, slot)
        counted[slot] = True
        send.spent[slot] = send.spent[slot] or not live.retain
        values.append(value)
    return values


def _walk(live: Pass, values: Iterable[Value]) -> Node | None:
    """Count the edges to these values and all behind them.

    If the graph is not retained, what is counted is spent by that.

    Returns:
        None, or a node that was reached although an earlier pass had spent it.
    """
    spends = not live.retain
    smart = live.mode is Mode.SMART
    stack: list[Node] = []
    dues = live.dues
    while True:
        for value in values:
            vertex = value.producer
            if vertex is None:
                continue  # It was never here: its call holds the failure.
            due = dues.get(vertex)
            if due is None:
                if type(vertex) is LeafEnd:
                    due = dues[vertex] = Due(len(vertex.outputs))
                else:
                    due = dues[vertex] = Due(len(vertex.outputs))
                    if type(vertex) is Node:
                        if vertex.spent:
                            return vertex
                        vertex.spent = spends
                        stack.append(vertex)
            due.remaining += 1
            if smart and type(vertex) is RecvEnd:
                _need(live, vertex, value.index)
        if not stack:
            return None
        values = stack.pop().inputs


def _need(live: Pass, recv: RecvEnd, slot: int) -> None:
    needed = live.needed.setdefault(recv, {})
    if slot not in needed:
        needed[slot] = None
        live.untold.setdefault(recv, {})[slot] = None


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
