"""Each test of the conformance suite runs once on every driver."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.drivers import DRIVERS, Driver

HERE = Path(__file__).parent


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> Driver:
    """A driver, one after the other."""
    return DRIVERS[request.param]


# A pass and an error; what else there is over gRPC is of the second tier.
OVER_GRPC = (
    "test_several_roots_are_the_backward_of_their_sum",
    "test_an_error_in_the_backward_of_the_second_hop_brings_the_path_of_workers",
    "test_matrices_of_different_shapes_over_workers",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most of what is carried by gRPC to the second tier."""
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        name, _, params = item.name.partition("[")
        if params.startswith("grpc") and name not in OVER_GRPC:
            item.add_marker(pytest.mark.second)


@pytest.fixture
def cluster(driver: Driver) -> Iterator[Any]:
    """Four workers, a to d; the main program runs on a."""
    with driver.cluster() as made:
        yield made
