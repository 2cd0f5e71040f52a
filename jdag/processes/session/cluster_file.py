"""Cluster files: the workers, their addresses, and how they authenticate each other.

    token_file = "token"            # the file of a secret that all workers have

    [workers.trainer]
    control = "127.0.0.1:7000"
    [workers.ps0]
    control = "127.0.0.1:7001"
    device = "gpu:0"
    allow = ["mymodels"]            # modules whose functions others may call

    [tls]                           # required if any address is not loopback
    ca = "ca.pem"
    certificate = "ps0.pem"
    key = "ps0.key"

Without `token_file` and `[tls]` the secret is in `cluster.toml.token`. The first worker
that starts creates that file, and only its user can read it. Paths are relative to the
folder of the cluster file. An error names the file, the key, its value, and the values
that are allowed.
"""

import os
import re
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from jdag.engine.protocol import NAMES, WORKERS_MAX, is_name
from jdag.errors import JdagError, ScenarioError, meant, reason, spelled, unusable
from jdag.gone import GONE_SETTINGS
from jdag.processes.functions.script import GuardedScript
from jdag.processes.net.addresses import Address, address_of
from jdag.processes.net.shared_secrets import fresh_secret
from jdag.processes.net.tls import load_tls
from jdag.runtime.journal import JOURNAL_BYTES_MAX
from jdag.settings.session_settings import RunSettings
from jdag.settings.toml_files import read_toml, text_in
from jdag.settings.toml_files import wrong as in_file
from jdag.settings.validation import (
    COUNT,
    NESTING,
    NESTING_MAX,
    TEXT,
    Settings,
    is_path,
    reads,
    settings_from,
    where,
)

TOKEN_CHARACTERS_MIN, TOKEN_CHARACTERS_MAX = 16, 4096
_DEADLINE_S = 10.0
READY_S = 60.0
VALUE_BYTES_MAX = 1 << 34
TRACE_EVENTS_MAX = 1_000_000

_DEVICE = r"\A(cpu|gpu(:[0-9]{1,4})?)\Z"
# `__main__` differs between processes.
_MODULE = r"\A(?!__main__(\.|\Z))[^\W\d]\w*(\.[^\W\d]\w*)*\Z"
_WORKERS = f"1 to {WORKERS_MAX:,} tables, such as [workers.ps0]"
_ADDRESSES = "host:port, with a port of 1 to 65535, such as 127.0.0.1:7001"
FILE = "the TOML file of a cluster, such as cluster.toml"


def is_device(value: Any) -> bool:
    return isinstance(value, str) and re.search(_DEVICE, value) is not None


def _address(value: Any) -> Address | None:
    address = address_of(value) if isinstance(value, str) else None
    return address if address is not None and address.port > 0 else None


DEVICES = "cpu, gpu, or gpu:N with the number of the GPU"
_MODULE_TEXT = 'a module that other workers can import, such as "mymodels"'
ALLOW = Annotated[
    Sequence[Annotated[str, Meta(pattern=_MODULE, description=_MODULE_TEXT)]],
    Meta(description='a list of modules, such as ["mymodels"]'),
]
DEVICE = Annotated[str, Meta(pattern=_DEVICE, description=DEVICES)]
WAIT_S = Annotated[
    float, Meta(ge=0.1, le=3600, description="a number of seconds from 0.1 to 3600")
]
_ADDRESS = Annotated[Address, reads(_address, _ADDRESSES)]


class SessionSettings(RunSettings, frozen=True, kw_only=True):
    """The settings of a session, equal on all nodes; `jdag.launch` shows this list.

    Args:
        deadline_s: a worker that does not respond for so many seconds is lost.
        trace: whether workers record traces. `cluster.trace` merges them, in the time
            of this process. The trace's settings contain the error bound of each
            worker's clock and the names of workers without records, such as lost ones.
        events_max: the maximum number of events in each worker's trace; a worker that
            reaches it warns and stops recording.
        journal: a new folder, in which each worker records the order of its engine's
            inputs, without values. `jdag replay FOLDER -- python script.py` repeats the
            run in one process.
        journal_bytes: the maximum size of each worker's journal in bytes; a worker that
            reaches it warns and stops recording. The recorded part can be replayed.
        value_bytes_max: the size in bytes of the largest array that may be sent.
    """

    deadline_s: WAIT_S = _DEADLINE_S
    trace: bool = False
    events_max: COUNT = TRACE_EVENTS_MAX
    journal: Annotated[Any, where(is_path, "the path of a folder")] | None = None
    journal_bytes: COUNT = JOURNAL_BYTES_MAX
    value_bytes_max: COUNT = VALUE_BYTES_MAX


class WorkerTable(Settings, frozen=True):
    control: _ADDRESS
    data: _ADDRESS | None = None
    device: DEVICE | None = None
    allow: ALLOW = ()


class TlsTable(Settings, frozen=True):
    ca: TEXT
    certificate: TEXT
    key: TEXT


