"""README.md and docs/: their code runs, and every public name has a page."""

import importlib.util
from pathlib import Path
from types import ModuleType

from tests import ROOT


def script(path: str) -> ModuleType:
    """Import a script of docs/, which is no package."""
    file = ROOT / "docs" / path
    spec = importlib.util.spec_from_file_location(Path(path).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
