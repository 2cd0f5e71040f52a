"""The pages that are generated from code: the command line and the keys of scenarios.

`write(folder)` writes them as Markdown; pages of docs/reference include them.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import typer
from msgspec import NODEFAULT, Meta
from msgspec.structs import fields

from jdag import sim
from jdag.cli import commands
from jdag.processes.launch import signals
from jdag.runtime.trace import DETAIL
from jdag.scenario import scenario_schema
from jdag.scenario.expectations import COMPARE
from jdag.scenario.player import FIGURES

# The tables of a scenario: heading, what it is, and the class with its keys.
TABLES: tuple[tuple[str, str | None, Any], ...] = (
    ("The file itself", "Top-level keys.", scenario_schema.ScenarioTable),
    (
        "`[network]`",
        "All links. A link of `[[network.links]]`, and `[network.control_lane]`, have "
        "the same keys of a link.",
        sim.LinkModel,
    ),
    (
        '`[network]` with `model = "loggp"`',
        "The keys of a LogGP link.",
        sim.LogGP,
    ),
    (
        "`[network.topology]`",
        "Physical links that pairs of workers share.",
        scenario_schema._TopologyTable,
    ),
    (
        "`[devices]`",
        "How long jobs of all devices take, in ns, by the kind of job. "
        "`[devices.workers.NAME]` has the same keys for one worker.",
        sim.DeviceModel,
    ),
    ("`[devices.roofline]`", "Times from operations and bytes.", sim.Roofline),
    (
        "`[schedule]`",
        "The order of a pipeline's work.",
        scenario_schema._ScheduleTable,
    ),
    ("`[link]`", "The timeouts of the simulated exactly-once link.", sim.LinkSettings),
    *(
        (f'`[[faults]]` with `kind = "{kind.__name__.lower()}"`', None, kind)
        for kind in (
            *(sim.Drop, sim.Delay, sim.Duplicate),
            *(sim.Partition, sim.Crash, sim.Slow),
        )
    ),
)
# Further keys of tables whose fields do not name them.
MORE_KEYS = {
    "`[network]`": (
        ("model", '`"alpha_beta"` (default) or `"loggp"`'),
        ("control_lane", "true, or a table of a link: a lane for all but values"),
        ("port_bandwidth_bytes_per_s", "of each worker, over all of its links"),
        ("topology", "a table, see below"),
        ("links", "a list of tables, each with `source`, `destination` and a link"),
    ),
    "`[devices]`": (("workers", "tables of devices by the name of a worker"),),
}
_NOUNS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def write(folder: Path) -> None:
    """Write all generated pages into a folder, replacing those that differ."""
    folder.mkdir(exist_ok=True)
    pages = {
        "command-line.md": command_line(),
        "scenario-keys.md": scenario_keys(),
        "figures.md": figures(),
        "trace-kinds.md": trace_kinds(),
    }
    for name, lines in pages.items():
        text = "\n".join(lines) + "\n"
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def command_line() -> Iterator[str]:
    """Yield a section for each command: what it does, its usage and its options."""
    for path in commands.COMMANDS:
        module, name = path.split(".")
        function = getattr(signals.import_command(f"jdag.cli.{module}"), name)
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name.replace("_", "-"))(function)
        yield from _command(typer.main.get_command(app))


def _command(command: Any) -> Iterator[str]:
    context = command.make_context(command.name, [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    yield from (f"## `jdag {command.name}`", "")
    yield from (_text(inspect.cleandoc(command.help or "")), "")
    yield from ("```text", f"jdag {command.name} {usage}", "```", "")
    yield from ("| argument or option | meaning |", "| --- | --- |")
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            names, meaning = record
            yield f"| `{_cell(names)}` | {_cell(_text(meaning))} |"
    yield ""


def _text(text: str) -> str:
    """Mark options, files and commands of a help text as code."""
    text = re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", text)
    return re.sub(r"\s*\[(default: [^\]]*|required)\]", r" (\1)", text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").strip()


def scenario_keys() -> Iterator[str]:
    """Yield a table of keys for each table of a scenario."""
    for heading, meaning, kind in TABLES:
        yield from (f"### {heading}", "")
        documentation = inspect.getdoc(kind) or ""
        summary = documentation.partition("\n\n")[0] if meaning is None else meaning
        yield from (" ".join(summary.split()), "")
        yield from ("| key | value | default |", "| --- | --- | --- |")
        described = _attributes(documentation)
        for field in fields(kind):
            value = _cell(described.get(field.name, "") or _allowed(field.type))
            yield f"| `{field.encode_name}` | {value} | {_default(field)} |"
        for key, value in MORE_KEYS.get(heading, ()):
            yield f"| `{key}` | {_cell(value)} | |"
        yield ""


def _attributes(documentation: str) -> Mapping[str, str]:
    """Return the descriptions in a docstring's section of attributes, by name."""
    section = documentation.partition("Attributes:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^ {4}([\w, ]+): ((?:.|\n {8})*)", section, re.MULTILINE)
    return {
        name.strip(): " ".join(text.split())
        for names, text in found
        for name in names.split(",")
    }


def _allowed(kind: Any) -> str:
    """Describe the values of a type, as errors do."""
    if get_origin(kind) is Annotated:
        inner, *metadata = get_args(kind)
        for meta in metadata:
            if isinstance(meta, Meta) and meta.description:
                return meta.description.replace(", or None for", "; left out:")
        bounds = [_bounds(meta) for meta in metadata if isinstance(meta, Meta)]
        return " ".join(filter(None, [_allowed(inner), *bounds]))
    if kind in _NOUNS:
        return _NOUNS[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if arguments and NoneType in arguments:
        return " or ".join(_allowed(each) for each in arguments if each is not NoneType)
    if origin in (dict, Mapping) or getattr(origin, "__name__", "") == "Mapping":
        return "a table"
    if origin is tuple:
        return "a list"
    if isinstance(kind, type) and hasattr(kind, "__struct_fields__"):
        return "a table, see below"
    return "see the class of this name in `jdag.sim`" if arguments else "a value"


def _bounds(meta: Meta) -> str:
    least = f">= {meta.ge}" if meta.ge is not None else ""
    most = f"<= {meta.le}" if meta.le is not None else ""
    return " and ".join(filter(None, [least, most]))


def _default(field: Any) -> str:
    if field.required:
        return "required"
    if field.default is NODEFAULT or field.default is None:
        return ""
    default = field.default
    text = str(default).lower() if isinstance(default, bool) else repr(default)
    return "" if default == () else f"`{text}`".replace("'", '"')


def figures() -> Iterator[str]:
    """Yield a table of the figures of a `Case`, for `[expect]`."""
    comparisons = ", ".join(f"`{name}`" for name in COMPARE)
    yield from (f"Comparisons: {comparisons}.", "")
    yield from ("| figure | meaning |", "| --- | --- |")
    for name, meaning in FIGURES.items():
        yield f"| `{name}` | {_cell(meaning)} |"


def trace_kinds() -> Iterator[str]:
    """Yield a table of the kinds of records, with the entries of their details."""
    yield from ("| kind | detail |", "| --- | --- |")
    for kind, names in DETAIL.items():
        yield f"| `{kind}` | {', '.join(f'`{name}`' for name in names)} |"
