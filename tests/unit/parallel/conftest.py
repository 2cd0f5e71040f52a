"""Without eight devices there is nothing here to run."""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent

collect_ignore_glob = (
    [] if os.environ.get("JAX_NUM_CPU_DEVICES") == "8" else ["test_*.py"]
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave what is tried with pmap and with shard_map to the second tier for one."""
    for item in items:
        ways = item.name.partition("[")[2].strip("]").split("-")
        if item.path.is_relative_to(HERE) and "shard_map" in ways:
            item.add_marker(pytest.mark.second)
