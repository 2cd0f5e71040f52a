"""Workers that are killed or stopped at any moment, as processes of their own."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

import jdag
from jdag.errors import JoinError, WorkerLost
from jdag.processes.launch.launch import Launch
from jdag.processes.net.loop import clock_ns
from jdag.processes.net.tls import load_tls
from jdag.processes.session.control import ControlClient
from jdag.processes.session.requests import Health
from tests import ROOT
from tests.tools import failing_cases as cases
from tests.tools.certificates import Issuer
from tests.tools.error_texts import fails_with
from tests.tools.rpc_workers import ALLOWED, Workers
from tests.tools.stream_cases import soon

DEADLINE_S = 5.0
TICK_NS = 10_000_000
X = jnp.linspace(0.5, 2.0, 7)
LARGE = np.ones(4 << 20)  # 32 MiB.


class Field:
    def __init__(self, here: Path, **settings: Any) -> None:
        self.here = here
        self.env = {cases.HERE: str(here)}
        self.workers = Workers(
            ["a", "b", "c"], env=self.env, deadline_s=DEADLINE_S, **settings
        )
        self.addresses = dict(self.workers.launch.addresses)
        self.pids = dict(self.workers.launch.pids)
        self.launches: list[Launch] = []

    def revive(self, name: str, number: int) -> None:
        for file in self.here.iterdir():
            file.unlink()
        if number == signal.SIGSTOP:
            os.kill(self.pids[name], signal.SIGCONT)
            return
        at = {"control": str(self.addresses[name])}
        options = replace(self.workers.options(name), **at)
        started = Launch([options], env=self.env)
        self.launches.append(started)
        self.pids[name] = started.pids[name]

    def heal(self) -> None:
        for name, pid in self.pids.items():
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                self.revive(name, signal.SIGKILL)

    def close(self) -> None:
        for pid in self.pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for launch in self.launches:
            launch.close()
        self.workers.close()


@contextmanager
def opened(**settings: Any) -> Iterator[Field]:
    with tempfile.TemporaryDirectory() as here:
        made = Field(Path(here), **settings)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    with opened() as made:
        yield made


class Clock(threading.Thread):
    """Time as this process was given it: what it waited for its turn does not count.

    A host that is busy, or stalls, keeps nobody's deadline.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over, self._turn = threading.Event(), threading.Lock()
        self._late_ns, self._looked_ns = 0, clock_ns()
        self.start()

    def run(self) -> None:
        while not self._over.wait(TICK_NS / 1e9):
            self.now_ns()

    def now_ns(self) -> int:
        with self._turn:
            now_ns = clock_ns()
            self._late_ns += max(0, now_ns - self._looked_ns - TICK_NS)
            self._looked_ns = now_ns
            return now_ns - self._late_ns

    def __enter__(self) -> "Clock":
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


class Blow(threading.Thread):
    def __init__(
        self, field: Field, victim: str, number: int, clock: Clock, *, at_once: bool
    ) -> None:
        super().__init__(daemon=True)
        self.clock = clock
        self.pid = field.pids[victim]
        self.waits = field.here / str(self.pid)
        self.number, self.at_once = number, at_once
        self.struck_ns: int | None = None
        self.start()
        if at_once:
            self.join()

    def run(self) -> None:
        if not self.at_once:
            soon(self.waits.exists)
        self.struck_ns = self.clock.now_ns()
        os.kill(self.pid, self.number)


def in_forward(cluster: Any, leaf: Any, folder: Path) -> None:
    with cluster.context() as ctx:
        ctx.call("c", cases.waits, leaf).fetch()


def in_backward(cluster: Any, leaf: Any, folder: Path) -> None:
    with cluster.context() as ctx:
        h = ctx.call("c", cases.backward_waits, leaf)
        ctx.backward(ctx.call("b", cases.total, h, h, h))


def in_the_end(cluster: Any, leaf: Any, folder: Path) -> None:
    with cluster.context() as ctx:
        ctx.on_gradient(leaf, cases.hook_waits)
        ctx.backward(ctx.call("b", cases.total, ctx.call("c", cases.scaled, leaf, 2.0)))


