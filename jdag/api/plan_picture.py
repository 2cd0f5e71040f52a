"""A plan for readers: as a table of segments and hops, and as a graph of segments."""

from collections.abc import Sequence

from jdag.api.graph import Edge, Graph, Vertex
from jdag.compute.cutting import Cut, Piece
from jdag.engine.protocol import Worker, named

NAMES_MAX = 4  # Functions of a segment that a table names.


def table_of_plan(name: str, cut: Cut, caller: Worker) -> str:
    """Return segments and hops as text, with bytes for each step; a hop is a message.

    Inputs go with the message that begins a step.
    """
    segments = [
        (
            str(index),
            named(piece.worker),
            str(piece.level),
            str(len(piece.nodes)),
            _functions(piece, NAMES_MAX),
        )
        for index, piece in enumerate(cut.pieces)
    ]
    hops, total = _hops(cut, caller)
    workers = dict.fromkeys([worker for worker, _ in cut.parts])
    steps = [worker for worker in workers if worker != caller]
    reports = [w for w, part in cut.parts if part.reports and w != caller]
    from_segments = [hop for hop in hops if hop[0] != "caller"]
    messages = len(steps) + len(from_segments) + len(reports)
    constants = {slot for _, part in cut.parts for slot in part.constants}
    kept = sum([cut.nbytes[slot] for slot in constants])
    lines = [
        f"plan of {name}: {_count(len(segments), 'segment')} on "
        f"{_count(len(workers), 'worker')}",
        *_columns(("segment", "worker", "level", "nodes", "functions"), segments),
        "",
        *_columns(("from", "to", "for segments", "values", "bytes"), hops),
        "",
        f"each step: {total:,} bytes in {_count(messages, 'message')}"
        + (f"; once: {kept:,} bytes of constants" if kept else ""),
    ]
    return "\n".join(lines)


def _hops(cut: Cut, caller: Worker) -> tuple[list[Sequence[str]], int]:
    """The values that cross to other workers, as rows of a table, and their bytes."""
    going = [("caller", caller, to, slots) for to, slots in cut.inputs]
    for index, piece in enumerate(cut.pieces):
        for out in piece.segment.hops:
            going.append(
                (f"{named(piece.worker)} {index}", piece.worker, out.to, out.slots)
            )
    rows: list[Sequence[str]] = []
    total = 0
    for source, worker, to, slots in going:
        if to == worker or not slots:
            continue
        feeds = [
            str(index)
            for index, piece in enumerate(cut.pieces)
            if piece.worker == to and not {*slots}.isdisjoint(piece.segment.needs)
        ]
        nbytes = sum([cut.nbytes[slot] for slot in slots])
        where = ", ".join(feeds) or "results"
        rows.append((source, named(to), where, str(len(slots)), f"{nbytes:,}"))
        total += nbytes
    return rows, total


def graph_of_plan(cut: Cut) -> Graph:
    """Return the segments and leaves of a plan, and the values between them."""
    vertices, edges = [], []
    ids = [f"{named(p.worker)}/segment {i}" for i, p in enumerate(cut.pieces)]
    for _, part in cut.parts:
        for one in part.reads:
            worker, id = named(one.leaf.worker), str(one.leaf)
            vertices.append(Vertex(id, worker, "leaf", (), one.leaf.label))
            for index, piece in enumerate(cut.pieces):
                if named(piece.worker) == worker and one.slot in piece.segment.needs:
                    edges.append(Edge(id, ids[index]))
    for index, piece in enumerate(cut.pieces):
        kind = "node" if piece.nodes else "send"
        label = f"{index} {_functions(piece, NAMES_MAX)}"
        worker = named(piece.worker)
        vertices.append(Vertex(ids[index], worker, kind, (index,), label))
    edges += [
        Edge(ids[edge.source], ids[edge.target])
        for edge in cut.edges
        if edge.source is not None and edge.target is not None
    ]
    workers = dict.fromkeys([named(worker) for worker, _ in cut.parts])
    return Graph(tuple(workers), tuple(vertices), tuple(dict.fromkeys(edges)))


def _functions(piece: Piece, most: int) -> str:
    if not piece.nodes:
        return "sends leaves"
    called = [name.rpartition(":")[2] for name, _ in piece.segment.function.calls]
    names = list(dict.fromkeys(called))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}{' (update)' * piece.update}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _columns(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows under names; columns of numbers are flush right."""
    table = [names, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    right = [
        bool(rows) and all([cell.replace(",", "").isdigit() for cell in column])
        for column in zip(*rows, strict=True)
    ] or [False] * len(names)
    return [
        "  ".join(
            [
                cell.rjust(width) if is_right else cell.ljust(width)
                for cell, width, is_right in zip(row, widths, right, strict=True)
            ]
        ).rstrip()
        for row in table
    ]
