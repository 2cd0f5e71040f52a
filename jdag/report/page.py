"""The report of a run as a self-contained HTML page."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from jdag.report.formatting import formatted

Picture = tuple[Path, str, str]  # File, heading, caption.

WORKER = "worker"
_ELSEWHERE = ("outcome", "digest")  # Shown in the header and the footer.
_LONG = ("error_message",)  # Strings of several lines, shown below the table.


def write_page(
    path: Path,
    result: Mapping[str, Any],
    pictures: Sequence[Picture],
    plan: str = "",
    gantt: Mapping[str, Any] | None = None,
    on_timeline: str = "",
) -> None:
    environment = Environment(
        loader=PackageLoader("jdag.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Allow a line break after each underscore of a name.
    breaking = Markup("_<wbr>")
    environment.filters["breakable"] = lambda name: escape(name).replace("_", breaking)
    figures = _present_figures(result)
    tables, in_tables = tables_of(result)
    text = environment.get_template("page.html").render(
        result=result,
        figures=[
            (name, formatted(name, value), result["meaning"].get(name, ""))
            for name, value in figures.items()
            if name not in (*_LONG, *_ELSEWHERE, *in_tables)
        ],
        tables=tables,
        expected=[
            (name, each["wanted"], formatted(name, each["got"]), each["met"])
            for each in result["expect"]
            for name in [each["figure"]]
        ],
        long=[(name, str(figures[name])) for name in _LONG if name in figures],
        plan=plan,
        gantt=gantt,
        on_timeline=on_timeline,
        # A script element is not HTML-escaped, and "</" would end it.
        gantt_data=Markup(
            json.dumps(gantt, separators=(",", ":")).replace("<", "\\u003c")
        ),
        pictures=[
            (b64encode(file.read_bytes()).decode(), heading, caption)
            for file, heading, caption in pictures
        ],
    )
    # File names and error messages may contain surrogates, which UTF-8 cannot encode.
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def tables_of(result: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return tables of the metrics that have a value for each worker or list item.

    Returns:
        A list of tables, and the names of all metrics in these tables, including the
        metrics that are lists. A table has the keys `by` ("worker" or the name of the
        list metric), `names` (its metrics), `heads` (titles of its columns) and `rows`
        of (name, values, description or None). If the columns are metrics, `captions`
        has tuples of (names, description).
    """
    figures = _present_figures(result)
    names_by_key = _names_by_key(figures, result["workers"])
    tables = [
        _table(key, names, figures, result) for key, names in names_by_key.items()
    ]
    return tables, [n for key, names in names_by_key.items() for n in (key, *names)]


def _present_figures(result: Mapping[str, Any]) -> dict[str, Any]:
    figures = result["figures"].items()
    return {name: value for name, value in figures if value not in (None, [], {})}


def _names_by_key(
    figures: Mapping[str, Any], workers: Sequence[str]
) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    lists = [n for n, v in figures.items() if isinstance(v, list) and n != WORKER]
    for name, value in figures.items():
        if not isinstance(value, Mapping):
            continue
        for key in (WORKER, *lists):
            if set(value) <= set(_items(key, figures, workers)):
                names.setdefault(key, []).append(name)
                break
    return names


def _table(
    key: str,
    names: Sequence[str],
    figures: Mapping[str, Any],
    result: Mapping[str, Any],
) -> dict[str, Any]:
    items = _items(key, figures, result["workers"])
    meanings = [result["meaning"].get(name, "") for name in names]
    rows = [
        (name, [formatted(name, figures[name].get(item)) for item in items])
        for name in names
    ]
    table = {"by": key, "names": names}
    if len(names) >= len(items):
        return table | {
            "captions": [],
            "heads": ["metric", *items, "description"],
            "rows": [(*row, text) for row, text in zip(rows, meanings, strict=True)],
        }
    columns = zip(*[values for _, values in rows], strict=True)
    captions: dict[str, list[str]] = {}
    for name, meaning in zip(names, meanings, strict=True):
        captions.setdefault(meaning, []).append(name)
    return table | {
        "captions": [(", ".join(group), text) for text, group in captions.items()],
        "heads": [key, *names],
        "rows": [
            (item, values, None) for item, values in zip(items, columns, strict=True)
        ],
    }


def _items(
    key: str, figures: Mapping[str, Any], workers: Sequence[str]
) -> Sequence[str]:
    return workers if key == WORKER else list(dict.fromkeys(map(str, figures[key])))
