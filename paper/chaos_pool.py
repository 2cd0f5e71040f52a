"""Worker processes behind proxies, with injected faults, for `paper.chaos`."""

import os
import resource
import signal
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from msgspec.structs import replace

import jdag
from jdag.api.drivers import worker_options
from jdag.processes.launch import worker_server
from jdag.processes.launch.launch import Launch
from jdag.processes.net.listener import Listener
from jdag.processes.node import MakeNode
from jdag.processes.session.authority import fresh_authority
from jdag.processes.session.cluster_file import WorkerOptions
from paper.proxy import Gate, Proxy

MODES = ("unix", "tcp", "tls")
NAMES = ("w0", "w1", "w2", "w3")  # w0 is main.
DEADLINE_S = 5.0
FILE_BYTES = 1 << 14  # The maximum size of a worker's files when its disk is full.
LONG = float("inf")
# Streams are cut after 2**n bytes, with n between these bounds.
CUT_BITS_MIN, CUT_BITS_MAX = 4, 21
# Faults that end within the deadline. Rounds draw from these; "cut" is most likely.
PASSING = ("cut", "cut", "cut", "slow", "hold", "freeze", "strangers")
_ANNOUNCED = "JDAG_CHAOS_ANNOUNCED"


class Announced(Listener):
    """A listener that announces the address of the proxy in front of it."""

    def __init__(self, address: str, **settings: Any) -> None:
        super().__init__(address, **settings)
        self.address = os.environ.get(_ANNOUNCED) or self.address


def member(options: WorkerOptions) -> MakeNode:
    """Make a node like `jdag.api.drivers.member`, but with an `Announced` listener."""
    setattr(worker_server, "Listener", Announced)  # noqa: B010
    return jdag.api.drivers.member(options)


def free_port() -> int:
    """Return an unused port, below the range from which the system chooses ports."""
    while True:
        port = 10_000 + int.from_bytes(os.urandom(2)) % 20_000
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


def limit_files(process: int, nbytes: int | None) -> None:
    """Limit the size of files that a process writes. None removes the limit."""
    hard = resource.prlimit(process, resource.RLIMIT_FSIZE)[1]
    soft = hard if nbytes is None else nbytes
    resource.prlimit(process, resource.RLIMIT_FSIZE, (soft, hard))


