"""`jdag worker` and `jdag up`: processes by a cluster's file."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jdag.cli.hosting import chosen, options_of
from jdag.errors import JoinError, ScenarioError
from jdag.processes.launch.launch import is_here
from jdag.processes.launch.main_session import Session
from jdag.processes.session.cluster_file import ClusterSettings, load_cluster_file
from jdag.processes.session.control import ControlClient
from jdag.processes.session.requests import Health, Info
from tests import ROOT
from tests.tools.command_cases import command
from tests.tools.error_texts import fails_with
from tests.tools.rpc_cases import TOKEN, free_address, plain, plan_of
from tests.tools.stream_cases import soon

LONG_S = 60.0
X64 = {"JAX_ENABLE_X64": "1"}  # As tests/conftest.py has it.
# The command, but with nodes that have no engine.
COMMAND = """
import sys, jdag.cli.hosting
jdag.cli.hosting.NODE = "tests.tools.rpc_cases:make_plain"
from jdag.cli.commands import main
main()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text(TOKEN)
    tables = ['token_file = "token"']
    for name in ("m", "a", "b"):
        tables.append(f'[workers.{name}]\ncontrol = "{free_address()}"')
    path = tmp_path / "cluster.toml"
    path.write_text("\n".join(tables))
    return path


@contextmanager
def running(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **X64},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield command
    finally:
        command.kill()
        command.communicate(timeout=LONG_S)


def until(command: subprocess.Popen[str], words: str) -> str:
    assert command.stdout is not None
    printed = ""
    for line in command.stdout:
        printed += line
        if words in line:
            return printed
    assert command.stderr is not None
    raise AssertionError(printed + command.stderr.read())


def join(settings: ClusterSettings, *workers: str) -> Session:
    controls = {name: settings.worker(name).control for name in workers}
    return Session(plan_of(controls, control=settings.worker("m").control))


def test_up_starts_the_workers_of_this_host_and_stops_them_at_ctrl_c(file: Path):
    logs = file.parent / "logs"
    settings = load_cluster_file(file)
    with running("up", file, "--except", "m", "--logs", logs) as command:
        printed = until(command, "press Ctrl-C to stop the workers")
        for name in "ab":
            assert str(settings.worker(name).control) in printed
            assert str(logs / f"{name}.log") in printed
        for _ in range(2):  # Sessions come and go.
            with join(settings, "a", "b") as session:
                assert plain(session).ask("b", b"hi") == b"answer hi from b\n"
        command.send_signal(signal.SIGINT)
        assert command.stdout is not None
        assert "stopping" in command.stdout.read()
        assert command.wait(LONG_S) == 0
    for name in "ab":
        client = ControlClient(name, settings.worker(name).control)
        with fails_with(Exception, "cli.connection_refused"):
            client.ask(Health())
        client.close()


@pytest.mark.second
def test_a_worker_started_by_hand_says_where_it_is_and_drains_at_sigterm(file: Path):
    settings = load_cluster_file(file)
    with running("worker", file, "--name", "a") as command:
        until(command, f"worker a: at {settings.worker('a').control}, process ")
        # In place of the command: what was started is what listens.
        client = ControlClient("worker 'a'", settings.worker("a").control)
        assert client.ask(Health())["pid"] == command.pid
        client.close()
        with join(settings, "a") as session:
            assert plain(session).ask("a", b"hi") == b"answer hi from a\n"
            with running("worker", file, "--name", "a") as second:
                _, said = second.communicate(timeout=LONG_S)
                taken = settings.worker("a").control
                assert (
                    said == f"jdag: cannot listen at {taken}: Address already in use\n"
                )
                assert second.returncode == 2
            command.send_signal(signal.SIGTERM)
            assert command.wait(LONG_S) == 0
            soon(lambda: "a" in session.members.lost)


@pytest.mark.second
def test_who_cannot_read_the_token_beside_the_file_can_take_no_worker(file: Path):
    file.write_text(file.read_text().replace('token_file = "token"', ""))
    with running("worker", file, "--name", "a") as command:
        until(command, "worker a: at ")
        settings = load_cluster_file(file)
        client = ControlClient("worker 'a'", settings.worker("a").control)
        with fails_with(JoinError, "cli.token_is_missing"):
            client.ask(Info(token=""))
        assert client.ask(Info(token=settings.token))["worker"] == "a"
        client.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("worker FILE --name c", "FILE: name = 'c': expected one of m, "),
        ("worker FILE --name a --device tpu", "--device = 'tpu': expected"),
        ("worker nowhere.toml --name a", "nowhere.toml: No such file"),
        ("up FILE --logs /proc", "logs = '/proc': expected the path of"),
        ("up FILE --except x", "FILE: name = 'x': expected one of m,"),
        ("up FILE --only x", "FILE: name = 'x': expected one of m,"),
        ("up FILE --only a --except a", "file = 'FILE': expected"),
    ],
)
def test_a_mistake_is_one_line(file: Path, arguments: str, message: str):
    code, _, err = command(*arguments.replace("FILE", str(file)).split())
    assert code == 2 and err.count("\n") == 1
    assert err.startswith(f"jdag: {message.replace('FILE', str(file))}")


def test_up_takes_the_workers_of_this_host_alone(file: Path):
    settings = load_cluster_file(file)
    assert chosen(settings, [], ["m"]) == ["a", "b"]
    assert chosen(settings, ["b", "a"], []) == ["a", "b"]
    assert is_here("127.0.0.1") and is_here("localhost")
    assert not is_here("192.0.2.1") and not is_here("no.such.invalid")
    text = file.read_text() + '\n[tls]\nca = "x"\ncertificate = "x"\nkey = "x"\n'
    file.write_text(text + '[workers.far]\ncontrol = "192.0.2.1:7000"\n')
    assert chosen(load_cluster_file(file), [], ["m"]) == ["a", "b"]
    with fails_with(ScenarioError, "cli.no_worker_to_start"):
        chosen(load_cluster_file(file), [], ["m", "a", "b"])


def test_a_worker_is_told_what_the_file_says(file: Path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    text = file.read_text().replace("[workers.b]", '[workers.b]\nallow = ["mine"]')
    file.write_text(text)
    settings = load_cluster_file(file)
    options = options_of(settings, "b", "cpu")
    assert options.control == str(settings.worker("b").control)
    assert (options.token, options.device) == (TOKEN, "cpu")
    assert options.allow == ("mine",)
    assert not options.once
    # Modules beside the file are found.
    assert options.path is not None
    assert options.path[0] == str(file.parent.resolve())
    assert options.pythonpath == "somewhere"
    assert TOKEN not in repr(options)
