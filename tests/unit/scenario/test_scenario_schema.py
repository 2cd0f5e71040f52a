"""What a scenario's tables describe is what Python makes."""

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from jdag.errors import ScenarioError
from jdag.scenario import load
from jdag.scenario.run_scenario import run_scenario
from jdag.scenario.scenario_schema import devices_of, network_of, schedule_of
from jdag.schedules import one_f_one_b
from jdag.sim import DeviceModel, LinkModel, LogGP, Network, Roofline
from jdag.sim.presets import ethernet_100g, h100_node
from jdag.sim.topologies import (
    Dimension,
    fully_connected,
    ring,
    switch,
    topology,
    torus,
    tree,
)
from tests.tools.scenario_cases import written

FOUR = ["a", "b", "c", "d"]
LINK = LinkModel(300, 1_000_000_000)
KEYS = "latency_ns = 300\nbandwidth_bytes_per_s = 1_000_000_000\n"
RATE = 2_000_000_000


def file_of(folder: Path, *more: str) -> Path:
    lines = "[schedule]", 'kind = "zb_h1"', "stages = 4", "micro_batches = 4"
    return written(folder, *lines, *more, workers=f"workers = {FOUR}", x64="")


def described(network: Network) -> Any:
    paths = [network.path(*pair) for pair in permutations(FOUR, 2)]
    lanes = network.port_bandwidth_bytes_per_s, network.control_lane
    return network.default, dict(network.links), lanes, network.cut_through, paths


def told(folder: Path, text: str) -> Any:
    return described(network_of(load(file_of(folder, text)).settings, clean=False))


NETWORKS = {
    "a free control lane": (
        f"[network]\n{KEYS}control_lane = true",
        Network(LINK, control_lane=True),
    ),
    "a control lane with a latency": (
        f"[network]\n{KEYS}[network.control_lane]\nlatency_ns = 50",
        Network(LINK, control_lane=LinkModel(50)),
    ),
    "a control lane by LogGP": (
        f'[network]\n{KEYS}control_lane = {{ model = "loggp", overhead_ns = 7 }}',
        Network(LINK, control_lane=LogGP(overhead_ns=7)),
    ),
    "LogGP": (
        f'[network]\n{KEYS}model = "loggp"\noverhead_ns = 20\ngap_ns = 90',
        Network(LogGP(300, 1_000_000_000, overhead_ns=20, gap_ns=90)),
    ),
    "one link by LogGP": (
        f'[[network.links]]\n{KEYS}source = "a"\ndestination = "b"\nmodel = "loggp"\n'
        "gap_ns = 900",
        Network(LinkModel(), {("a", "b"): LogGP(300, 1_000_000_000, gap_ns=900)}),
    ),
    "ports": (
        f"[network]\n{KEYS}port_bandwidth_bytes_per_s = {RATE}",
        Network(LINK, port_bandwidth_bytes_per_s=RATE),
    ),
    "a ring": (f'[network.topology]\nkind = "ring"\n{KEYS}', ring(FOUR, LINK)),
    "a switch with cut-through": (
        f'[network.topology]\nkind = "switch"\ncut_through = true\n{KEYS}',
        switch(FOUR, LINK, cut_through=True),
    ),
    "fully connected": (
        f'[network.topology]\nkind = "fully_connected"\n{KEYS}',
        fully_connected(FOUR, LINK),
    ),
    "a tree": (
        f'[network.topology]\nkind = "tree"\narity = 3\n{KEYS}',
        tree(FOUR, LINK, arity=3),
    ),
    "a torus of workers in another order": (
        '[network.topology]\nkind = "torus"\nshape = [2, 2]\n'
        f'workers = ["d", "a", "c", "b"]\n{KEYS}',
        torus(["d", "a", "c", "b"], (2, 2), LINK),
    ),
    "several dimensions": (
        "[network.topology]\ncut_through = true\n"
        f'[[network.topology.dimensions]]\nkind = "ring"\nsize = 2\n{KEYS}'
        '[[network.topology.dimensions]]\nkind = "tree"\nsize = 2\narity = 4\n'
        "latency_ns = 40",
        topology(
            FOUR,
            [Dimension("ring", 2, LINK), Dimension("tree", 2, LinkModel(40), 4)],
            cut_through=True,
        ),
    ),
    "an H100 node": (
        '[network.topology]\nkind = "h100_node"\nlatency_ns = 200',
        h100_node(FOUR, latency_ns=200),
    ),
    "100 Gbit/s Ethernet": (
        '[network.topology]\nkind = "ethernet_100g"',
        ethernet_100g(FOUR),
    ),
}


@pytest.mark.parametrize("case", NETWORKS)
def test_a_network_is_that_of_python(case: str, tmp_path: Path):
    text, network = NETWORKS[case]
    assert told(tmp_path, text) == described(network) != described(Network(LinkModel()))


def test_a_topology_of_some_workers_leaves_the_others_their_links(tmp_path: Path):
    text = (
        "[network]\nlatency_ns = 11\ncontrol_lane = true\n"
        f'[network.topology]\nkind = "ring"\nworkers = ["a", "b", "c"]\n{KEYS}'
        '[[network.links]]\nsource = "c"\ndestination = "d"\nlatency_ns = 5_000'
    )
    rings = ring(["a", "b", "c"], LINK)
    network = Network(
        LinkModel(11), {("c", "d"): LinkModel(5_000)}, control_lane=True,
        routed=rings.routed, route=rings.route,
    )  # fmt: skip
    assert told(tmp_path, text) == described(network)


