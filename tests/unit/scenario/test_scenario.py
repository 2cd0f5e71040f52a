"""A scenario file is read, checked and refused in one line: what is allowed."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jdag.errors import JdagError, ScenarioError
from jdag.scenario import load
from jdag.scenario.driving import Virtual
from jdag.scenario.scenario_schema import devices_of, network_of
from jdag.sim import Crash, DeviceModel, Drop, LinkModel, LinkSettings, Partition
from tests import ROOT
from tests.tools.error_texts import fails_with
from tests.tools.scenario_cases import scenario_of, written

SCENARIOS = ROOT / "scenarios"

FAULT = "[[faults]]\nkind = "
LINK = '{ source = "a", destination = "b" }'
# Lines of the file, in place of those with the same key or after them; the answer.
REPLACED = ("name", "sede", "seeds", "host", "program", "workers", "home")
BAD = [
    ("x = = 3", "this is not TOML"),
    ("sede = 3", "sede = 3: expected one of the keys"),
    ('name = ".."', "name = '..': expected letters"),
    (
        f"seeds = {10**30}",
        f"seeds = {10**30}: expected an integer from 1 to 1,000,000",
    ),
    (f"host_devices = {'9' * 400}", "999: expected an integer from 1 to 1,024"),
    (
        '[[network.links]]\nsource = "a"\ndestination = "z"',
        "network.links[0].destination = 'z': expected one of the workers a, b",
    ),
    (
        '[[network.links]]\nsource = "a"\ndestination = "a"',
        "network.links[0].destination = 'a': expected a worker other than the",
    ),
    (
        f"[network]\nlinks = [{LINK}, {LINK}]",
        "network.links[1].destination = 'b': expected at most one link from a to b",
    ),
    (
        "[network]\nlatency = 5",
        "links, port_bandwidth_bytes_per_s (did you mean latency_ns?)",
    ),
    ('program = "shapes:chian"', "has no attribute 'chian' (did you mean chain?)"),
    (
        "[settings]\nlenght = 3",
        "settings.lenght = 3: expected one of the settings of "
        "shapes:chain: length, size (did you mean length?)",
    ),
    (
        'workers = ["trainer", "ps"]\nhome = "trianer"',
        "expected one of the workers trainer, ps (did you mean trainer?)",
    ),
    ("workers = 1_000_000_000", "workers = 1000000000: expected different names"),
    ('[placement]\nw0 = "z"', "placement.w0 = 'z': expected one of the workers a, b"),
    (
        '[placement]\nq = "a"',
        "placement.q = 'a': expected one of the parameters w0, w1",
    ),
    ('home = "z"', "home = 'z': expected one of the"),
    ('workers = ["a", "a"]', "expected different names"),
    ('workers = ["a b"]', "each of at most 64 letters, digits, _, - and ., begin"),
    ("workers = 0", "workers = 0: expected different"),
    (
        'program = "nowhere:main"',
        "program = 'nowhere:main': expected module:function",
    ),
    (
        'program = "jdag.programs.shapes:chain"',
        "jdag.programs was removed: programs of scenarios are files next to "
        "their TOML file",
    ),
    ('program = "tests.tools.scenario_cases:GOOD"', "expected module:function"),
    (
        FAULT + '"drop"\nprobability = 0.5\nsource = "z"',
        "faults[0].source = 'z': expected one of a, b",
    ),
    (
        "[devices.workers.z]\nforward_ns = 1",
        "devices.workers.z = 'z': expected one of the workers a, b",
    ),
    (
        '[schedule]\nkind = "zb_h3"\nstages = 2',
        "schedule.kind = 'zb_h3': expected one of gpipe, one_f_one_b",
    ),
    (
        '[schedule]\nkind = "zb_h1"\nstages = 2',
        "schedule.micro_batches is missing: expected an integer",
    ),
    (
        '[schedule]\nkind = "gpipe"\nchunks = 2',
        "schedule.chunks = 2: expected stages, micro_batches, workers",
    ),
    (
        '[schedule]\nlists = ["0F0 0B0", "1F0"]',
        "schedule: worker b lacks 1B0, or 1I0 and 1W0: each F has a backward",
    ),
    (
        "losss = 3",
        "expect.losss = 3: there is no such figure (did you mean loss?): expected one",
    ),
    (
        'error = "WorkerLsot"',
        "expect.error = 'WorkerLsot': expected one of JdagError",
    ),
]


@pytest.mark.parametrize(("text", "answer"), BAD)
def test_what_is_wrong_is_one_line_with_file_key_value_and_what_is_allowed(
    text: str, answer: str, tmp_path: Path
):
    if text.startswith(REPLACED):
        keys = {line.split(" =")[0]: line for line in text.splitlines()}
        path = written(tmp_path, **keys)
    else:
        path = written(tmp_path, text)
    with pytest.raises(ScenarioError) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert answer in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path):
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    for path in (tmp_path / "nothing.toml", tmp_path, binary):
        with fails_with(ScenarioError, "scenario.not_a_scenario"):
            load(path)


@pytest.mark.parametrize(
    ("program", "setting", "message"),
    [
        ("no_case", "", "program = .* expected a function that returns a jdag.scen"),
        ("takes_nothing", "", "program = .* expected a function of the workers"),
        ("returns_without_repr", "", "it returned a Shy$"),
        ("raises_without_text", "", "toml: .*its __str__ raises ValueError"),
        ("places", "", "placement.w = None: .* workers a, b; .* does not place it"),
        ("places", 'where = "z"', "placement.w = 'z': .*:places places it there"),
        ("places", "named = false", "a Case with params and their placement, both by"),
    ],
)
def test_an_invalid_program_is_refused(
    program: str, setting: str, message: str, tmp_path: Path
):
    with pytest.raises(ScenarioError, match=message):
        load(scenario_of(tmp_path, program, "[settings]", setting))


def test_a_placement_of_the_file_overrides_that_of_the_program(tmp_path: Path):
    more = ("[placement]", 'w = "b"', "[settings]", 'where = "z"')
    player = load(scenario_of(tmp_path, "places", *more)).player
    assert player.placement == {"w": "b"}  # type: ignore[attr-defined]


def test_a_module_whose_error_has_no_text_is_refused(tmp_path: Path):
    (tmp_path / "mute_on_import.py").write_text(
        "class Mute(Exception):\n    def __str__(self):\n        return 3\nraise Mute"
    )
    path = written(tmp_path, program='program = "mute_on_import:main"')
    said = r"Mute: its __str__ raises TypeError \(mute_on_import.py:4 in <module>\)"
    with pytest.raises(ScenarioError, match=said):
        load(path)


def test_the_bounds_of_a_run_are_those_of_its_file(tmp_path: Path):
    bounds = {"events_max": "events_max = 7", "nesting_max": "nesting_max = 5"}
    driver = Virtual(load(written(tmp_path, **bounds)).settings)
    with driver.cluster(0, clean=False) as cluster:
        assert cluster.state.settings.nesting_max == 5
        with fails_with(JdagError, "scenario.events_max_is_reached"):
            cluster.put("b", [jnp.ones(3)] * 3)
            cluster.context().__enter__().call("b", jnp.add, 1.0, 2.0)
            cluster.driver.settle()


def test_a_module_that_raises_is_refused_with_its_line(tmp_path: Path):
    (tmp_path / "raises_on_import.py").write_text("x = 1\ny = x / 0\n")
    path = written(tmp_path, program='program = "raises_on_import:main"')
    with fails_with(ScenarioError, "scenario.module_raises"):
        load(path)
    (tmp_path / "exits_on_import.py").write_text("import sys\nsys.exit(0)\n")
    path = written(tmp_path, program='program = "exits_on_import:main"')
    with fails_with(ScenarioError, "scenario.module_exits"):
        load(path)


def test_what_a_library_raises_is_said_with_the_line_that_called_it(tmp_path: Path):
    with fails_with(ScenarioError, "scenario.library_raises"):
        load(written(tmp_path, "[settings]", "size = -4"))


def test_the_first_comment_is_the_question_and_may_be_left_out(tmp_path: Path):
    path = written(tmp_path)
    assert load(path).question == "Is it so?"
    text = path.read_text()
    path.write_text(f"\n# Is it so,\n#   and why?\n\n{text[len('# Is it so?') :]}")
    assert load(path).question == "Is it so, and why?"
    path.write_text(text[len("# Is it so?") :])
    assert load(path).question == ""


def test_a_module_beside_the_file_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    source = "from tests.tools.scenario_cases import one_leaf as mine\n"
    (home / "beside_the_file.py").write_text(source)
    (elsewhere / "where_i_am.py").write_text(source)
    monkeypatch.chdir(elsewhere)
    for module in ("beside_the_file", "where_i_am"):
        path = written(home, program=f'program = "{module}:mine"')
        assert load(Path("../home") / path.name).settings.names == ("a", "b")


def test_settings_are_what_the_program_says_that_it_takes(tmp_path: Path):
    more = ("[settings]", "sizes = [1, 2]", "rate = 1", 'path = "x"')
    scenario = load(scenario_of(tmp_path, "settings_of_all_kinds", *more))
    assert scenario.player.params["w"].shape == (3,)  # type: ignore[attr-defined]
    wrong = ("[settings]", "sizes = [1, 2.5]")
    with fails_with(ScenarioError, "scenario.setting_has_wrong_type"):
        load(scenario_of(tmp_path, "settings_of_all_kinds", *wrong))


def test_a_number_of_workers_names_them(tmp_path: Path):
    names = load(written(tmp_path, workers="workers = 3")).settings.names
    assert names == ("w0", "w1", "w2")


def test_a_name_is_required_and_another_seed_may_be_given(tmp_path: Path):
    with pytest.raises(ScenarioError, match="name is missing"):
        load(written(tmp_path, name=""))
    assert load(written(tmp_path)).settings.seed == 0
    assert load(written(tmp_path), seed=7).settings.seed == 7


def test_loading_leaves_jax_as_it_was(tmp_path: Path):
    assert jax.config.read("jax_enable_x64")
    load(written(tmp_path, x64="x64 = false"))
    assert jax.config.read("jax_enable_x64")


def test_the_tables_say_what_the_cluster_is_made_of(tmp_path: Path):
    settings = load(
        written(
            tmp_path,
            "[network]\nlatency_ns = 1\njitter_ns = 2",
            "port_bandwidth_bytes_per_s = 3",
            '[[network.links]]\nsource = "a"\ndestination = "b"\nlatency_ns = 3',
            "[devices]\nforward_ns = 4\nfunctions = { scale = [5, 6] }",
            "[devices.workers.b]\nsum_ns = 7",
            "[link]\nresend_ns = 8\nresend_max = 9\nack_delay_ns = 1",
            f'{FAULT}"drop"\nprobability = 0.5\nsource = "b"',
            f'{FAULT}"partition"\ngroups = [["a"], ["b"]]\nuntil_ns = 2',
            f'{FAULT}"crash"\nworker = "b"\nat_ns = 1',
        )
    ).settings
    network = network_of(settings, clean=False)
    assert network.model("b", "a") == LinkModel(1, None, 2)
    assert network.model("a", "b") == LinkModel(3)
    clean = network_of(settings, clean=True)
    assert clean.model("b", "a") == LinkModel(1)
    assert clean.port_bandwidth_bytes_per_s == network.port_bandwidth_bytes_per_s == 3
    assert devices_of(settings) == {
        "a": DeviceModel(forward_ns=4, functions={"scale": (5, 6)}),
        "b": DeviceModel(sum_ns=7),
    }
    assert settings.link == LinkSettings(8, 9, 1)
    assert list(settings.faults) == [
        Drop(0.5, source="b"),
        Partition((("a",), ("b",)), 0, 2),
        Crash("b", detect_ns=1_000_000, at_ns=1),
    ]
