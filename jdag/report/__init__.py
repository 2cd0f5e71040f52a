"""Reports of runs: an HTML page, pictures, and traces in the formats of other tools.

`render` writes the page and the pictures of a run, from its result, trace and graph.
`read_drawings` reads the graph from a run's folder, to render the run again.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import convert, to_builtins

from jdag.context.graph import Graph, graph_of
from jdag.engine.graph_snapshot import GraphSnapshot
from jdag.errors import JdagError
from jdag.report.chakra import chakra_of
from jdag.report.gantt import gantt_of, lists_of
from jdag.report.goal import goal_of
from jdag.report.operations import operations_of
from jdag.report.page import write_page
from jdag.report.picture import draw_graph
from jdag.report.result import json_of
from jdag.report.spans import spans_of
from jdag.report.timeline import draw_timeline
from jdag.report.track_events import track_events
from jdag.runtime.trace import Trace
from jdag.schedules import from_lists, to_csv

TIMELINE = "timeline.png"
GRAPH = "graph.png"
GRAPH_DATA = "graph.json"
GRAPH_DOT = "graph.dot"
PERFETTO = "trace.pftrace"
PAGE = "index.html"
FORMATS = ("perfetto", "chakra", "goal", "torch")
WRITTEN = (TIMELINE, GRAPH, GRAPH_DATA, GRAPH_DOT, PERFETTO, PAGE)


def render(
    folder: Path,
    result: Mapping[str, Any],
    trace: Trace | None,
    drawings: Graph | Mapping[str, GraphSnapshot] | None,
    *,
    window: tuple[int, int],
) -> None:
    """Write the page and the pictures of a run. Replaces files with the same names.

    `result` has the contents of `result.json`. Without a trace, the report has
    no timeline. Without drawings, it has no graph. The timeline shows `window`, which
    is (from_ns, until_ns).
    """
    name, workers = result["name"], result["workers"]
    pictures, table, gantt, on_timeline = [], "", None, ""
    if trace is not None:
        is_real = trace.settings.get("driver") == "rpc"
        clock = "time" if is_real else "virtual time"
        gantt = gantt_of(spans_of(trace), workers, window, clock)
        draw_timeline(folder / TIMELINE, gantt, f"{name}: timeline of each worker")
        on_timeline = _ON_TIMELINE + (_on_clocks(trace.settings) if is_real else "")
    if drawings is not None:
        graph = drawings if isinstance(drawings, Graph) else graph_of(drawings)
        data = json.dumps(to_builtins(graph), separators=(",", ":"))
        (folder / GRAPH_DATA).write_text(data, encoding="utf-8")
        (folder / GRAPH_DOT).write_text(graph.dot(name), encoding="utf-8")
        if graph.vertices:
            title = f"{name}: the graph of one {'plan' if graph.table else 'context'}"
            draw_graph(folder / GRAPH, graph, title)
            caption = _ON_PLAN if graph.table else _ON_GRAPH
            pictures.append((folder / GRAPH, "Graph", caption))
        table = graph.table
    write_page(folder / PAGE, result, pictures, table, gantt, on_timeline)


def write_traces(
    folder: Path, trace: Trace, workers: Sequence[str], formats: Iterable[str]
) -> tuple[list[str], list[str]]:
    """Write the trace of a run in formats of other tools (`formats` from `FORMATS`).

    The files are `trace.pftrace` (perfetto), `trace.goal` (goal), `trace.N.et` of each
    worker (chakra) and `trace.csv` (torch): the order of the schedule's actions in
    PyTorch's format. N and ranks are indices into `workers`. Returns the names of the
    files, and an error text for each format that cannot represent this run.
    """
    formats = frozenset(formats)
    assert formats.issubset(FORMATS), formats
    operations, spans = operations_of(trace), spans_of(trace)
    files, refused = dict[str, bytes](), list[str]()
    if "perfetto" in formats:
        files[PERFETTO] = track_events(operations, spans.marks, workers)
    if "chakra" in formats:
        for rank, nodes in enumerate(chakra_of(operations, workers)):
            files[f"trace.{rank}.et"] = nodes
    if "torch" in formats:
        lists = lists_of(spans.jobs, workers)
        if any(lists):
            files["trace.csv"] = to_csv(from_lists([*filter(None, lists)])).encode()
        else:
            why = "expected a run with a schedule, but this run has no schedule"
            refused.append(f"trace format 'torch': {why}")
    if "goal" in formats:
        files["trace.goal"] = goal_of(operations, workers).encode()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [*files], refused


def read_drawings(folder: Path) -> Graph | None:
    """Return the graph in a folder, or None. Raises JdagError for an invalid file."""
    path = folder / GRAPH_DATA
    if not path.exists():
        return None
    try:
        return convert(json_of(path), Graph)
    except ValueError as error:
        raise JdagError(f"{path} is not a graph written by jdag: {error}") from error


def _on_clocks(settings: Mapping[str, Any]) -> str:
    worst_us = max(clock["error_ns"] for clock in settings["clocks"].values()) / 1000
    text = f" The clocks of two workers differ by at most {2 * worst_us:.0f} µs."
    for worker, why in settings["missing"].items():
        text += f" The trace of {worker} is missing or incomplete: {why}."
    return text


_ON_TIMELINE = (
    "Each row is a worker. The number in a bar identifies a call: a forward and a "
    "backward with the same number belong to one call. Under a schedule the number is "
    "the micro-batch, and two overlapped actions are drawn one above the other. "
    "Segments of plans have the names of their functions. The lower strip of a row "
    "shows the arrays that the worker is sending. timeline.png is the same chart as a "
    "picture."
)
_ON_PLAN = (
    "Each column is a worker, with its segments and the leaves that they read. The "
    "numbers of segments are those in the table below. Arrows are values. An arrow "
    "between two columns is one of the hops (messages) of the plan. graph.dot is the "
    "same graph for Graphviz."
)
_ON_GRAPH = (
    "Each column is one worker's part of the graph: its calls with their paths, the "
    "sends and receives of transfers, and leaves, which accumulate gradients. Arrows "
    "point in the direction of the forward pass; cotangents flow in the opposite "
    "direction. The number in brackets is the number of cotangents that the last "
    "backward pass waited for. A send that this pass did not need is grey. A send "
    "whose cotangent is missing is red. graph.dot is the same graph for Graphviz."
)