def in_a_step(cluster: Any, leaf: Any, folder: Path) -> None:
    with cluster.context() as ctx:
        ctx.backward(ctx.call("b", cases.total, leaf))
        cluster.update(cases.lowered_after_waiting, leaf, ctx.gradient(leaf))
    leaf.fetch()


def in_a_save(cluster: Any, leaf: Any, folder: Path) -> None:
    cluster.update(cases.lowered_after_waiting, leaf, leaf)
    cluster.save(folder / "saved", leaf=leaf)


def in_a_program(cluster: Any, leaf: Any, folder: Path) -> None:
    with cluster.context() as ctx:
        ctx.call("c", cases.waits_as_program, leaf).fetch()


def in_a_run(cluster: Any, leaf: Any, folder: Path) -> None:
    cluster.run({"c": cases.runs_alone})


def of_which_only_another_knows(cluster: Any, leaf: Any, folder: Path) -> None:
    other = cluster.put("b", X)
    try:
        with cluster.context() as ctx:
            ctx.call("b", cases.calls_c, other).fetch()
    finally:
        cluster.drop(other)


def in_the_announcement(cluster: Any, leaf: Any, folder: Path) -> None:
    """It has computed forward, and is gone when the pass is announced to it."""
    with cluster.context() as ctx:
        loss = ctx.call("b", cases.total, ctx.call("c", cases.scaled, leaf, 2.0))
        loss.fetch()
        folder.joinpath("now").touch()
        soon(folder.joinpath("struck").exists)
        ctx.backward(loss)


def with_much_on_its_way(cluster: Any, leaf: Any, folder: Path) -> None:
    folder.joinpath("now").touch()
    with cluster.context() as ctx:
        while not folder.joinpath("struck").exists():
            ctx.call("c", cases.scaled, LARGE, 2.0)
        ctx.call("c", cases.scaled, LARGE, 2.0).fetch()


AT_ONCE = (in_the_announcement, with_much_on_its_way)
MOMENTS = (
    *(in_forward, in_backward, in_the_end, in_a_step, in_a_save, in_a_program),
    *(in_a_run, of_which_only_another_knows, *AT_ONCE),
)


def survivors(cluster: Any) -> dict[str, tuple[int, int, int]]:
    return {
        worker: (each["live_contexts"], each["live_passes"], each["values_held"])
        for worker, each in cluster.info().items()
        if worker != "c"
    }


def strike(field: Field, number: int, moment: Any, folder: Path, clock: Clock) -> Blow:
    if moment not in AT_ONCE:
        return Blow(field, "c", number, clock, at_once=False)
    blow = Blow.__new__(Blow)

    def later() -> None:
        soon(folder.joinpath("now").exists)
        Blow.__init__(blow, field, "c", number, clock, at_once=True)
        folder.joinpath("struck").touch()

    threading.Thread(target=later, daemon=True).start()
    return blow


# Each takes as long as the deadline, or a process; `test_breaking` has all moments.
FIRST = {
    signal.SIGSTOP: (in_forward, of_which_only_another_knows),
    signal.SIGKILL: (in_backward, in_a_program, with_much_on_its_way),
}
BLOWS = [
    pytest.param(
        moment,
        number,
        marks=[] if moment in FIRST[number] else pytest.mark.second,
        id=f"{moment.__name__}-{number.name}",
    )
    for moment in MOMENTS
    for number in FIRST
]


@pytest.mark.parametrize(("moment", "number"), BLOWS)
def test_who_is_lost_is_named_in_time_and_may_come_back(
    moment: Any, number: int, field: Field, tmp_path: Path
) -> None:
    lost_and_back(moment, number, field, tmp_path)


