"""Two hosts on this machine: network namespaces, or loopback where they are forbidden.

What runs on a host is what a user would type there, in the folder of that host.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests import ROOT
from tests.tools.rpc_cases import free_address

ADDRESSES = ("10.0.0.1", "10.0.0.2")
LOOPBACK = ("127.0.0.1", "127.0.0.2")
PORTS = ("7000", "7001", "7002")


class Hosts:
    def __init__(self, folder: Path, prefixes: Sequence[Sequence[str]]) -> None:
        self.folder = folder
        self._prefixes = prefixes
        self.are_apart = any(prefixes)
        self._instead: dict[str, str] = {}
        if not self.are_apart:
            ports = [str(free_address().port) for _ in PORTS]
            self._instead = dict(
                zip((*ADDRESSES, *PORTS), (*LOOPBACK, *ports), strict=True)
            )
        commands = folder / "bin"
        commands.mkdir()
        (commands / "jdag").write_text(f'#!/bin/sh\nexec {sys.executable} -m jdag "$@"')
        (commands / "jdag").chmod(0o755)
        self._environment = {
            **os.environ,
            "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }

    def here(self, text: str) -> str:
        for printed, ours in self._instead.items():
            text = text.replace(printed, ours)
        return text

    def place(self, number: int) -> Path:
        return self.folder / self.here(ADDRESSES[number])

    @contextmanager
    def running(self, number: int, command: str) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            [*self._prefixes[number], *shlex.split(command)],
            cwd=self.place(number),
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()


@contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Two hosts that reach each other at the addresses that the documents show.

    Where network namespaces are forbidden, both are this host, at loopback.
    """
    names = [f"jdag{os.getpid()}{letter}" for letter in "ab"]
    ends = [f"j{os.getpid()}{letter}" for letter in "ab"]
    with ExitStack() as stack:
        for name in names:
            if not _done("ip", "netns", "add", name):
                yield Hosts(folder, ((), ()))
                return
            stack.callback(_done, "ip", "netns", "delete", name)
        one, other = (
            ("name", end, "netns", name) for name, end in zip(names, ends, strict=True)
        )
        assert _done("ip", "link", "add", *one, "type", "veth", "peer", *other)
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            of = ("ip", "-n", name)
            assert _done(*of, "address", "add", f"{address}/24", "dev", end)
            assert _done(*of, "link", "set", "lo", "up")
            assert _done(*of, "link", "set", end, "up")
        yield Hosts(folder, [("ip", "netns", "exec", name) for name in names])


def _done(*command: str) -> bool:
    try:
        return not subprocess.run(command, capture_output=True, check=False).returncode
    except FileNotFoundError:
        return False
