"""A run as one HTML page that needs nothing else: tables, and pictures inside it."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from jdag.shown import shown

Picture = tuple[Path, str, str]  # The file, its heading, what there is to see.

_ABOVE = ("outcome", "digest")  # They stand elsewhere on the page.
_LONG = ("error_message",)  # Shown below the table, as they have lines of their own.


def write_page(
    path: Path, result: Mapping[str, Any], pictures: Sequence[Picture]
) -> None:
    """Write the page of a result, with these pictures.

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
    environment.filters["breakable"] = _breakable
    figures, workers = result["figures"], result["workers"]
    given = {name: one for name, one in figures.items() if one not in (None, [], {})}
    each = [name for name, one in given.items() if _is_by_worker(one, workers)]
    text = environment.get_template("page.html").render(
        result=result,
        figures=[
            (name, shown(name, value), result["meaning"].get(name, ""))
            for name, value in given.items()
            if name not in (*_LONG, *_ABOVE, *each)
        ],
        each=[(name, result["meaning"].get(name, "")) for name in each],
        by_worker=[
            (worker, [shown(name, given[name].get(worker)) for name in each])
            for worker in workers
        ],
        expected=[
            (one["figure"], one["wanted"], shown(one["figure"], one["got"]), one["met"])
            for one in result["expect"]
        ],
        long=[(name, str(given[name])) for name in _LONG if name in given],
        pictures=[(_inside(file), heading, said) for file, heading, said in pictures],
    )
    path.write_text(text, encoding="utf-8")


def _breakable(name: str) -> Markup:
    """A name that may be broken after each underscore."""
    return escape(name).replace("_", Markup("_<wbr>"))


def _is_by_worker(value: Any, workers: Sequence[str]) -> bool:
    return isinstance(value, Mapping) and all(name in workers for name in value)


def _inside(picture: Path) -> str:
    """A picture as a URL that holds it whole."""
    return f"data:image/png;base64,{b64encode(picture.read_bytes()).decode()}"
