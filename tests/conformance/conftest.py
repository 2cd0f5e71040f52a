"""Each test of the conformance suite runs once on every driver."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.drivers import DRIVERS, Driver


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> Driver:
    return DRIVERS[request.param]


@pytest.fixture
def cluster(driver: Driver) -> Iterator[Any]:
    """Four workers, a to d; the main program runs on a."""
    with driver.cluster() as made:
        yield made
