"""Worker processes that serve one cluster after another, so that tests need few.

`kept` has one pool of them for all tests of a process of the suite.

They compute where the variable JDAG_DEVICE says, such as gpu:0.
"""

import atexit
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

import jdag
from jdag.api.drivers import worker_options
from jdag.processes.launch.launch import Launch
from jdag.processes.session.cluster_file import WorkerOptions
from tests import ROOT
from tests.tools.certificates import Files
from tests.tools.rpc_cases import free_address

ALLOWED = ("tests",)
SCENARIOS = sorted(path.stem for path in (ROOT / "scenarios").glob("*.py"))
NAMES = ("a", "b", "c", "d")
_kept: dict[tuple[Any, ...], "Workers"] = {}


def kept(**env: str) -> "Workers":
    key = tuple(sorted(env.items()))
    if key not in _kept:
        allow = (*ALLOWED, *SCENARIOS)
        _kept[key] = Workers(NAMES, allow=allow, env=env or None)
        atexit.register(_kept[key].close)
    _kept[key].revive()
    return _kept[key]


class Workers:
    """Processes for all workers but the first, which is whoever connects.

    `tls`: files of all of them, with the certificate and key for this host.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        allow: Sequence[str] = ALLOWED,
        env: Mapping[str, str] | None = None,
        deadline_s: float = 10.0,
        tls: Files | None = None,
    ) -> None:
        self._tls = tls
        self.names = tuple(names)
        self._allow = tuple(allow)
        self._env = env
        self._deadline_s = deadline_s
        self._folder = tempfile.TemporaryDirectory()
        self.path = Path(self._folder.name) / "cluster.toml"
        self._launches: dict[str, Launch] = {}
        self._addresses = {self.names[0]: free_address()}
        self.revive()

    @property
    def dead(self) -> tuple[str, ...]:
        return tuple(
            name
            for name in self.names[1:]
            if name not in self._launches or name not in self._launches[name].alive
        )

    def revive(self) -> None:
        dead = self.dead
        if not dead:
            return
        options = [self.options(name) for name in dead]
        launch = Launch(options, env=self._env, ready_s=600)  # However slow it is here.
        self._launches.update(dict.fromkeys(dead, launch))
        self._addresses.update(launch.addresses)
        lines = [f"deadline_s = {self._deadline_s}"]
        if self._tls is not None:
            files = self._tls._asdict().items()
            lines += ["[tls]", *[f'{key} = "{file}"' for key, file in files]]
        allowed = ", ".join(f'"{module}"' for module in self._allow)
        for name in self.names:
            lines += [
                f"[workers.{name}]",
                f'control = "{self._addresses[name]}"',
                f"allow = [{allowed}]",
            ]
        self.path.write_text("\n".join(lines), encoding="utf-8")

    def options(self, name: str) -> WorkerOptions:
        options = worker_options(
            name,
            device=os.environ.get("JDAG_DEVICE"),
            allow=tuple(self._allow),
        )
        # Where another one can take the place of one that was killed.
        options = replace(options, control=str(free_address()))
        if self._tls is None:
            return options
        data, hosts = "tcp:127.0.0.1:0", dict.fromkeys(self.names, "127.0.0.1")
        return replace(options, tls=tuple(self._tls), data=data, hosts=hosts)

    @property
    def launch(self) -> Launch:
        return next(iter(self._launches.values()))

    @property
    def alive(self) -> bool:
        return not self.dead

    def connect(self) -> Any:
        return jdag.connect(self.path, name=self.names[0])

    def close(self) -> None:
        for launch in dict.fromkeys(self._launches.values()):
            launch.close()
        self._folder.cleanup()
