"""A run as one self-contained HTML page with tables and embedded pictures."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from jdag.report.formatting import formatted

Picture = tuple[Path, str, str]  # The file, its heading, what there is to see.

WORKER = "worker"
_ABOVE = ("outcome", "digest")  # They stand elsewhere on the page.
_LONG = ("error_message",)  # Shown below the table, as they have lines of their own.


def write_page(
    path: Path,
    result: Mapping[str, Any],
    pictures: Sequence[Picture],
    plan: str = "",
    gantt: Mapping[str, Any] | None = None,
    on_timeline: str = "",
) -> None:
    """Write the page of a result, with these pictures, a plan's table and a timeline.

    Raises:
        OSError: a picture cannot be read, or the page not be written.
    """
    environment = Environment(
        loader=PackageLoader("jdag.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # A name may be broken after each underscore.
    breaking = Markup("_<wbr>")
    environment.filters["breakable"] = lambda name: escape(name).replace("_", breaking)
    given = _given(result)
    tables, each = tables_of(result)
    text = environment.get_template("page.html").render(
        result=result,
        figures=[
            (name, formatted(name, value), result["meaning"].get(name, ""))
            for name, value in given.items()
            if name not in (*_LONG, *_ABOVE, *each)
        ],
        tables=tables,
        expected=[
            (
                one["figure"],
                one["wanted"],
                formatted(one["figure"], one["got"]),
                one["met"],
            )
            for one in result["expect"]
        ],
        long=[(name, str(given[name])) for name in _LONG if name in given],
        plan=plan,
        gantt=gantt,
        on_timeline=on_timeline,
        # Within a script nothing is escaped; only "</" could end it.
        gantt_data=Markup(
            json.dumps(gantt, separators=(",", ":")).replace("<", "\\u003c")
        ),
        pictures=[
            (b64encode(file.read_bytes()).decode(), heading, said)
            for file, heading, said in pictures
        ],
    )
    # File names and texts of programs may have surrogates, which UTF-8 cannot encode.
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def tables_of(result: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The figures with a value for each worker, or each element of a list, as tables.

    Returns:
        For each table `by`, its `heads` and `rows` of (name, values, what it is or
        None), and `said`, of (names, what they are), where it has a column for each
        figure; and the names of all figures in them, with the lists.
    """
    given = _given(result)
    found = _tables(given, result["workers"])
    tables = [_table(by, names, given, result) for by, names in found.items()]
    return tables, [name for by, names in found.items() for name in (by, *names)]


def _given(result: Mapping[str, Any]) -> dict[str, Any]:
    figures = result["figures"].items()
    return {name: one for name, one in figures if one not in (None, [], {})}


def _tables(given: Mapping[str, Any], workers: Sequence[str]) -> dict[str, list[str]]:
    """Return the figures with a value for each worker, or each element of another."""
    found: dict[str, list[str]] = {}
    lists = [n for n, one in given.items() if isinstance(one, list) and n != WORKER]
    for name, one in given.items():
        if not isinstance(one, Mapping):
            continue
        for by in (WORKER, *lists):
            if set(one) <= set(_rows(by, given, workers)):
                found.setdefault(by, []).append(name)
                break
    return found


def _table(
    by: str, names: Sequence[str], given: Mapping[str, Any], result: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a table: a row for each figure, or a column if figures are fewer."""
    keys = _rows(by, given, result["workers"])
    meanings = [result["meaning"].get(name, "") for name in names]
    rows = [
        (name, [formatted(name, given[name].get(key)) for key in keys])
        for name in names
    ]
    if len(names) >= len(keys):
        return {
            "by": by,
            "names": names,
            "said": [],
            "heads": ["figure", *keys, "what it is"],
            "rows": [(*row, said) for row, said in zip(rows, meanings, strict=True)],
        }
    columns = zip(*[values for _, values in rows], strict=True)
    said: dict[str, list[str]] = {}
    for name, meaning in zip(names, meanings, strict=True):
        said.setdefault(meaning, []).append(name)
    return {
        "by": by,
        "names": names,
        "said": [(", ".join(of), meaning) for meaning, of in said.items()],
        "heads": [by, *names],
        "rows": [
            (key, values, None) for key, values in zip(keys, columns, strict=True)
        ],
    }


def _rows(by: str, given: Mapping[str, Any], workers: Sequence[str]) -> Sequence[str]:
    return workers if by == WORKER else list(dict.fromkeys(map(str, given[by])))
