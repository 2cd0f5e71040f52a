"""A process that computes and cannot answer is alive, as its helper process says."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jax.numpy as jnp
import pytest

import jdag
from jdag.errors import ProtocolError, WorkerLost
from jdag.processes.net import pulse_helper
from jdag.processes.net.addresses import Address, datagrams, host_towards
from jdag.processes.net.loop import clock_ns
from jdag.processes.net.pulse import Helper, Pulse, helper_at
from jdag.processes.net.pulse_helper import (
    KEY_BYTES,
    NONCE_BYTES,
    TAG_BYTES,
    pulse_answer,
    question,
)
from tests.tools import pulse_cases as cases
from tests.tools.connection_cases import Clock, Sides
from tests.tools.rpc_nodes import cluster
from tests.tools.rpc_workers import ALLOWED, kept
from tests.tools.stream_cases import soon

HERE = Address("127.0.0.1")
KEY, OTHER_KEY = b"k" * KEY_BYTES, b"o" * KEY_BYTES
NONCE = b"n" * NONCE_BYTES
SECOND_NS = 1_000_000_000

# A process that computes, with a helper and a child that holds all its files open.
OWNER = """
import os, socket, subprocess, sys
bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
bound.bind(("127.0.0.1", 0))
helper = subprocess.Popen(
    [sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), str(bound.fileno())],
    pass_fds=(bound.fileno(),), stdin=subprocess.PIPE,
)
helper.stdin.write(b"k" * 32)
helper.stdin.flush()
if not os.fork():
    sys.exit(sys.stdin.read())
print(helper.pid, bound.getsockname()[1], flush=True)
while True:
    pass