class Pool:
    """Runs the workers w1 to w3 of a cluster. This process joins them as w0.

    Args:
        mode: "unix": data goes through Unix sockets, without proxies. "tcp" and "tls":
            all streams pass proxies, in plain text or with TLS.
        folder: the folder for certificates, logs and the cluster's file.
        seed: the seed of the proxies' random numbers.
        allow: the modules whose functions workers may run.
    """

    def __init__(self, mode: str, folder: Path, seed: int, allow: list[str]) -> None:
        self.mode, self.folder = mode, folder
        self.proxy = Proxy(seed)
        self.gates: dict[str, list[Gate]] = {}
        self._allow = allow
        self._ports: dict[str, tuple[int, int]] = {}
        self._announced: dict[str, str] = {}
        self._launches: dict[str, Launch] = {}
        self._files = self._certificates("own")
        self._strange = self._certificates("strange")
        self.path = folder / "cluster.toml"
        lines = [f"deadline_s = {DEADLINE_S}"]
        if mode == "tls":
            lines += ["[tls]"]
            keys = ("ca", "certificate", "key")
            pairs = zip(keys, self._files, strict=True)
            lines += [f'{key} = "{path}"' for key, path in pairs]
        for name in NAMES:
            control, data = self._ports[name] = free_port(), free_port()
            if mode != "unix" and name != NAMES[0]:
                control, one = self.proxy.before(control)
                data, other = self.proxy.before(data)
                self.gates[name] = [one, other]
                self._announced[name] = f"tcp:127.0.0.1:{data}"
            lines += [f"[workers.{name}]", f'control = "127.0.0.1:{control}"']
            lines += [f"allow = {allow}"]
        self.path.write_text("\n".join(lines))
        for name in NAMES[1:]:
            self.start(name)

    def _certificates(self, name: str) -> tuple[Path, Path, Path]:
        folder = self.folder / name
        folder.mkdir()
        return fresh_authority().issue("127.0.0.1", "127.0.0.1", folder)

    def start(self, name: str, *, strange: bool = False) -> None:
        """Start a worker's process; if `strange`, with an untrusted certificate."""
        control, data = self._ports[name]
        options = worker_options(
            name,
            None,
            allow=tuple(self._allow),
        )
        changes: dict[str, Any] = {"control": f"127.0.0.1:{control}"}
        env = {}
        if self.mode != "unix":
            changes |= {"node": f"{__name__}:member"}
            changes |= {"data": f"tcp:127.0.0.1:{data}"}
            env = {_ANNOUNCED: self._announced[name]}
        if self.mode == "tls":
            changes |= {"tls": self._strange if strange else self._files}
            changes |= {"hosts": dict.fromkeys(NAMES, "127.0.0.1")}
        if name in self._launches:
            self._launches[name].close()
        made = replace(options, **changes)
        logs = self.folder / "logs"
        self._launches[name] = Launch([made], env=env, logs=logs, ready_s=600)

    def pid(self, name: str) -> int:
        return self._launches[name].pids[name]

    def connect(self) -> jdag.Cluster:
        return jdag.connect(self.path, name=NAMES[0])

    # ---------------------------------------------------------------------- faults

    def kill(self, name: str, rng: Random) -> float:
        """Kill a process. Like each fault, this returns its duration in seconds."""
        os.kill(self.pid(name), signal.SIGKILL)
        while name in self._launches[name].alive:  # `heal` restarts ended processes.
            time.sleep(0.01)
        return LONG

    def freeze(self, name: str, rng: Random) -> float:
        """Stop a process."""
        os.kill(self.pid(name), signal.SIGSTOP)
        return LONG

    def fill(self, name: str, rng: Random) -> float:
        """Limit the size of the files and shared memory of this worker, or of main."""
        name = rng.choice((name, NAMES[0]))
        limit_files(os.getpid() if name == NAMES[0] else self.pid(name), FILE_BYTES)
        return LONG

    def cut(self, name: str, rng: Random) -> float:
        """Cut streams after random numbers of bytes, at full or reduced speed."""
        for gate in self.gates[name]:
            bits = [rng.uniform(CUT_BITS_MIN, CUT_BITS_MAX) for _ in range(4)]
            cuts = [int(2**one) for one in bits]
            self.proxy.do(gate, cuts=cuts, delay_s=rng.choice((0.0, 0.005)))
        return rng.uniform(0.2, 1.5)

    def slow(self, name: str, rng: Random) -> float:
        """Delay the data on each stream of the worker."""
        for gate in self.gates[name]:
            self.proxy.do(gate, delay_s=rng.uniform(0.001, 0.05))
        return rng.uniform(0.1, 2.0)

    def hold(self, name: str, rng: Random) -> float:
        """Stop forwarding data on all streams of the worker."""
        for gate in self.gates[name]:
            self.proxy.do(gate, holds=True)
        return LONG

    def refuse(self, name: str, rng: Random) -> float:
        """Cut all streams of the worker, and refuse new streams."""
        for gate in self.gates[name]:
            self.proxy.do(gate, refuses=True)
        return LONG

    def strangers(self, name: str, rng: Random) -> float:
        """Dial a worker's ports with random bytes and with an untrusted certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(*self._strange[1:])
        for port in self._ports[name]:
            for is_garbage in (True, False):
                with (
                    suppress(OSError),
                    socket.create_connection(("127.0.0.1", port), 1) as s,
                ):
                    s.settimeout(0.2)
                    if is_garbage:
                        s.sendall(rng.randbytes(rng.randint(1, 4096)))
                    else:
                        with context.wrap_socket(s) as secured:
                            secured.recv(1)
        return 0.0

    @property
    def cuts(self) -> int:
        """How often a gate has cut its streams."""
        return sum(gate.cut for gate in self.proxy.gates)

    @property
    def faults(self) -> dict[str, Callable[[str, Random], float]]:
        """The methods that inject the faults possible in this mode, by name."""
        found = [self.kill, self.freeze, self.fill]
        if self.mode != "unix":
            found += [self.cut, self.slow, self.hold, self.refuse, self.strangers]
        return {one.__name__: one for one in found}

    def mend(self, fault: str, name: str) -> None:
        """End a temporary fault."""
        if fault == "freeze":
            os.kill(self.pid(name), signal.SIGCONT)
        elif fault in ("cut", "slow", "hold"):
            self.proxy.heal(self.gates[name])

    def heal(self) -> None:
        """End all faults and restart killed processes."""
        self.proxy.heal(self.proxy.gates)
        limit_files(os.getpid(), None)
        for name in NAMES[1:]:
            if name in self._launches[name].alive:
                limit_files(self.pid(name), None)
                os.kill(self.pid(name), signal.SIGCONT)
            else:
                self.start(name)

    def close(self) -> None:
        for name, launch in self._launches.items():
            if name in launch.alive:
                os.kill(self.pid(name), signal.SIGCONT)
            launch.close()
        self.proxy.close()
