"""Workers that are killed or stopped at any moment, over gRPC and with TLS."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jdag.errors import JoinError
from jdag.rpc.control import ControlClient
from jdag.rpc.requests import Health
from jdag.rpc.tls import load
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


@pytest.fixture(scope="module")
def by_grpc() -> Iterator[Field]:
    with opened(carrier="grpc") as made:
        yield made


@pytest.fixture(scope="module")
def by_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    files = Issuer(tmp_path_factory.mktemp("certificates"), "ca").issue("here")
    with opened(tls=files) as made:
        yield made


def test_a_worker_that_refuses_a_certificate_prints_nothing_of_it(
    by_tls: Field, tmp_path: Path
) -> None:
    """Whoever shows it is told why."""
    stranger = load(*Issuer(tmp_path, "ca").issue("here"))
    client = ControlClient("it", by_tls.addresses["b"], tls=stranger)
    with pytest.raises(JoinError, match="TLS refused: unable to get local issuer"):
        client.ask(Health())
    client.close()
    with by_tls.workers.connect() as cluster:
        assert cluster.put("b", 1.0).fetch() == 1.0
    log = by_tls.workers.launch.log_of("b").read_text(encoding="utf-8")
    assert "andshake" not in log


@pytest.mark.second
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        pytest.param(moment, number, id=f"{moment.__name__}-{number.name}")
        for moment in MOMENTS
        for number in (signal.SIGSTOP, signal.SIGKILL)
    ],
)
def test_over_grpc_who_is_lost_is_named_in_time_and_may_come_back(
    moment: Any, number: int, by_grpc: Field, tmp_path: Path
) -> None:
    lost_and_back(moment, number, by_grpc, tmp_path)


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        pytest.param(in_backward, signal.SIGKILL, id="killed in backward"),
        pytest.param(
            in_the_end, signal.SIGSTOP, id="stopped", marks=pytest.mark.second
        ),
    ],
)
def test_with_tls_who_is_lost_is_named_in_time_and_may_come_back(
    moment: Any, number: int, by_tls: Field, tmp_path: Path
) -> None:
    lost_and_back(moment, number, by_tls, tmp_path)
