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
# What the file says in place of, or after, a good scenario's lines; what is answered.
BAD = {
    "not TOML": (("x = = 3",), {}, "this is not TOML"),
    "unknown key": ((), {"sede": "sede = 3"}, "sede = 3: allowed is one of the keys"),
    "wrong type": ((), {"seed": 'seed = "3"'}, "seed = '3': allowed is an integer"),
    "a flag is no number": ((), {"seed": "seed = true"}, "seed = True: allowed is an"),
    "missing key": ((), {"name": ""}, "name is missing"),
    "name leaves runs": (
        (),
        {"name": 'name = ".."'},
        "name = '..': allowed is letters",
    ),
    "latency of 400 digits": (
        ("[network]", f"latency_ns = {'9' * 400}"),
        {},
        "999: allowed is an integer >= 0 and < 2^63",
    ),
    "too many seeds": (
        (),
        {"seeds": f"seeds = {10**30}"},
        f"seeds = {10**30}: allowed is an integer from 1 to 1,000,000",
    ),
    "too many devices": (
        (),
        {"host_devices": f"host_devices = {'9' * 400}"},
        "999: allowed is an integer from 1 to 1,024",
    ),
    "link of nobody": (
        ("[[network.links]]", 'source = "a"', 'destination = "z"'),
        {},
        "network.links[0].destination = 'z': allowed is one of the workers a, b",
    ),
    "link to itself": (
        ("[[network.links]]", 'source = "a"', 'destination = "a"'),
        {},
        "network.links[0].destination = 'a': allowed is a worker other than the",
    ),
    "a link twice": (
        (f"[network]\nlinks = [{LINK}, {LINK}]",),
        {},
        "network.links[1].destination = 'b': allowed is one link from a to b",
    ),
    "a key that is nearly one": (
        ("[network]", "latency = 5"),
        {},
        "links, port_bandwidth_bytes_per_s (do you mean latency_ns?)",
    ),
    "a function that is nearly one": (
        (),
        {"program": 'program = "shapes:chian"'},
        "has no attribute 'chian' (do you mean chain?)",
    ),
    "a setting that is nearly one": (
        ("[settings]", "lenght = 3"),
        {},
        "settings.lenght = 3: allowed is one of the settings of "
        "shapes:chain: length, size (do you mean length?)",
    ),
    "a worker that is nearly one": (
        (),
        {"workers": 'workers = ["trainer", "ps"]', "home": 'home = "trianer"'},
        "allowed is one of the workers trainer, ps (do you mean trainer?)",
    ),
    "too many workers": (
        (),
        {"workers": "workers = 1_000_000_000"},
        "workers = 1000000000: allowed is names",
    ),
    "a fault that is no table": (
        (),
        {"faults": "faults = [3]"},
        "or a table with its kind",
    ),
    "groups of what is no name": (
        (f'{FAULT}"partition"', "groups = [[1], [2]]"),
        {},
        "faults[0].groups[0][0] = 1: allowed is a text; faults[0].groups[1][0] = 2: ",
    ),
    "no table": ((), {"network": "network = 3"}, "network = 3: allowed is a table"),
    "placement on nobody": (
        ("[placement]", 'w0 = "z"'),
        {},
        "placement.w0 = 'z': allowed is one of the workers a, b",
    ),
    "placement of nothing": (
        ("[placement]", 'q = "a"'),
        {},
        "placement.q = 'a': allowed is one of the parameters w0, w1",
    ),
    "home is nobody": ((), {"home": 'home = "z"'}, "home = 'z': allowed is one of the"),
    "workers twice": ((), {"workers": 'workers = ["a", "a"]'}, "allowed is names"),
    "a worker that processes refuse": (
        (),
        {"workers": 'workers = ["a b"]'},
        "each of le",
    ),
    "no workers": ((), {"workers": "workers = 0"}, "workers = 0: allowed is names"),
    "no such module": (
        (),
        {"program": 'program = "nowhere:main"'},
        "program = 'nowhere:main': allowed is module:function",
    ),
    "a program's former name": (
        (),
        {"program": 'program = "jdag.programs.shapes:chain"'},
        "jdag.programs has gone: programs of scenarios are files beside their TOML",
    ),
    "no reference": ((), {"program": 'program = "x"'}, "allowed is module:function"),
    "no program": (
        (),
        {"program": 'program = "tests.tools.scenario_cases:GOOD"'},
        "allowed is module:function",
    ),
    "unknown fault": (
        (f'{FAULT}"dorp"',),
        {},
        "faults[0].kind = 'dorp': allowed is one of drop, delay",
    ),
    "fault without kind": (
        ("[[faults]]", "probability = 0.1"),
        {},
        "faults[0].kind is missing: allowed is one of drop",
    ),
    "fault at nobody": (
        (f'{FAULT}"drop"', "probability = 0.5", 'source = "z"'),
        {},
        "faults[0].source = 'z': allowed is one of a, b",
    ),
    "home crashes": (
        (f'{FAULT}"crash"', 'worker = "a"', "at_ns = 3"),
        {},
        "faults[0].worker = 'a': allowed is a worker other than home",
    ),
    "device of nobody": (
        ("[devices.workers.z]", "forward_ns = 1"),
        {},
        "devices.workers.z = 'z': allowed is one of the workers a, b",
    ),
    "schedule of no kind": (
        ("[schedule]", 'kind = "zb_h3"', "stages = 2"),
        {},
        "schedule.kind = 'zb_h3': allowed is one of gpipe, one_f_one_b",
    ),
    "schedule without a size": (
        ("[schedule]", 'kind = "zb_h1"', "stages = 2"),
        {},
        "schedule.micro_batches is missing: allowed is an integer",
    ),
    "schedule with a key of another": (
        ("[schedule]", 'kind = "gpipe"', "chunks = 2"),
        {},
        "schedule.chunks = 2: allowed is stages, micro_batches, workers",
    ),
    "schedule with a hole": (
        ("[schedule]", 'lists = ["0F0 0B0", "1F0"]'),
        {},
        "schedule: worker b lacks 1B0, or 1I0 and 1W0: each F has a backward",
    ),
    "link settings in part": (
        ("[link]", "resend_ns = 1"),
        {},
        "link.resend_max is mis",
    ),
    "expects no figure": (
        ("losss = 3",),
        {},
        "expect.losss = 3: there is no such figure (do you mean loss?): allowed is one",
    ),
    "expects no error": (
        ('error = "WorkerLsot"',),
        {},
        "expect.error = 'WorkerLsot': allowed is one of JdagError",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_one_line_with_file_key_value_and_what_is_allowed(
    case: str, tmp_path: Path
):
    more, replaced, answer = BAD[case]
    path = written(tmp_path, *more, **replaced)
    with pytest.raises(ScenarioError) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert answer in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path):
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    for path in (tmp_path / "nothing.toml", tmp_path, binary):
        with fails_with(ScenarioError, "scenario.allowed_is_a_scenarios_toml"):
            load(path)


def test_a_program_that_returns_nothing_to_play_is_refused(tmp_path: Path):
    with fails_with(ScenarioError, "scenario.allowed_is_a_function_that"):
        load(scenario_of(tmp_path, "no_case"))


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("takes_nothing", "program = .* allowed is a function that takes the workers"),
        ("places", r"placement.w = None: .* workers a, b; .*:places leaves it out"),
    ],
)
def test_a_program_of_a_wrong_kind_is_refused(program: str, said: str, tmp_path: Path):
    with pytest.raises(ScenarioError, match=said):
        load(scenario_of(tmp_path, program))


