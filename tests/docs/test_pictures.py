"""Each picture of docs/_static is what its script draws."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests import ROOT

STATIC = ROOT / "docs" / "_static"


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_timeline_shows_simulated_steps():
    drawn = "\n".join(script("pictures.py").svg()) + "\n"
    assert drawn == (STATIC / "timeline.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["architecture", "life_of_a_pass", "life_of_a_step"])
def test_pictures_of_internals_are_up_to_date(name: str, tmp_path: Path):
    module = script("internals/pictures.py")
    vars(module)["STATIC"] = tmp_path
    getattr(module, name)()
    (drawn,) = tmp_path.iterdir()
    assert drawn.read_text() == (STATIC / drawn.name).read_text(encoding="utf-8")
