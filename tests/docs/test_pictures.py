"""Each picture of docs/_static is what its script draws."""

from pathlib import Path

import pytest

from tests import ROOT
from tests.docs import script

STATIC = ROOT / "docs" / "_static"


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
