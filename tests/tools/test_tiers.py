"""The tiers of tests name files that exist."""

from tests import ROOT
from tests.tools.tiers import VERSIONS


def test_every_path_of_what_versions_can_change_exists():
    assert [path for path in VERSIONS if not (ROOT / path).exists()] == []
    assert len({*VERSIONS}) == len(VERSIONS) > 10