def test_a_program_may_not_place_where_nobody_is(tmp_path: Path):
    with fails_with(ScenarioError, "scenario.placement_w_z_places_has"):
        load(scenario_of(tmp_path, "places", "[settings]", 'where = "z"'))
    more = ("[placement]", 'w = "b"', "[settings]", 'where = "z"')
    player = load(scenario_of(tmp_path, "places", *more)).player
    assert player.placement == {"w": "b"}  # type: ignore[attr-defined]
    with fails_with(ScenarioError, "scenario.params_and_their_placement_both"):
        load(scenario_of(tmp_path, "places", "[settings]", "named = false"))


def test_a_program_whose_error_or_result_has_no_text_is_refused_all_the_same(
    tmp_path: Path,
):
    said = "it returned a Shy$"
    with pytest.raises(ScenarioError, match=said):
        load(scenario_of(tmp_path, "returns_without_repr"))
    with fails_with(ScenarioError, "scenario.toml_its_str_raises_valueerror"):
        load(scenario_of(tmp_path, "raises_without_text"))
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
        with fails_with(JdagError, "scenario.events_max_7"):
            cluster.put("b", [jnp.ones(3)] * 3)
            cluster.context().__enter__().call("b", jnp.add, 1.0, 2.0)
            cluster.driver.settle()


def test_a_module_that_raises_is_refused_with_its_line(tmp_path: Path):
    (tmp_path / "raises_on_import.py").write_text("x = 1\ny = x / 0\n")
    path = written(tmp_path, program='program = "raises_on_import:main"')
    with fails_with(ScenarioError, "scenario.zerodivisionerror_raises_on_import_py"):
        load(path)
    (tmp_path / "exits_on_import.py").write_text("import sys\nsys.exit(0)\n")
    path = written(tmp_path, program='program = "exits_on_import:main"')
    with fails_with(ScenarioError, "scenario.systemexit_0_exits_on_import"):
        load(path)


def test_what_a_library_raises_is_said_with_the_line_that_called_it(tmp_path: Path):
    with fails_with(ScenarioError, "scenario.valueerror_shapes_py_in_vector"):
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
    with fails_with(ScenarioError, "scenario.settings_sizes_1_2_5"):
        load(scenario_of(tmp_path, "settings_of_all_kinds", *wrong))


def test_a_placement_moves_a_parameter(tmp_path: Path):
    scenario = load(written(tmp_path, "[placement]", 'w0 = "b"'))
    assert scenario.player.placement["w0"] == "b"  # type: ignore[attr-defined]


def test_a_number_of_workers_names_them(tmp_path: Path):
    assert load(written(tmp_path, workers="workers = 3")).settings.names == (
        "w0",
        "w1",
        "w2",
    )


def test_another_seed_may_be_given(tmp_path: Path):
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
