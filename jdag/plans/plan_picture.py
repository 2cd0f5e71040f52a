"""Views of a plan: a table of its segments and hops (messages), and a graph."""

from collections.abc import Sequence

from jdag.compute.cutting import CutPlan, Piece
from jdag.context.graph import Edge, Graph, Vertex
from jdag.engine.protocol import LeafId, Worker, named
from jdag.engine.tables import begins_with_owner

_NAMES_MAX = 4  # Maximum number of functions named in a segment's label.
_OF = {"vjp": "vjp of ", "input_grad": "I of ", "weight_grad": "W of "}
_SEGMENTS = ("segment", "worker", "level", "nodes", "functions")
_HOPS = ("from", "to", "for segments", "values", "bytes")


def table_of_plan(name: str, cut: CutPlan, caller: Worker) -> str:
    pieces = list(enumerate(cut.pieces))
    segments = [
        (str(n), named(p.worker), str(p.level), str(len(p.nodes)), _label(p))
        for n, p in pieces
    ]
    # Inputs are sent in the message that begins a step.
    transfers: list[tuple[str, Worker, Worker, Sequence[int]]] = [
        ("caller", caller, to, slots) for to, slots in cut.inputs
    ]
    for index, piece in pieces:
        worker, source = piece.worker, f"{named(piece.worker)} {index}"
        transfers += [(source, worker, hop.to, hop.slots) for hop in piece.segment.hops]
    hops, total = [], 0
    for source, worker, to, slots in transfers:
        if to != worker:
            readers = [
                str(index)
                for index, piece in pieces
                if piece.worker == to and not {*slots}.isdisjoint(piece.segment.needs)
            ]
            nbytes = sum([cut.nbytes[slot] for slot in slots])
            total += nbytes
            feeds = ", ".join(readers) or "results"
            hops.append((source, named(to), feeds, str(len(slots)), f"{nbytes:,}"))
    others = [part for worker, part in cut.parts if worker != caller]
    sent = len([hop for hop in hops if hop[0] != "caller"])
    inputs = [worker for worker, _ in cut.inputs]
    begun = [w for w, part in cut.parts if w in inputs or begins_with_owner(part)]
    messages = len([worker for worker in begun if worker != caller]) + sent
    messages += len([part for part in others if part.reports])
    constants = dict.fromkeys([slot for part in others for slot in part.constants])
    lines = [
        f"plan of {name}: {len(segments)} segments on {len(cut.parts)} workers",
        *_columns(_SEGMENTS, segments),
        "",
        *_columns(_HOPS, hops),
        "",
        f"each step: {messages:,} messages, {total:,} bytes of values; before step "
        f"1: {sum([cut.nbytes[slot] for slot in constants]):,} bytes of constants",
    ]
    return "\n".join(lines)


def graph_of_plan(cut: CutPlan, table: str) -> Graph:
    """Return the graph of segments and leaves. Equal readers share a leaf vertex."""
    ids = [f"{named(piece.worker)}/segment {i}" for i, piece in enumerate(cut.pieces)]
    edges = [Edge(ids[edge.source], ids[edge.target]) for edge in cut.edges]
    vertices = []
    for worker, part in cut.parts:
        groups: dict[tuple[str, ...], list[LeafId]] = {}
        for read in part.reads:
            both = zip(ids, cut.pieces, strict=True)
            reading = [
                id
                for id, piece in both
                if piece.worker == worker and read.slot in piece.segment.needs
            ]
            groups.setdefault(tuple(reading), []).append(read.leaf)
        for readers, (leaf, *more) in groups.items():
            label = f"{len(more) + 1} leaves" if more else leaf.label
            vertices.append(Vertex(str(leaf), named(worker), "leaf", (), label))
            edges += [Edge(str(leaf), id) for id in readers]
    for index, piece in enumerate(cut.pieces):
        kind, label = "node" if piece.nodes else "send", f"{index} {_label(piece)}"
        vertices.append(Vertex(ids[index], named(piece.worker), kind, (index,), label))
    workers = tuple([named(worker) for worker, _ in cut.parts])
    return Graph(workers, tuple(vertices), tuple(dict.fromkeys(edges)), table=table)


def _label(piece: Piece) -> str:
    names = dict.fromkeys(
        [
            _OF.get(kind, "") + name.rpartition(":")[2].rstrip(")")
            for name, kind in piece.segment.function.costs
        ]
    )
    tag, action = piece.segment.tag, piece.segment.action
    acts = f"{tag.stage}{action}{tag.micro_batch} " if tag else ""
    shown, more = list(names)[:_NAMES_MAX], len(names) - _NAMES_MAX
    text = ", ".join(shown) + f" and {more} more" * (more > 0)
    return acts + text + " (update)" * piece.update if piece.nodes else "sends leaves"


def _columns(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [""] * (len(rows) + 1)
    for column in zip(names, *rows, strict=True):
        width = max(map(len, column))
        numbers = all([cell.replace(",", "").isdigit() for cell in column[1:]])
        for index, cell in enumerate(column):
            lines[index] += (cell.rjust if numbers else cell.ljust)(width) + "  "
    return [line.rstrip() for line in lines]
