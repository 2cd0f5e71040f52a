"""Files of measured costs, written by `jdag calibrate` and read by scenarios.

A file of costs has the tables `[network]` and `[devices]` of a scenario, and
`[measured]`, which describes the measurement. A scenario refers to it by
`costs = "costs.toml"`, a path relative to the scenario. Keys of the scenario take
precedence over keys of the file.
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

_FILE = "a file of costs written by `jdag calibrate`"
_JOBS = ("forward", "vjp", "vjpinputs", "vjpweights")


class _CostsTable(Settings, frozen=True):
    measured: TABLE
    network: TABLE
    devices: TABLE


def read_costs(path: Path) -> dict[str, dict[str, Any]]:
    """Return the tables of a file of costs. Raises ScenarioError if it is invalid."""
    with wrong(path):
        _, table = read_toml(path, _FILE)
        file = settings_from(_CostsTable, table)
        tables = {"network": file.network, "devices": file.devices}
        # A scenario with these tables, to validate them.
        rest = {"name": "costs", "program": "a:b", "workers": ["a", "b"], "expect": {}}
        settings = settings_from(ScenarioTable, {**rest, **tables})
        network_of(settings, clean=False)
        devices_of(settings)
    return {"measured": file.measured, **tables}


def with_costs(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    name, merged = table.get("costs"), dict(table)
    if isinstance(name, str) and name and "\0" not in name:
        costs = read_costs(folder / name)
        for key in ("network", "devices"):
            keys = merged.get(key, {})
            if isinstance(keys, dict):  # Other types are rejected by `load`.
                merged[key] = {**costs[key], **keys}
        devices: Any = merged["devices"]
        if isinstance(devices, dict) and isinstance(devices["functions"], dict):
            functions = devices["functions"]
            devices["functions"] = {
                key: value
                for key, value in costs["devices"].get("functions", {}).items()
                if _names(key).isdisjoint(functions)
            } | functions
    return merged


def _names(key: str) -> set[str]:
    """Return the names, without types, by which a scenario may refer to a function."""
    name = key.partition("(")[0]
    return {name, name.rpartition(":")[2]}


def written(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Format tables as TOML. Their values are strings, integers, lists and tables."""
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
    """Raise ScenarioError if the file of costs lacks a function that has run."""
    if settings.costs is None:
        return
    models = devices_of(settings)
    for record in trace:
        if record.kind != "start" or record.detail[0] not in _JOBS:
            continue
        model, name = models[record.worker.partition("#")[0]], record.named["function"]
        if name == MOVED or model.forward_ns or model.backward_ns or model.roofline:
            continue
        measured = [key.partition("(")[0] for key in model.functions]
        if name not in measured and name.rpartition(":")[2] not in measured:
            raise ScenarioError(
                f"costs = {spelled(settings.costs)}: expected a file with a cost of "
                f"{name}, which this program calls{meant(name, measured)}"
            )
