"""Dotted keys reach into the tables and lists of a scenario, or are refused."""

from typing import Any

import pytest

from jdag.errors import ScenarioError
from jdag.scenario.changes import changed

TABLE: dict[str, Any] = {
    "seed": 1,
    "network": {"links": [{"latency_ns": 1}, {"latency_ns": 2}]},
    "schedule": {"kind": "gpipe", "stages": 2},
}


def test_a_key_reaches_tables_and_lists_and_makes_tables_that_are_missing():
    found = changed(
        TABLE,
        {"seed": 3, "network.links[1].latency_ns": 5, "devices.workers.a.sum_ns": 7},
    )
    assert found == {
        "seed": 3,
        "network": {"links": [{"latency_ns": 1}, {"latency_ns": 5}]},
        "schedule": {"kind": "gpipe", "stages": 2},
        "devices": {"workers": {"a": {"sum_ns": 7}}},
    }
    assert TABLE["seed"] == 1 and TABLE["network"]["links"][1] == {"latency_ns": 2}


def test_a_text_at_schedule_is_its_kind_and_a_table_replaces_it():
    kept = changed(TABLE, {"schedule": "zb_h1"})["schedule"]
    assert kept == {"kind": "zb_h1", "stages": 2}
    assert changed(TABLE, {"schedule": {"lists": []}})["schedule"] == {"lists": []}


@pytest.mark.parametrize(
    "key",
    [
        *("seed.x", "network.links[2].latency_ns", "network.links.x", "seed[0]"),
        *("network.links[0][1]", "network[0].x", "faults[0].kind", "network.links[x]"),
    ],
)
def test_a_key_that_leads_nowhere_is_refused_with_its_value(key: str):
    with pytest.raises(ScenarioError) as raised:
        changed(TABLE, {key: 9})
    assert str(raised.value).startswith(f"{key} = 9: expected a key of the file")