"""


@contextmanager
def python(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of Python that has printed nothing yet; killed in the end."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def has_ended(pid: int) -> bool:
    """Whether a process is gone; an orphan may not be waited for by anyone."""
    with suppress(OSError):
        return pulse_helper._fields(f"/proc/{pid}/stat")[0] in "ZX"
    return True


# ----------------------------------------------------------------- what a helper sees


def test_a_process_that_computes_and_none_that_waits_or_is_stopped_or_has_ended() -> (
    None
):
    computes = pulse_helper.computes
    with python("-c", "print(1, flush=True); input()\nwhile True: pass") as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        soon(lambda: not computes(process.pid))  # It waits.
        process.stdin.write(b"\n")
        process.stdin.flush()
        soon(lambda: computes(process.pid))
        assert computes(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert not computes(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not computes(process.pid)
    assert not computes(process.pid)


@pytest.mark.parametrize(
    ("states", "ticks", "is_seen"),
    [
        ("SR", 0, True),  # Others have the cores.
        ("S", 2, True),
        ("D", 9, True),
        ("S", 1, False),  # Threads that wait for the lock wake up now and then.
        ("T", 9, False),
        ("tZX", 9, False),
        ("TS", 9, True),
    ],
)
def test_by_the_states_of_its_threads_and_its_cpu_time(
    states: str, ticks: int, is_seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter((100, 100 + ticks))
    monkeypatch.setattr(pulse_helper, "WINDOW_S", 0.0)
    monkeypatch.setattr(pulse_helper, "_states", lambda process: set(states))
    monkeypatch.setattr(pulse_helper, "_ticks", lambda process: next(counts))
    assert pulse_helper.computes(1) == is_seen


def test_only_those_with_the_key_are_answered() -> None:
    with datagrams(HERE, binds=True) as bound:
        where = Address(*bound.getsockname())
        with datagrams(where, binds=False) as asking:
            asked = question(KEY, NONCE)
            others = (b"", NONCE, question(OTHER_KEY, NONCE), asked[:-1], asked + b"x")
            for data in (*others, asked, bytes(1000)):
                asking.send(data)
            found = pulse_helper._questions(bound, KEY)
            assert found == [(NONCE, asking.getsockname())]
    assert pulse_answer(KEY, NONCE) not in asked


# --------------------------------------------------------------- how a helper is asked


@pytest.fixture
def helper() -> Iterator[Helper]:
    started = Helper(HERE.host)
    yield started
    started.close()


def test_a_helper_answers_while_its_owner_computes(helper: Helper) -> None:
    pulse = Pulse(helper.frame["pulse"], helper.frame["key"])
    due_ns = clock_ns() + 60 * SECOND_NS
    assert pulse.heard_ns() == 0
    for number in range(1, 12):  # Of which some are forgotten.
        pulse.ask(number)
    while pulse.heard_ns() < 11:  # As this process does.
        assert clock_ns() < due_ns, "no answer"
    assert len(pulse._expected) <= 8
    pulse.close()
    assert pulse.heard_ns() == 11


def test_a_helper_has_a_session_of_its_own_and_ends_by_close(helper: Helper) -> None:
    assert os.getsid(helper.process.pid) == helper.process.pid != os.getsid(0)
    for _ in range(2):
        helper.close()
        assert not Path(f"/proc/{helper.process.pid}").exists()


def test_a_helper_ends_with_its_owner_though_a_child_of_that_lives_on() -> None:
    with python("-c", OWNER, pulse_helper.__file__) as owner:
        assert owner.stdout is not None
        pid, port = map(int, owner.stdout.readline().split())
        pulse = Pulse(f"127.0.0.1:{port}", KEY.hex())
        pulse.ask(1)
        soon(lambda: bool(pulse.heard_ns()))  # It has begun.
        pulse.close()
        assert not has_ended(pid)
        owner.kill()
        soon(lambda: has_ended(pid))


def test_an_answer_that_is_forged_or_comes_again_is_no_sign_of_life() -> None:
    with datagrams(HERE, binds=True) as bound:
        where = Address(*bound.getsockname())
        pulse = Pulse(str(where), KEY.hex())

        def answered(key: bytes) -> bytes:
            data, sender = bound.recvfrom(NONCE_BYTES + TAG_BYTES)
            assert data == question(KEY, data[:NONCE_BYTES])
            answer = pulse_answer(key, data[:NONCE_BYTES])
            bound.sendto(answer, sender)
            bound.sendto(answer, sender)
            return answer

        pulse.ask(7)
        answered(OTHER_KEY)
        assert pulse.heard_ns() == 0
        pulse.ask(8)
        answered(KEY)
        assert pulse.heard_ns() == 8
        pulse.ask(9)
        assert pulse.heard_ns() == 8
    pulse.ask(10)
    pulse.ask(11)  # Nothing listens there any more.
    assert pulse.heard_ns() == 8
    pulse.close()


@pytest.mark.parametrize(
    ("address", "key"),
    [("127.0.0.1", KEY.hex()), ("host:80", KEY.hex()), ("127.0.0.1:80", "x")],
)
def test_a_frame_of_a_helper_is_checked(address: str, key: str) -> None:
    with pytest.raises(ProtocolError, match=f"'{address}' is not the address of"):
        Pulse(address, key)


def test_without_a_helper_a_process_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert helper_at("") is None
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert helper_at(HERE.host) is None


def test_main_has_the_host_by_which_workers_reach_it() -> None:
    assert host_towards(Address("127.0.0.1", 80)) == "127.0.0.1"
    assert host_towards(Address("no.such.host.invalid", 80)) == ""


# ------------------------------------------------------------------ what a node does


class Busy:
    """Takes the place of a helper, which answers as long as it is told so."""

    def __init__(self) -> None:
        self.computes = True
        self.asked_ns: list[int] = []

    def ask(self, now_ns: int) -> None:
        self.asked_ns.append(now_ns)

    def heard_ns(self) -> int:
        self._heard_ns = self.asked_ns[-1] if self.asked_ns and self.computes else 0
        return self._heard_ns

    look = Pulse.look

    def close(self) -> None:
        self.asked_ns.clear()


def test_a_silent_peer_is_alive_as_long_as_its_helper_answers(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Sides]
) -> None:
    clock, busy = Clock(monkeypatch), Busy()
    sides = make(deadline_s=1_000.0)
    sides.turn()
    sides.turn()
    sides.a.connection.pulse = busy  # type: ignore[assignment]
    sides.b.stop()  # As one that is busy.
    began_ns = sides.a.connection.heard_ns
    for seconds in range(0, 5_000, 10):
        sides.turn()
        assert not sides.a.ends, seconds
        assert sides.a.connection.silent_ns(clock_ns() + clock.ahead_ns) < (
            (510 if seconds < 510 else 270) * SECOND_NS
        )
        clock.ahead_ns += 10 * SECOND_NS
    waited_s = (busy.asked_ns[0] - began_ns) / SECOND_NS
    assert 500 <= waited_s < 511
    busy.computes = False
    for _ in range(90):
        sides.turn()
        clock.ahead_ns += 10 * SECOND_NS
    sides.turn()
    assert sides.a.ends and busy.asked_ns == []


def test_a_peer_that_answers_pings_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Sides]
) -> None:
    clock, busy = Clock(monkeypatch), Busy()
    sides = make(deadline_s=1_000.0)
    sides.a.connection.pulse = busy  # type: ignore[assignment]
    for _ in range(300):
        for _ in range(4):  # A ping and its answer.
            sides.turn()
        clock.ahead_ns += 10 * SECOND_NS
    assert busy.asked_ns == [] and not sides.a.ends


def test_main_that_computes_takes_the_blame_for_nobody() -> None:
    with cluster() as c:
        b, busy = c.nodes["b"], Busy()
        busy.ask(clock_ns())
        with b._loop:
            main = b.peers.connections["a"]
            main.pulse = busy
            main.heard_ns = clock_ns() - round(
                0.8 * b._session.settings.deadline_s * 1e9
            )
            b.peers.failed(b.peers.connections["c"], "it was silent")
        soon(lambda: c.info()["c"]["lost"])
        assert not c.info()["b"]["lost"]


# --------------------------------------------------------------------- in processes


def helpers_of(owner: int) -> set[int]:
    """The helper processes that a process has started."""
    children = Path(f"/proc/{owner}/task").glob("*/children")
    found = {int(pid) for each in children for pid in each.read_text().split()}
    file = pulse_helper.__file__.encode()
    return {pid for pid in found if file in Path(f"/proc/{pid}/cmdline").read_bytes()}


def test_main_has_a_helper_for_a_session_and_a_worker_one_for_all() -> None:
    pool = kept()
    pids = [pool._launches[name].pids[name] for name in pool.names[1:]]
    found = []
    for _ in range(2):
        before = helpers_of(os.getpid())
        with pool.connect():
            assert len(helpers_of(os.getpid()) - before) == 1
            found.append([*map(helpers_of, pids)])
        assert helpers_of(os.getpid()) == before
    assert found[0] == found[1] and [len(each) for each in found[0]] == [1, 1, 1]


@pytest.mark.second
def test_a_worker_and_the_caller_may_compute_for_two_deadlines_in_one_call() -> None:
    workers = ["a", "b", "c"]
    with (
        jdag.launch(workers, allow=ALLOWED, deadline_s=cases.DEADLINE_S) as cluster,
        cluster.context() as ctx,
    ):
        doubled = ctx.call("b", cases.busy, 3.0)
        assert not cluster.info()["b"]["lost"]  # It has the call.
        cases.compute()
        assert doubled.fetch() == 6.0
        x = ctx.call("b", cases.doubled, ctx.call("c", cases.doubled, jnp.ones(3)))
        assert x.fetch().tolist() == [4.0, 4.0, 4.0]
        assert not any(info["lost"] for info in cluster.info().values())


@pytest.mark.second
def test_a_worker_that_hangs_in_one_call_is_lost() -> None:
    workers, deadline_s = ["a", "b", "c"], cases.DEADLINE_S
    with (
        jdag.launch(workers, allow=ALLOWED, deadline_s=deadline_s) as cluster,
        cluster.context() as ctx,
    ):
        with pytest.raises(WorkerLost, match="it gave no sign of life for"):
            ctx.call("b", cases.hung, 3.0).fetch()
        assert not cluster.info()["c"]["lost"]
