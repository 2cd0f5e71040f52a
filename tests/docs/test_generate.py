"""Pages that are generated have every command, key, figure and kind of record."""

import pytest
from msgspec.structs import fields

from jdag import sim
from jdag.cli import commands
from jdag.runtime.trace import DETAIL
from jdag.scenario.player import FIGURES
from tests import ROOT
from tests.docs import script

generate = script("generate.py")


def test_each_command_has_a_section_with_its_usage_and_options():
    text = "\n".join(generate.command_line())
    for path in commands.COMMANDS:
        name = path.partition(".")[2].replace("_", "-")
        assert f"## `jdag {name}`" in text and f"\njdag {name} [" in text
    assert "| `--seed N` | Override the seed of the scenario. |" in text
    assert "(default: sim)" in text


def test_each_key_of_a_table_has_a_row_with_its_meaning_and_default():
    text = "\n".join(generate.scenario_keys())
    for _, _, kind in generate.TABLES:
        for field in fields(kind):
            assert f"| `{field.encode_name}` | " in text, field
    assert "| `latency_ns` | time from a frame's departure to its arrival |" in text
    assert "| an integer >= 1 | `100000000` |" in text
    lacking = [line for line in text.splitlines() if line.count("|") == 5]
    assert not [line for line in lacking if line.split(" | ")[1].strip() == ""]


def test_a_meaning_of_a_key_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setitem(generate.MEANINGS, "Slow", {"speed": "of the worker"})
    with pytest.raises(AssertionError, match="Slow has no keys speed"):
        list(generate.scenario_keys())
    assert sim.Slow in [kind for *_, kind in generate.TABLES]


def test_each_figure_and_each_kind_of_record_has_a_row():
    text = "\n".join([*generate.figures(), *generate.trace_kinds()])
    for name in (*FIGURES, *DETAIL):
        assert f"\n| `{name}` | " in text, name


def test_results_without_a_title_get_one():
    results = ROOT / "paper" / "results"
    for path in results.glob("*.md"):
        has_title = path.read_bytes().startswith(b"# ")
        assert has_title != (path.stem in generate.TITLES), path
