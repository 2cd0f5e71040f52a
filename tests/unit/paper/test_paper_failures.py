"""Workers that are killed or frozen: what is committed, and one of its moments."""

import json

import pytest

from paper import failures
from paper.figures import RESULTS


def test_what_is_committed_has_sixty_moments_all_of_which_ended_right():
    found = json.loads((RESULTS / "failures.json").read_text())["programs"]
    assert list(found) == list(failures.PROGRAMS)
    moments = [one for of in found.values() for one in of["moments"]]
    assert len(moments) == 60 and all(one["right"] for one in moments)
    assert {one["signal"] for one in moments} == {"SIGKILL", "SIGSTOP"}


@pytest.mark.second
def test_a_worker_that_is_killed_is_named_and_nothing_is_left():
    (found,) = failures.campaign("parameter_server", 1)["moments"]
    assert found["right"] and found["signal"] == "SIGKILL", found
