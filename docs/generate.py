"""The pages that are generated: the command line, the keys of scenarios, results.

Pages of docs/reference include those of docs/_generated; results of paper/ are copied
to docs/validation/results.
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
_FRAMES = {
    "probability": "of each frame",
    "source": "worker that sends; left out: all",
    "destination": "worker that receives; left out: all",
    "from_ns": "when the fault begins",
    "until_ns": "when it ends; left out: never",
}
_LINK = {
    "latency_ns": "time from a frame's departure to its arrival",
    "bandwidth_bytes_per_s": "frames occupy the link for size / bandwidth",
    "jitter_ns": "largest random delay that is added to a frame",
}
# What keys mean whose classes describe them elsewhere, by the table's class.
MEANINGS: dict[str, dict[str, str]] = {
    "ScenarioTable": {
        "name": "of the scenario, and of its folder in `runs/`",
        "program": "the function that returns the program",
        "workers": "the workers",
        "expect": "the expected figures, see below",
        "costs": "a file of `jdag calibrate`, with `[network]` and `[devices]`",
        "home": "the worker that runs the main program; left out: the first",
        "seed": "of all random choices",
        "seeds": "number of runs, with as many seeds from `seed` on",
        "x64": "whether JAX uses 64 bits",
        "compile": "whether passes run by `jdag.compile`",
        "host_devices": "number of CPU devices",
        "values": "whether JAX computes, or only shapes and dtypes",
        "policy": "the order of ready jobs",
        "events_max": "limit of events of a run",
        "nesting_max": "how deep programs may call each other",
        "settings": "keyword arguments of the program",
        "placement": "the worker of a parameter, in place of the program's",
        "network": "links, see below",
        "link": "timeouts of links, see below",
        "devices": "durations of jobs, see below",
        "schedule": "the order of a pipeline's work, see below",
        "faults": "faults, each a table, see below",
    },
    "LinkModel": _LINK,
    "LogGP": {
        **_LINK,
        "overhead_ns": "o: time at the sender and again at the receiver",
        "gap_ns": "g: the least time between two messages",
    },
    "_TopologyTable": {
        "kind": "in place of `dimensions`",
        "workers": "left out: all",
        "dimensions": "each with `kind`, `size`, `arity` and the keys of its links",
        "cut_through": "whether a node forwards a message before all of it is there",
        "arity": "of a tree",
        "shape": "of a torus: a list of sizes",
        **_LINK,
    },
    "DeviceModel": {
        "functions": "durations: `{ layer = [1_000, 1_500, 500] }` has F, I "
        "and W in ns, two numbers are F and B. `jdag run FILE --functions` prints the "
        'names. A name may have its module and the types of its inputs, `"shapes:layer('
        'float32[8,4])"`; an entry with types takes precedence',
    },
    "Roofline": {
        "flops_per_s": "operations per second",
        "bytes_per_s": "bytes of memory per second",
    },
    "_ScheduleTable": {
        "kind": "a builder of `jdag.schedules`, in place of `lists`",
        "stages": "number of stages",
        "micro_batches": "number of micro-batches",
        "chunks": "stages of each worker, of `interleaved`",
        "workers": "left out: all",
        "lists": 'the actions of each worker, such as `"0F0 0F1 0B0 0B1"`',
    },
    "Drop": _FRAMES,
    "Delay": {**_FRAMES, "delay_min_ns": "least delay", "delay_max_ns": "most"},
    "Duplicate": {**_FRAMES, "delay_max_ns": "largest delay of the second copy"},
    "Partition": {
        "groups": "lists of workers that cannot reach each other",
        "from_ns": _FRAMES["from_ns"],
        "until_ns": _FRAMES["until_ns"],
    },
    "Crash": {
        "at_ns": "when it happens; or `at_index`",
        "at_index": "number of trace records at which it happens",
    },
    "Slow": {
        "worker": "whose jobs take longer",
        "factor": "of the durations",
        "from_ns": _FRAMES["from_ns"],
        "until_ns": _FRAMES["until_ns"],
    },
}
# Further keys of tables whose fields do not name them.
MORE_KEYS = {
    "`[network]`": (
        ("model", "the class of the link", "one of alpha_beta (default), loggp"),
        ("control_lane", "a lane for all but values", "true, or a table of a link"),
        (
            "port_bandwidth_bytes_per_s",
            "of a worker, over all links",
            "an integer >= 1",
        ),
        ("topology", "physical links, see below", "a table"),
        ("links", "each with `source`, `destination` and a link", "a list of tables"),
    ),
    "`[devices]`": (("workers", "devices by the name of a worker", "tables"),),
}
# Of results that begin with their table.
TITLES = {
    "cold": "Cold starts",
    "hops": "Calls of Python in a hop",
    "modes": "What SMART costs",
    "replicas": "Copies and sums over simulated workers",
    "replicas_rpc": "Copies and sums over processes",
}
_NOUNS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def write(docs: Path) -> None:
    """Write all generated pages below docs/, replacing those that differ."""
    pages = {
        "command-line.md": command_line(),
        "scenario-keys.md": scenario_keys(),
        "figures.md": figures(),
        "trace-kinds.md": trace_kinds(),
    }
    for name, lines in pages.items():
        _write(docs / "_generated" / name, ("\n".join(lines) + "\n").encode())
    for path in sorted((docs.parent / "paper" / "results").iterdir()):
        if path.suffix in (".md", ".png"):
            content = path.read_bytes()
            if path.suffix == ".md" and not content.startswith(b"# "):
                title = TITLES[path.stem]
                content = f"# {title}\n\n".encode() + content
            _write(docs / "validation" / "results" / path.name, content)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)


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
        yield from ("| key | meaning | values | default |", "| --- " * 4 + "|")
        described = {**_attributes(documentation), **MEANINGS.get(kind.__name__, {})}
        for field in fields(kind):
            text = described.pop(field.name, "").replace("None:", "Left out:")
            row = _cell(text.rstrip(".")), _cell(_allowed(field.type)), _default(field)
            yield f"| `{field.encode_name}` | {' | '.join(row)} |"
        assert not described, f"{kind.__name__} has no keys {', '.join(described)}"
        for key, text, values in MORE_KEYS.get(heading, ()):
            yield f"| `{key}` | {_cell(text)} | {values} | |"
        yield ""


def _attributes(documentation: str) -> dict[str, str]:
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
                text = meta.description.replace(" and < 2^63", "").partition(", {")[0]
                return text.replace(", or None for", "; left out:")
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
        return "a table"
    return ""


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
