"""Each test of the conformance suite runs once on every driver."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.drivers import DRIVERS, Driver


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> Driver:
    """A driver, one after the other."""
    return DRIVERS[request.param]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs processes of one kind runs beside each other, so that few are needed.

    Where tests are spread over several processes, these stay together.
    """
    for item in items:
        spec = getattr(item, "callspec", None)
        name = None if spec is None else spec.params.get("driver")
        if name in DRIVERS and name != "sim":
            item.add_marker(pytest.mark.xdist_group(name))


@pytest.fixture
def cluster(driver: Driver) -> Iterator[Any]:
    """Four workers, a to d; the main program runs on a."""
    with driver.cluster() as made:
        yield made
