"""The report of a run: pictures, a page, and traces for other tools.

`render` makes it from the run's result, trace and graph. `read_drawings` reads the
graph from the run's folder, to render again later. Page and picture show one timeline.
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
    """Write the pictures and the page of a run into its folder.

    Args:
        folder: the target; existing files of the same names are replaced.
        result: the contents of `result.json`.
        trace: None: there is no timeline.
        drawings: the graph of one context or plan, from `ctx.graph()`, from
            `step.plan.graph()` or from `read_drawings`; None: no graph is drawn.
        window: the part of the run that the timeline shows, in nanoseconds.

    Raises:
        OSError: a file cannot be written.
    """
    name, workers = result["name"], result["workers"]
    pictures, table, gantt, on_timeline = [], "", None, ""
    if trace is not None:
        is_real = trace.settings.get("driver") == "rpc"
        clock = "time" if is_real else "virtual time"
        gantt = gantt_of(spans_of(trace), workers, window, clock)
        draw_timeline(folder / TIMELINE, gantt, f"{name}: what each worker did")
        on_timeline = _ON_TIMELINE + (_on_clocks(trace.settings) if is_real else "")
    if drawings is not None:
        graph = drawings if isinstance(drawings, Graph) else graph_of(drawings)
        data = json.dumps(to_builtins(graph), separators=(",", ":"))
        (folder / GRAPH_DATA).write_text(data, encoding="utf-8")
        (folder / GRAPH_DOT).write_text(graph.dot(name), encoding="utf-8")
        if graph.vertices:
            title = f"{name}: the graph of one {'plan' if graph.table else 'context'}"
            draw_graph(folder / GRAPH, graph, title)
            said = _ON_PLAN if graph.table else _ON_GRAPH
            pictures.append((folder / GRAPH, "Graph", said))
        table = graph.table
    write_page(folder / PAGE, result, pictures, table, gantt, on_timeline)


def write_traces(
    folder: Path, trace: Trace, workers: Sequence[str], formats: Iterable[str]
) -> tuple[list[str], list[str]]:
    """Write the whole trace of a run into its folder for other tools.

    Args:
        folder: the target of `trace.pftrace` (perfetto), `trace.goal` (goal) and one
            `trace.N.et` for each worker (chakra), and of `trace.csv`, the order of the
            actions of its one step in torch's schedule format, without times (torch).
        trace: of the run, from `read_trace`.
        workers: their names; N and ranks are places among them.
        formats: of `FORMATS`.

    Returns:
        The names of the files, and why other formats are not for this run.

    Raises:
        OSError: a file cannot be written.
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
            files["trace.csv"] = to_csv(from_lists([of for of in lists if of])).encode()
        else:
            why = "a run without actions of a schedule has no order to write"
            refused.append(f"trace format 'torch': {why}")
    if "goal" in formats:
        files["trace.goal"] = goal_of(operations, workers).encode()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [*files], refused


def read_drawings(folder: Path) -> Graph | None:
    """Return the graph that `render` wrote to a folder; None if there is none.

    Raises:
        JdagError: the file holds no graph.
        OSError: it cannot be read.
    """
    path = folder / GRAPH_DATA
    if not path.exists():
        return None
    try:
        return convert(json_of(path), Graph)
    except ValueError as error:
        raise JdagError(f"{path} holds no graph: {error!s} is wrong") from error


def _on_clocks(settings: Mapping[str, Any]) -> str:
    """What the times of processes are worth, and whose are missing."""
    errors = {name: one["error_ns"] for name, one in settings["clocks"].items()}
    worst_us = max(errors.values()) / 1000
    said = f" Times of two workers compare within {2 * worst_us:.0f} µs."
    for worker, why in settings["missing"].items():
        said += f" The trace of {worker} is missing, or ends too early: {why}."
    return said


_ON_TIMELINE = (
    "A row is a worker. Numbers in bars are the paths of calls: a forward and the "
    "backward of the same number are one call. Under a schedule they are "
    "micro-batches, and two actions that run as one lie above each other; segments of "
    "plans have the names of their functions. Below them, arrays on their way from "
    "this worker. timeline.png is the same as a picture."
)
_ON_PLAN = (
    "A column is a worker: its segments, by their numbers in the table below, and the "
    "leaves that they read. Arrows are values; those between columns are hops, one "
    "message each. graph.dot is the same for Graphviz."
)
_ON_GRAPH = (
    "A column is the fragment of a worker: calls by their paths, the two ends of each "
    "transfer, and leaves, in which gradients accumulate. Arrows point the way of the "
    "forward pass; cotangents flow against them. In brackets stands how many the last "
    "pass awaited; a send that it did not need is grey, one that it is owed for red. "
    "graph.dot is the same for Graphviz."
)