def lost_and_back(moment: Any, number: int, field: Field, tmp_path: Path) -> None:
    field.heal()
    with field.workers.connect() as cluster, Clock() as clock:
        leaf = cluster.put("c", X)
        before = survivors(cluster)
        blow = strike(field, number, moment, tmp_path, clock)
        with fails_with(WorkerLost, "processes.worker_c_is_lost"):
            moment(cluster, leaf, tmp_path)
        heard_ns = clock.now_ns()
        assert blow.struck_ns is not None
        assert heard_ns - blow.struck_ns < (DEADLINE_S + 1.0) * 1e9
        soon(lambda: survivors(cluster) == before)
        with cluster.context() as ctx:  # The others go on.
            assert ctx.call("b", cases.total, X, X, X).fetch() == cases.total(X, X, X)
        field.revive("c", number)
        soon(lambda: bool(cluster.driver.incarnations.get("c")))
        again = cluster.put("c", 2 * X)
        with cluster.context() as ctx:
            h = ctx.call("c", cases.scaled, again, 3.0)
            ctx.backward(ctx.call("b", cases.total, h))
            np.testing.assert_allclose(ctx.gradient(again).fetch(), 36 * X)
        with fails_with(WorkerLost, "processes.worker_c_is_lost_c"):
            leaf.fetch()


@pytest.mark.second
def test_with_tls_it_is_so_and_who_refuses_a_certificate_prints_nothing_of_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "others").mkdir()
    stranger = load_tls(*Issuer(tmp_path / "others", "ca").issue("here"))
    with opened(tls=Issuer(tmp_path, "ca").issue("here")) as field:
        client = ControlClient("it", field.addresses["b"], tls=stranger)
        with fails_with(JoinError, "processes.tls_refused_unable_to_get"):
            client.ask(Health())
        client.close()
        lost_and_back(in_backward, signal.SIGKILL, field, tmp_path)
        lost_and_back(in_the_end, signal.SIGSTOP, field, tmp_path)
        log = field.workers.launch.log_of("b")
        assert "andshake" not in log.read_text(encoding="utf-8")


@pytest.mark.second
def test_by_the_deadline_of_who_sets_none_a_stopped_worker_is_named() -> None:
    with jdag.launch(["a", "b"], allow=ALLOWED) as cluster, Clock() as clock:
        leaf = cluster.put("b", X)
        os.kill(cluster.driver.launch.pids["b"], signal.SIGSTOP)
        struck_ns = clock.now_ns()
        with fails_with(WorkerLost, "processes.worker_b_is_lost"):
            leaf.fetch()
        assert clock.now_ns() - struck_ns < 11e9


def test_a_launched_worker_that_was_given_up_and_lives_on_ends_by_itself() -> None:
    with jdag.launch(["a", "b", "c"], allow=ALLOWED, deadline_s=DEADLINE_S) as cluster:
        launch = cluster.driver.launch
        log = launch.log_of("c")
        os.kill(launch.pids["c"], signal.SIGSTOP)
        soon(lambda: cluster.info()["c"]["lost"])
        os.kill(launch.pids["c"], signal.SIGCONT)
        soon(lambda: "c" not in launch.alive)
        lines = log.read_text().splitlines()
        said = "worker 'c' leaves the session: '[ab]' has given it up: .* no sign of"
        assert re.search(said, lines[-1]), lines
        with cluster.context() as ctx:
            assert ctx.call("b", cases.total, X, X, X).fetch() == cases.total(X, X, X)


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.second)],
)
def test_workers_whose_main_is_gone_are_idle_again(number: int, field: Field) -> None:
    field.heal()
    # Whose process has ended is not waited for: the deadline would be far away.
    path = field.workers.path
    if number == signal.SIGKILL:
        usual, path = path.read_text(), path.with_name("patient.toml")
        path.write_text(usual.replace(f"deadline_s = {DEADLINE_S}", "deadline_s = 900"))
    run = f"from tests.tools.failing_cases import main; main({str(path)!r})"
    # It computes as the workers do.
    x64 = str(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
    env = {**os.environ, "JAX_ENABLE_X64": x64}
    command = [sys.executable, "-c", run]
    main = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=env)
    try:
        assert main.stdout is not None and main.stdout.readline() == b"begun\n"
        soon((field.here / str(field.pids["b"])).exists)
        main.send_signal(number)
        for file in field.here.iterdir():
            file.unlink()
        clients = [ControlClient(*each) for each in field.addresses.items()]
        soon(lambda: all(one.ask(Health())["state"] == "idle" for one in clients))
        for client in clients:
            client.close()
    finally:
        main.kill()
        main.wait()
        assert main.stdout is not None
        main.stdout.close()
    with field.workers.connect() as cluster:
        assert [held["values_held"] for held in cluster.info().values()] == [0] * 3
