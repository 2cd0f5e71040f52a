"""Names that two modules of jdag define: `python -m tests.tools.defined_twice`.

A public class, function, constant or type of a module has a name of its own in the
library, or a reason in `REASONS`.
"""

import ast
from collections import defaultdict
from pathlib import Path

from tests import ROOT

_COMMAND = "the command is called as the function that it runs"
_COLLECTIVE = "one collective, on a cluster and for the oracle"
_WIRE = "the class name is in traces; the other one is public"
REASONS = {
    "Drop": _WIRE,
    "Run": _WIRE,
    "TYPE_CHECKING": "type checkers know it by this name",
    "all_gather": _COLLECTIVE,
    "all_reduce": _COLLECTIVE,
    "all_to_all": _COLLECTIVE,
    "calibrate": _COMMAND,
    "explore": _COMMAND,
    "main": "the entry of a program",
    "predict": _COMMAND,
    "reduce_scatter": _COLLECTIVE,
    "replay": _COMMAND,
    "replicate": "copies to workers or to devices, both public; and the oracle's",
    "sweep": _COMMAND,
}


def _names(source: str) -> set[str]:
    names = set()
    for node in ast.parse(source).body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {one.id for one in targets if isinstance(one, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return {name for name in names if not name.startswith("_")}


def defined_twice(root: Path) -> dict[str, list[str]]:
    homes = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        for name in _names(path.read_text(encoding="utf-8")):
            homes[name].append(str(path.relative_to(root)))
    return {name: homes[name] for name in sorted(homes) if len(homes[name]) > 1}


if __name__ == "__main__":
    twice = defined_twice(ROOT / "jdag")
    for name, modules in twice.items():
        print(f"{name} {' '.join(modules)}  ({REASONS.get(name, 'NO REASON')})")
    raise SystemExit(bool(twice.keys() - REASONS.keys()))
