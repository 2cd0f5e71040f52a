"""The report of a run: pictures, a page, and traces for other tools.

`render` makes it from the result, the trace and the graph that the run left in its
folder; with `read_drawings` it can be made again later.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import convert, to_builtins

from jdag.api.graph import Graph, dot_of, graph_of
from jdag.engine.drawing import Drawing
from jdag.errors import JdagError
from jdag.report.page import write_page
from jdag.report.perfetto import trace_events
from jdag.report.picture import draw_graph
from jdag.report.result import json_of
from jdag.report.spans import spans_of
from jdag.report.timeline import draw_timeline
from jdag.runtime.trace import Trace

TIMELINE = "timeline.png"
GRAPH = "graph.png"
GRAPH_DATA = "graph.json"
GRAPH_DOT = "graph.dot"
PERFETTO = "trace.perfetto.json"
PAGE = "index.html"
WRITTEN = (TIMELINE, GRAPH, GRAPH_DATA, GRAPH_DOT, PERFETTO, PAGE)


def render(
    folder: Path,
    result: Mapping[str, Any],
    trace: Trace | None,
    drawings: Graph | Mapping[str, Drawing] | None,
    *,
    window: tuple[int, int],
) -> None:
    """Write the pictures, the page and the other traces of a run into its folder.

    Args:
        folder: where they go; what is there of these names is replaced.
        result: what `result.json` holds.
        trace: the run's record; None: it has none, and so there is no timeline.
        drawings: the graph of one context, as `ctx.graph()` or `read_drawings` gives
            it; None draws none.
        window: the timeline's part of the run, in nanoseconds.

    Raises:
        OSError: something cannot be written.
    """
    name, workers = result["name"], result["workers"]
    pictures = []
    if trace is not None:
        read = spans_of(trace)
        title = f"{name}: what each worker did"
        draw_timeline(folder / TIMELINE, read, workers, window, title)
        _write_json(folder / PERFETTO, trace_events(read, workers))
        pictures.append((folder / TIMELINE, "Timeline", _ON_TIMELINE))
    if drawings is not None:
        graph = drawings if isinstance(drawings, Graph) else graph_of(drawings)
        _write_json(folder / GRAPH_DATA, to_builtins(graph))
        (folder / GRAPH_DOT).write_text(dot_of(graph, name), encoding="utf-8")
        if graph.vertices:
            title = f"{name}: the graph of one context"
            draw_graph(folder / GRAPH, graph, title)
            pictures.append((folder / GRAPH, "Graph", _ON_GRAPH))
    write_page(folder / PAGE, result, pictures)


def read_drawings(folder: Path) -> Graph | None:
    """Return the graph that `render` drew there, None if it drew none.

    Raises:
        JdagError: what is there is no graph.
        OSError: it cannot be read.
    """
    path = folder / GRAPH_DATA
    if not path.exists():
        return None
    try:
        return convert(json_of(path), Graph)
    except ValueError as error:
        raise JdagError(f"{path} holds no graph: {error!s} is wrong") from error


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, separators=(",", ":")), encoding="utf-8")


_ON_TIMELINE = (
    "A row is a worker. Numbers in bars are the paths of calls: a forward and the "
    "backward of the same number are one call. Below them, arrays on their way from "
    "this worker."
)
_ON_GRAPH = (
    "A column is the fragment of a worker: calls by their paths, the two ends of each "
    "transfer, and leaves, in which gradients accumulate. Arrows point the way of the "
    "forward pass; cotangents flow against them. In brackets stands how many the last "
    "pass awaited; a send that it did not need is grey, one that it is owed for red. "
    "graph.dot is the same for Graphviz."
)
