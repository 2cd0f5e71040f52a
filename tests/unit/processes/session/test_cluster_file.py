"""A cluster's file: what it may say, and what is said if it says something else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from jdag.errors import ScenarioError
from jdag.processes.net.addresses import Address, address_of
from jdag.processes.session.cluster_file import load_cluster_file
from tests.tools.certificates import Issuer
from tests.tools.error_texts import fails_with

GOOD = """
deadline_s = 2.5
token_file = "token"

[workers.trainer]
control = "127.0.0.1:7000"

[workers.ps0]
control = "[::1]:7001"
data = "localhost:7002"
device = "gpu:1"
allow = ["mymodels", "other.models"]
"""
WORKER = '[workers.a]\ncontrol = "127.0.0.1:7000"\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def test_a_file_says_where_workers_are_and_what_they_allow(tmp_path: Path):
    (tmp_path / "token").write_text("0123456789abcdef\n")
    settings = load_cluster_file(written(tmp_path, GOOD))
    assert settings.names == ("trainer", "ps0")
    ps0 = settings.worker("ps0")
    assert ps0.control == Address("::1", 7001)
    assert str(ps0.control) == "[::1]:7001"
    assert settings.listener("ps0") == "tcp:localhost:7002"
    assert ps0.allow == ("mymodels", "other.models")
    assert (ps0.device, settings.deadline_s) == ("gpu:1", 2.5)
    assert settings.listener("trainer") == "unix:@"
    assert settings.token == "0123456789abcdef"
    assert settings.tls_files is None


def test_without_a_file_for_it_a_token_is_made_for_this_user_alone(tmp_path: Path):
    path = written(tmp_path, WORKER)
    assert load_cluster_file(path).token == ""
    load_cluster_file(path).make_token()
    token = load_cluster_file(path).token
    assert len(token) >= 32
    made = tmp_path / "cluster.toml.token"
    assert made.stat().st_mode & 0o777 == 0o600
    load_cluster_file(path).make_token()
    assert load_cluster_file(path).token == token
    assert sorted(tmp_path.iterdir()) == [path, made]
    made.chmod(0o640)
    with fails_with(ScenarioError, "processes.nobody_else_can_read_chmod"):
        _ = load_cluster_file(path).token


def test_with_another_way_to_trust_no_token_is_made(tmp_path: Path):
    (tmp_path / "token").write_text("0123456789abcdef\n")
    load_cluster_file(written(tmp_path, GOOD)).make_token()
    tls = '[tls]\nca = "x"\ncertificate = "x"\nkey = "x"\n'
    path = written(tmp_path, WORKER + tls)
    load_cluster_file(path).make_token()
    assert load_cluster_file(path).token == ""
    assert not (tmp_path / "cluster.toml.token").exists()


def test_where_no_token_can_be_made_it_is_said(tmp_path: Path):
    settings = load_cluster_file(written(tmp_path, WORKER))
    settings = replace(settings, path=tmp_path / "gone" / "cluster.toml")
    with fails_with(ScenarioError, "processes.token_file_none_cannot_be"):
        settings.make_token()


WRONG = (
    ("", "workers is missing; it is required"),
    (
        "workers = 3",
        "workers = 3: expected 1 to 65,536 tables, such as [wor",
    ),
    (
        '[workers."../a"]\ncontrol = "127.0.0.1:7000"',
        "workers = '../a': expected at most 64 letters, digits, _, - and ., "
        "beginning with a letter or digit",
    ),
    (
        '[workers.a]\ncontrol = "127.0.0.1"',
        "workers.a.control = '127.0.0.1': expected host:port, with a port of 1 to "
        "65535, such as 127.0.0.1:7001",
    ),
    (
        '[workers.a]\ncontrol = "127.0.0.1:0"',
        "workers.a.control = '127.0.0.1:0': expected host:port",
    ),
    (
        '[workers.a]\ncontrol = "10.1.2.3:7000"',
        "workers.a.control = '10.1.2.3:7000': expected a loopback address "
        "(127.0.0.1), or any address if [tls] has ca, certificate and key",
    ),
    (
        WORKER + 'data = "0.0.0.0:7001"',
        "workers.a.data = '0.0.0.0:7001': expected a loopback address",
    ),
    (
        WORKER + '[workers.b]\ncontrol = "127.0.0.1:7000"',
        "workers.b.control = '127.0.0.1:7000': expected an unused address; "
        "workers.a.control has the same address",
    ),
    (
        WORKER + 'device = "tpu"',
        "workers.a.device = 'tpu': expected cpu, gpu, or gpu:N with the number of "
        "the GPU",
    ),
    (WORKER + 'allow = ["a b"]', "workers.a.allow[0] = 'a b': expected a module"),
    (WORKER + 'allow = "os"', "workers.a.allow = 'os': expected a list of modules"),
    (
        WORKER + 'allow = ["__main__"]',
        "workers.a.allow[0] = '__main__': expected a module",
    ),
    (WORKER + "colour = 1", "workers.a.colour = 1: expected one of the keys control"),
    (
        "redy_s = 1\n" + WORKER,
        "redy_s = 1: expected one of the keys workers, tls, token_file, deadline_s, "
        "ready_s, value_bytes_max, nesting_max (did you mean ready_s?)",
    ),
    (
        'carrier = "grpc"\n' + WORKER,
        "carrier = 'grpc' was removed: leave it out; sockets carry all data, gRPC is "
        "the control plane",
    ),
    ("deadline_s = 0\n" + WORKER, "deadline_s = 0: expected a number of seconds"),
    (
        "value_bytes_max = 0\n" + WORKER,
        "value_bytes_max = 0: expected an integer >= 1",
    ),
    ('[tls]\nca = "ca.pem"\n' + WORKER, "tls.certificate is missing"),
)


@pytest.mark.parametrize(("text", "words"), WRONG, ids=[words for _, words in WRONG])
def test_a_mistake_is_one_line_with_the_file_the_key_and_what_is_allowed(
    tmp_path: Path, text: str, words: str
):
    path = written(tmp_path, text)
    with pytest.raises(ScenarioError) as caught:
        load_cluster_file(path)
    assert str(caught.value).startswith(f"{path}: {words}")
    assert "\n" not in str(caught.value)


def test_a_worker_that_the_file_does_not_name_is_refused_with_those_it_does(tmp_path):
    path = written(tmp_path, GOOD)
    with fails_with(ScenarioError, "processes.name_ps1_allowed_is_one"):
        load_cluster_file(path).worker("ps1")
    names: tuple[Any, ...] = (7, None, ["trainer"], np.zeros(2))
    for name in names:
        with fails_with(ScenarioError, "processes.name_allowed_is_one_of"):
            load_cluster_file(path).worker(name)


def test_a_token_that_is_short_or_not_there_is_refused(tmp_path: Path):
    path = written(tmp_path, 'token_file = "token"\n' + WORKER)
    with fails_with(ScenarioError, "processes.token_file_token_no_such"):
        _ = load_cluster_file(path).token
    (tmp_path / "token").write_text("short\n")
    with fails_with(ScenarioError, "processes.16_to_4096_characters_it"):
        _ = load_cluster_file(path).token


def test_files_that_no_file_can_be_are_refused(tmp_path: Path):
    path = written(tmp_path, 'token_file = "a\\u0000b"\n' + WORKER)
    said = r"token_file = 'a\\x00b': .* '/.*a\\x00b': no file can have this name"
    with pytest.raises(ScenarioError, match=said):
        _ = load_cluster_file(path).token
    (tmp_path / "ca.pem").write_text("")
    tls = '[tls]\nca = "ca.pem"\ncertificate = "a\\u0000b"\nkey = "a.key"\n'
    with fails_with(ScenarioError, "processes.tls_certificate_a_x00b_no"):
        _ = load_cluster_file(written(tmp_path, WORKER + tls)).tls_files


def test_certificates_that_are_none_are_refused(tmp_path: Path):
    tls = '[tls]\nca = "ca.pem"\ncertificate = "a.crt"\nkey = "a.key"\n'
    path = written(tmp_path, tls + '[workers.a]\ncontrol = "10.1.2.3:7000"')
    with pytest.raises(ScenarioError) as caught:
        _ = load_cluster_file(path).tls_files
    assert str(caught.value).startswith(
        f"{path}: TLS ca {tmp_path / 'ca.pem'}: No such"
    )
    issued = Issuer(tmp_path, "ca").issue("a")
    assert load_cluster_file(path).tls_files == tuple(issued)
    # Without an address for data the system chooses a port on the same host.
    assert load_cluster_file(path).listener("a") == "tcp:10.1.2.3:0"


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "a", ":1", "a:", "a:x", "a:65536", "a:-1", "::1:7", " :7"),
        *("a\0:7", "a..b:7", f"{'a' * 64}:7", "a\n:7"),
    ],
)
def test_what_is_no_address_is_none(text: str):
    assert address_of(text) is None
