"""A simulated run depends on nothing that its process did before."""

import os
import subprocess
import sys

import pytest

from jdag.scenario import load
from jdag.scenario.run_scenario import run_scenario
from tests import ROOT

FOLDER = ROOT / "scenarios"
# `data_parallel_digits` needs several devices; `digits` is 264 steps of one program.
LONG = ("data_parallel_digits", "digits")
NAMES = [path.stem for path in sorted(FOLDER.glob("*.toml")) if path.stem not in LONG]


def digest(name: str) -> str:
    answer = run_scenario(load(FOLDER / f"{name}.toml"), lambda *_: None)
    answer.cluster.close()
    return str(answer.figures.get("digest") or answer.cluster.trace.digest)


@pytest.mark.second
def test_each_scenario_has_one_digest_whatever_ran_before_it():
    """Here each runs after those before it, and elsewhere after those behind it."""
    backwards = [
        sys.executable,
        "-m",
        "tests.properties.test_histories",
        *reversed(NAMES),
    ]
    environment = {**os.environ, "JAX_ENABLE_X64": "1"}
    with subprocess.Popen(
        backwards, stdout=subprocess.PIPE, text=True, env=environment
    ) as other:
        digests = [digest(name) for name in NAMES]
        said, _ = other.communicate(timeout=300)
    assert len(NAMES) == 24 and len(dict.fromkeys(digests)) == 24
    assert said.split()[::-1] == digests


if __name__ == "__main__":
    for scenario in sys.argv[1:]:
        print(digest(scenario), flush=True)
