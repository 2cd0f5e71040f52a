"""Workers that are killed or stopped at any moment, over gRPC and with TLS."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Issuer
from tests.test_failing_workers import (
    Field,
    in_a_save,
    in_a_step,
    in_backward,
    in_forward,
    in_the_announcement,
    in_the_end,
    lost_and_back,
    opened,
)

MOMENTS = (
    *(in_forward, in_the_announcement, in_backward),
    *(in_the_end, in_a_step, in_a_save),
)


def name_of(one: Any) -> str:
    return getattr(one, "__name__", None) or str(one.name)


@pytest.fixture(scope="module")
def by_grpc() -> Iterator[Field]:
    with opened(carrier="grpc") as made:
        yield made


@pytest.fixture(scope="module")
def by_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    files = Issuer(tmp_path_factory.mktemp("certificates"), "ca").issue("here")
    with opened(tls=files) as made:
        yield made


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=name_of)
@pytest.mark.parametrize("moment", MOMENTS, ids=name_of)
def test_over_grpc_who_is_lost_is_named_in_time_and_may_come_back(
    moment: Any, number: int, by_grpc: Field, tmp_path: Path
) -> None:
    lost_and_back(moment, number, by_grpc, tmp_path)


@pytest.mark.parametrize(
    ("moment", "number"),
    [(in_backward, signal.SIGKILL), (in_the_end, signal.SIGSTOP)],
    ids=name_of,
)
def test_with_tls_who_is_lost_is_named_in_time_and_may_come_back(
    moment: Any, number: int, by_tls: Field, tmp_path: Path
) -> None:
    lost_and_back(moment, number, by_tls, tmp_path)
