"""Property tests of users: what is drawn, the assertion, and the pytest plugin."""

import json
import os
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings

import jdag
from jdag import testing
from jdag.engine import worker_pass
from jdag.errors import ScenarioError
from jdag.lab.subject import Subject
from jdag.scenario import Case
from jdag.testing import checks, plugin
from jdag.testing.checks import Violation
from jdag.testing.drawn import DrawnCall, Program, program_of
from tests.tools.documents import block
from tests.tools.error_texts import fails_with
from tests.tools.pipeline_cases import batches, layer, square, weights


@settings(max_examples=4)
@given(testing.programs(), testing.fault_budgets(), testing.orders())
def test_no_order_changes_what_a_drawn_program_gives(program, budget, order):
    testing.assert_equals_oracle(program, runs=2, faults=budget, strategy=order)
    assert program_of(json.loads(json.dumps(program.data()))) == program


@settings(max_examples=4)
@given(testing.programs(), testing.networks(), testing.faults())
def test_nor_does_a_network(program, network, faults):
    given = {"network": network, "faults": faults}
    testing.assert_equals_oracle(program, runs=1, simulated=given)


@settings(max_examples=10)
@given(testing.schedules(), testing.clusters(2, 3))
def test_drawn_schedules_pass_their_check(schedule, workers):
    schedule.check()
    assert workers[0] == "main" and 2 <= len(workers) <= 3


@settings(max_examples=3)
@given(testing.clusters(2, 4))
def test_a_program_over_a_drawn_cluster_is_held_to_its_oracle(workers):
    calls = [DrawnCall(worker, "scale", (0, n)) for n, worker in enumerate(workers)]
    program = Program(workers, (workers[-1],), tuple(calls))
    testing.assert_equals_oracle(program.case(), workers, runs=2)
    with fails_with(Violation, "testing.there_is_no_worker_main"):
        testing.assert_equals_oracle(program.case(), workers[1:], runs=1)


def pipelined(schedule, target=square):
    """A pipeline's step, as a case."""
    stages, count = schedule.stages, schedule.micro_batches
    names = [f"w{number}" for number in range(stages)]
    rows = batches(count)

    def program(ctx, params):
        pipe = jdag.pipeline([layer] * stages, target)
        return pipe(ctx, [params[name] for name in names], rows, rows)

    return Case(
        program,
        params=dict(zip(names, weights(stages), strict=True)),
        placement={name: schedule.worker(n) for n, name in enumerate(names)},
    )


@settings(max_examples=3)
@given(testing.schedules(max_stages=3, max_micro_batches=4))
def test_a_pipeline_under_a_drawn_schedule_is_held_to_its_oracle(schedule):
    given: Any = {"runs": 1, "simulated": {"schedule": schedule}}
    with mock.patch.object(checks, "simulate", wraps=jdag.simulate) as simulate:
        testing.assert_equals_oracle(pipelined(schedule), schedule.workers, **given)
    assert simulate.call_args.kwargs["schedule"] is schedule


THREE = tuple(
    [DrawnCall(worker, "scale", (0, 0)) for worker in ("a", "b", "c", "main")]
)
LARGE = Program(("main", "a", "b", "c"), ("a",), (*THREE, *THREE[:2]), terms=6)


def test_the_option_repeats_the_saved_choices_and_explores_nothing(tmp_path):
    path, played = tmp_path / "bug.json", []
    play = Subject.play

    def noted(subject, pick):
        played.append(play(subject, pick))
        return played[-1]

    with mock.patch.object(worker_pass, "sorted", list, create=True):
        with pytest.raises(Violation) as raised:
            testing.assert_equals_oracle(LARGE, runs=15)
        then: Any = raised.value
        then.save(path)
        assert json.loads(path.read_text())["scenario"].startswith("drawn:")
        config = mock.Mock(getoption=lambda _: str(path))
        plugin.pytest_configure(config)
        try:
            with (
                mock.patch.object(checks, "explore") as explore,
                mock.patch.object(Subject, "play", noted),
                pytest.raises(Violation) as again,
            ):  # Whichever program was drawn this time.
                testing.assert_equals_oracle(Program(("a",), ("a",), ()), runs=15)
        finally:
            plugin.pytest_unconfigure(config)
        now: Any = again.value
        assert now.failure.digest == then.failure.digest
    assert not explore.called
    assert any(then.failure.choices) and now.failure.choices == then.failure.choices
    assert now.drawn == LARGE
    assert sum([any(one.choices) for one in played]) == 1  # Else the first order.
    testing.assert_equals_oracle(LARGE, runs=1)


def test_bad_input_is_one_line():
    with pytest.raises(ScenarioError, match="simulated = 3: expected a mapping"):
        testing.assert_equals_oracle(Program(("a",), ("a",), ()), simulated=3)
    with fails_with(ScenarioError, "testing.workers_3_allowed_is_a"):
        testing.assert_equals_oracle(lambda cluster: None, 3)
    with fails_with(ScenarioError, "testing.simulated_and_only_with_a"):
        testing.assert_equals_oracle(lambda cluster: None, ["a"], simulated={})
    with fails_with(ScenarioError, "testing.workers_3_allowed_is_a_strategy"):
        given(testing.programs(3))(lambda program: None)()
    with fails_with(AttributeError, "testing.no_attribute_program"):
        _ = testing.program


def test_without_hypothesis_the_error_says_what_to_install():
    said = "from jdag.errors import ScenarioError\nimport sys, jdag\n"
    said += "sys.modules['hypothesis'] = None\n"
    said += "try: jdag.testing.programs\n"
    said += "except ScenarioError as error: print(error)\n"
    done = subprocess.run(
        [sys.executable, "-c", said], capture_output=True, text=True, check=True
    )
    wanted = "jdag.testing.programs needs Hypothesis: pip install 'jdag[testing]'\n"
    assert done.stdout == wanted


QUICK = """
from hypothesis import Phase, settings
settings.register_profile("quick", phases=[Phase.generate])
settings.load_profile("quick")
"""


@pytest.mark.second
def test_the_tutorials_test_finds_the_bug_and_the_plugins_command_repeats_it(tmp_path):
    here = tmp_path / "tests"  # Not the root, to which pytest's names are relative.
    here.mkdir()
    (here / "test_mine.py").write_text(
        block("docs/tutorials/every-order.md", "python", "def test_")
    )
    (here / "conftest.py").write_text(QUICK)

    def pytest_of(*words):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "jdag.testing.plugin"]
        environ = {**os.environ, "PYTHONHASHSEED": "5"}
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", "--rootdir", "..", *words],
            cwd=here, capture_output=True, text=True, env=environ, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    code, said = pytest_of("test_mine.py")
    assert code == 1, said
    (line,) = [line for line in said.splitlines() if line.startswith("repeat it: ")]
    words = line.removeprefix("repeat it: pytest ").split()
    assert words[:2] == ["-p", "jdag.testing.plugin"] and words[3] == "--jdag-replay"
    assert words[2].startswith("test_mine.py::") and words[4].startswith(".jdag/")
    violated = [line for line in said.splitlines() if "the first choice every" in line]
    code, said = pytest_of(*words)
    assert code == 1 and violated[-1].partition(" (")[0] in said
    other = here / "other.json"
    saved = (here / words[4]).read_text()
    other.write_text(saved.replace('"program": "', '"program": "other'))
    code, said = pytest_of("test_mine.py", "--jdag-replay", "other.json")
    assert code == 1 and "other.json was not repeated" in said
    code, said = pytest_of("test_mine.py", "--jdag-replay", "nowhere.json")
    assert code == 4 and "--jdag-replay nowhere.json: no such file" in said
