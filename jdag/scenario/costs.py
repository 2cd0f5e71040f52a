"""A file of measured costs, which `jdag calibrate` writes and scenarios read.

It has the tables `[network]` and `[devices]` of a scenario, and `[measured]`: where and
how. A scenario names it by `costs = "costs.toml"`, relative to its own file; its own
keys take precedence over those of the file.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jdag.errors import ScenarioError, meant, spelled
from jdag.runtime.trace import TraceRecord
from jdag.scenario.scenario_schema import ScenarioTable, devices_of, network_of
from jdag.settings.toml_files import read_toml, wrong
from jdag.settings.validation import TABLE, Settings, settings_from
from jdag.sim.devices import MOVED

_FILE = "a file of costs, as `jdag calibrate` writes it"
_JOBS = ("forward", "vjp", "vjpinputs", "vjpweights")


class _CostsTable(Settings, frozen=True):
    measured: TABLE
    network: TABLE
    devices: TABLE


def read_costs(path: Path) -> dict[str, dict[str, Any]]:
    """Return the tables of a file of costs.

    Raises:
        ScenarioError: one line: file, key, value, and what is allowed.
    """
    with wrong(path):
        _, table = read_toml(path, _FILE)
        given = settings_from(_CostsTable, table)
        tables = {"network": given.network, "devices": given.devices}
        own = {"name": "costs", "program": "a:b", "workers": ["a", "b"], "expect": {}}
        settings = settings_from(ScenarioTable, {**own, **tables})
        network_of(settings, clean=False)
        devices_of(settings)
    return {"measured": given.measured, **tables}


def with_costs(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the content of a scenario, with the costs of the file that it names."""
    name, found = table.get("costs"), dict(table)
    if isinstance(name, str) and name and "\0" not in name:
        costs = read_costs(folder / name)
        for key in ("network", "devices"):
            own = found.get(key, {})
            if isinstance(own, dict):  # What is none is refused with the other keys.
                found[key] = {**costs[key], **own}
        devices: Any = found["devices"]
        if isinstance(devices, dict) and isinstance(devices["functions"], dict):
            own = devices["functions"]
            devices["functions"] = {
                key: value
                for key, value in costs["devices"].get("functions", {}).items()
                if _names(key).isdisjoint(own)
            } | own
    return found


def _names(key: str) -> set[str]:
    """The names, without types, by which a scenario may name a function."""
    name = key.partition("(")[0]
    return {name, name.rpartition(":")[2]}


def written(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return tables as TOML; their values are texts, integers, lists and tables."""
    lines = ["# Measured by `jdag calibrate`; scenarios read it by `costs`."]
    for name, table in tables.items():
        inner = {f"{name}.{k}": v for k, v in table.items() if isinstance(v, Mapping)}
        plain = {k: v for k, v in table.items() if not isinstance(v, Mapping)}
        for title, values in {name: plain, **inner}.items():
            lines += ["", f"[{title}]"]
            lines += [f"{_key(key)} = {json.dumps(v)}" for key, v in values.items()]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    is_bare = key.replace("_", "").isalnum() and key.isascii()
    return key if is_bare else json.dumps(key)


def refuse_unmeasured(settings: ScenarioTable, trace: Iterable[TraceRecord]) -> None:
    """Raise ScenarioError if a run called a function without a cost.

    A device with costs for all functions, or a roofline, takes any.
    """
    if settings.costs is None:
        return
    models = devices_of(settings)
    for record in trace:
        if record.kind != "start" or record.detail[0] not in _JOBS:
            continue
        model, name = models[record.worker.partition("#")[0]], record.named["function"]
        if name == MOVED or model.forward_ns or model.backward_ns or model.roofline:
            continue
        known = [key.partition("(")[0] for key in model.functions]
        if name not in known and name.rpartition(":")[2] not in known:
            allowed = f"one with a cost of {name}, which this program calls"
            said = f"{spelled(settings.costs)}: allowed is {allowed}"
            raise ScenarioError(f"costs = {said}{meant(name, known)}")
