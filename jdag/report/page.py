"""A run as one HTML page that needs nothing else: tables, and pictures inside it."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from jdag.shown import shown

Picture = tuple[Path, str, str]  # The file, its heading, what there is to see.

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
    figures = result["figures"]
    given = {name: one for name, one in figures.items() if one not in (None, [], {})}
    text = environment.get_template("page.html").render(
        result=result,
        figures=[
            (name, shown(name, value), result["meaning"].get(name, ""))
            for name, value in given.items()
            if name not in _LONG
        ],
        expected=[
            (one["figure"], one["wanted"], shown(one["figure"], one["got"]), one["met"])
            for one in result["expect"]
        ],
        long=[(name, str(given[name])) for name in _LONG if name in given],
        pictures=[(_inside(file), heading, said) for file, heading, said in pictures],
    )
    path.write_text(text, encoding="utf-8")


def _inside(picture: Path) -> str:
    """A picture as a URL that holds it whole."""
    return f"data:image/png;base64,{b64encode(picture.read_bytes()).decode()}"