class ClusterSettings(Settings, frozen=True, kw_only=True):
    workers: Annotated[
        dict[str, WorkerTable], where(lambda it: 1 <= len(it) <= WORKERS_MAX, _WORKERS)
    ]
    tls: TlsTable | None = None
    token_file: TEXT | None = None
    deadline_s: WAIT_S = _DEADLINE_S
    # Time limit of `jdag up` and `connect` for the start of workers.
    ready_s: WAIT_S = READY_S
    # A larger value is neither sent nor received.
    value_bytes_max: COUNT = VALUE_BYTES_MAX
    nesting_max: NESTING = NESTING_MAX
    path: Path

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.workers)

    def worker(self, name: str) -> WorkerTable:
        if not isinstance(name, str) or name not in self.names:
            allowed = f"one of {', '.join(self.names)}{meant(str(name), self.names)}"
            text = unusable("name", name, f"{allowed}, the workers in the file")
            raise ScenarioError(f"{spelled(self.path)}: {text}")
        return self.workers[name]

    def listener(self, name: str) -> str:
        """Return the address of a worker's listener.

        Without TLS this is a Unix socket by default, which is fastest.
        """
        worker = self.worker(name)
        if worker.data is None and self.tls is None:
            return "unix:@"
        # With port 0, the system chooses the port.
        return f"tcp:{worker.data or Address(worker.control.host)}"

    @property
    def token(self) -> str:
        name, default = self.token_file, self._default_token_file
        if name is None and (self.tls is not None or not default.exists()):
            return ""
        with in_file(self.path):
            if name is None:
                _refuse_shared(default)
                name = default.name
            path = self.path.parent / name
            try:
                text = text_in(path).strip()
            except ScenarioError as error:
                allowed = f"a readable file; {spelled(path)}: {error}"
                raise ScenarioError(unusable("token_file", name, allowed)) from error
            if not TOKEN_CHARACTERS_MIN <= len(text) <= TOKEN_CHARACTERS_MAX:
                allowed = (
                    f"a file with {TOKEN_CHARACTERS_MIN} to {TOKEN_CHARACTERS_MAX} "
                    f"characters, but the file has {len(text)}; openssl rand -hex 32 "
                    "prints a valid token"
                )
                raise ScenarioError(unusable("token_file", name, allowed))
        return text

    @property
    def _default_token_file(self) -> Path:
        return self.path.with_name(f"{self.path.name}.token")

    def make_token(self) -> None:
        """Create the default token file, unless it exists or is not needed."""
        path = self._default_token_file
        if self.tls is not None or self.token_file is not None or path.exists():
            return
        try:
            # Link a complete file, because other processes may create or read the file.
            with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:
                file.write(f"{fresh_secret()}\n")
                file.flush()
                with suppress(FileExistsError):
                    os.link(file.name, path)
        except OSError as error:
            allowed = f"a file name, because {path} cannot be created: {reason(error)}"
            text = unusable("token_file", None, allowed)
            raise ScenarioError(f"{self.path}: {text}") from error

    @property
    def tls_files(self) -> tuple[Path, Path, Path] | None:
        if self.tls is None:
            return None
        folder, tls = self.path.parent, self.tls
        files = (folder / tls.ca, folder / tls.certificate, folder / tls.key)
        try:
            load_tls(*files)
        except JdagError as error:
            raise ScenarioError(f"{self.path}: {error}") from error
        return files


def _refuse_shared(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        allowed = (
            "a file of this user that no other user can read (chmod 600); or set "
            "token_file to another file"
        )
        raise ScenarioError(unusable("token", str(path), allowed))


class WorkerOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a worker process.

    Attributes:
        node: import path of the node factory, `module:function`, which takes these
            options.
        token: the secret of the cluster; empty if there is none.
        allow: modules whose functions others may name.
        device: the device to compute on. None means JAX's default.
        config: settings of JAX, by name.
        path: Python's module search path.
        pythonpath: PYTHONPATH for processes that the worker starts.
        cores: the CPUs to compute on; empty if there is no restriction.
        tls: the files of ca, certificate and key.
        hosts: the host of each worker. A worker's certificate may be for its host.
        once: whether the process ends after its first session.
        script: the script that the process imports as `__main__` at its first use.
    """

    worker: str
    node: str
    control: str
    data: str = "unix:@"
    token: str = ""
    allow: tuple[str, ...] = ()
    device: str | None = None
    config: dict[str, Any] = {}
    path: tuple[str, ...] | None = None
    pythonpath: str | None = None
    cores: tuple[int, ...] = ()
    tls: tuple[Path, Path, Path] | None = None
    hosts: dict[str, str] = {}
    once: bool = False
    script: GuardedScript | None = None

    @classmethod
    def read(cls, data: bytes) -> "WorkerOptions":
        return msgspec.json.decode(data, type=cls, dec_hook=lambda kind, it: kind(it))

    def written(self) -> bytes:
        return msgspec.json.encode(self, enc_hook=str)

    def __repr__(self) -> str:  # Hides the token.
        return f"WorkerOptions({self.worker!r}, ...)"


def load_cluster_file(path: str | Path) -> ClusterSettings:
    path = Path(path)
    with in_file(path):
        table = read_toml(path, FILE)[1]
        for key, instead in GONE_SETTINGS.items():
            if key in table:
                raise ScenarioError(f"{key} = {table[key]!r} was removed: {instead}")
        settings = settings_from(ClusterSettings, table, path=path)
        for name in settings.names:
            if not is_name(name):
                raise ScenarioError(unusable("workers", name, NAMES))
        _check_addresses(settings)
    return settings


def _check_addresses(settings: ClusterSettings) -> None:
    users: dict[Address, str] = {}
    for name, worker in settings.workers.items():
        for kind, address in (("control", worker.control), ("data", worker.data)):
            if address is None:
                continue
            key = f"workers.{name}.{kind}"
            if settings.tls is None and not address.is_loopback:
                allowed = (
                    "a loopback address (127.0.0.1), or any address if [tls] has ca, "
                    "certificate and key"
                )
                raise ScenarioError(unusable(key, str(address), allowed))
            if address in users:
                allowed = f"an unused address; {users[address]} has the same address"
                raise ScenarioError(unusable(key, str(address), allowed))
            users[address] = key