DEVICES = {
    "F, I and W of a function": (
        "[devices]\nfunctions = { layer = [30, 50, 70] }",
        DeviceModel(functions={"layer": (30, 50, 70)}),
    ),
    "a roofline": (
        "[devices.roofline]\nflops_per_s = 100_000_000\nbytes_per_s = 50_000_000_000",
        DeviceModel(roofline=Roofline(flops_per_s=10**8, bytes_per_s=50_000_000_000)),
    ),
}


@pytest.mark.parametrize("case", DEVICES)
def test_a_device_is_that_of_python(case: str, tmp_path: Path):
    text, device = DEVICES[case]
    settings = load(file_of(tmp_path, text)).settings
    assert devices_of(settings) == dict.fromkeys(FOUR, device)


def test_1f1b_is_the_same_schedule_by_its_short_name(tmp_path: Path):
    settings = load(file_of(tmp_path), changes={"schedule": "1f1b"}).settings
    made = one_f_one_b(stages=4, micro_batches=4, workers=FOUR)
    assert schedule_of(settings) == made


JITTERY = {
    "topology": f'[network.topology]\nkind = "ring"\n{KEYS}jitter_ns = 900',
    "dimensions": f'[[network.topology.dimensions]]\nkind = "ring"\nsize = 4\n{KEYS}'
    "jitter_ns = 900",
    "control lane": f"[network]\n{KEYS}control_lane = {{ jitter_ns = 900 }}",
}


@pytest.mark.parametrize("case", JITTERY)
def test_a_clean_network_has_no_jitter_anywhere_and_bits_are_compared_with_it(
    case: str, tmp_path: Path
):
    scenario = load(file_of(tmp_path, JITTERY[case]))

    def jitter_ns(clean: bool) -> int:
        network = network_of(scenario.settings, clean=clean)
        lane: Any = network.control_lane or LinkModel()
        return network.model("a", "b").jitter_ns + int(lane.jitter_ns)

    assert (jitter_ns(False), jitter_ns(True)) == (900, 0)
    text = file_of(tmp_path, JITTERY[case]).read_text().replace("[schedule]", "[x]")
    text = text.partition("[x]")[0] + JITTERY[case]
    (tmp_path / "mine.toml").write_text(text)
    answer = run_scenario(load(tmp_path / "mine.toml"), lambda *_: None)
    assert answer.figures["same_bits_as_clean"] is True


TOPOLOGY = "network.topology"
DIMENSIONS = "network.topology.dimensions"
PRESET = 'kind = "h100_node"\nbandwidth_bytes_per_s = 3'
# A table, its keys, and the error after the table's name.
BAD = [
    ("network", "gap_ns = 3", ".gap_ns = 3: expected one of the keys latency_ns, b"),
    (
        "network",
        'model = "logp"',
        ".model = 'logp': expected one of alpha_beta, logg",
    ),
    ("network", "model = [3]", ".model = [3]: expected one of alpha_beta, loggp"),
    ("network", "control_lane = 3", ".control_lane = 3: expected true, false or a t"),
    (
        "network.control_lane",
        "latency_ns = -1",
        ".latency_ns = -1: expected an integ",
    ),
    (TOPOLOGY, 'kind = "mesh"', ".kind = 'mesh': expected one of ring, switch"),
    (TOPOLOGY, "latency_ns = 3", ".kind = None: expected one of ring, switch"),
    (
        *(TOPOLOGY, 'kind = "ring"\narity = 3'),
        ".arity = 3: expected kind, workers, cut_through, latency_ns",
    ),
    (TOPOLOGY, PRESET, ".bandwidth_bytes_per_s = 3: expected kind, workers"),
    (TOPOLOGY, 'kind = "torus"', ".shape is missing: expected a list of integers"),
    (
        *(TOPOLOGY, 'kind = "torus"\nshape = [2, 3]'),
        ".workers = ('a', 'b', 'c', 'd'): expected a list of 6",
    ),
    (
        *(TOPOLOGY, 'kind = "ring"\nworkers = ["a", "z"]'),
        ".workers = 'z': expected one of the workers a, b, c, d",
    ),
    (
        TOPOLOGY,
        'kind = "ring"\nlatency_ns = 0.5',
        ".latency_ns = 0.5: expected an in",
    ),
    (
        *(f"[{DIMENSIONS}]", 'kind = "torus"\nsize = 4'),
        "[0].kind = 'torus': expected one of ring",
    ),
    (
        "network",
        'port_bandwidth_bytes_per_s = 3\n[network.topology]\nkind = "ring"',
        ".port_bandwidth_bytes_per_s = 3: expected None with a topology",
    ),
    (
        "network",
        'links = [{ source = "a", destination = "b" }]\n'
        '[network.topology]\nkind = "ring"',
        ".links[0].destination = 'b': expected a worker outside of",
    ),
]


@pytest.mark.parametrize(("table", "keys", "error"), BAD)
def test_a_wrong_table_is_one_line_with_its_key(
    table: str, keys: str, error: str, tmp_path: Path
):
    with pytest.raises(ScenarioError) as raised:
        load(file_of(tmp_path, f"[{table}]\n{keys}"))
    message = f"{tmp_path / 'mine.toml'}: {table.strip('[]')}{error}"
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
