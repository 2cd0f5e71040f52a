"""A cluster's file: its workers, where they listen, how they trust each other.

    token_file = "token"            # a secret that all of them have

    [workers.trainer]
    control = "127.0.0.1:7000"
    [workers.ps0]
    control = "127.0.0.1:7001"
    device = "gpu:0"
    allow = ["mymodels"]            # modules whose functions others may name

    [tls]                           # needed as soon as an address is not loopback
    ca = "ca.pem"
    certificate = "ps0.pem"
    key = "ps0.key"

Without `token_file` and `[tls]` the secret is in `cluster.toml.token`, which the first
worker to start makes, and which its user alone can read. Paths are relative to the
file. An error names the file, the key, its value, and what is allowed.
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
from jdag.settings.toml_files import wrong as said_with_its_file
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
# Other processes have another `__main__`.
_MODULE = r"\A(?!__main__(\.|\Z))[^\W\d]\w*(\.[^\W\d]\w*)*\Z"
_WORKERS = f"1 to {WORKERS_MAX:,} tables, such as [workers.ps0]"
_ADDRESSES = "host:port, with a port of 1 to 65535, such as 127.0.0.1:7001"
FILE = "a cluster's TOML file, such as cluster.toml"


def is_device(value: Any) -> bool:
    """Whether a value names a device: `cpu`, `gpu`, `gpu:1`."""
    return isinstance(value, str) and re.search(_DEVICE, value) is not None


def _address(value: Any) -> Address | None:
    address = address_of(value) if isinstance(value, str) else None
    return address if address is not None and address.port > 0 else None


DEVICES = "cpu, gpu, or gpu:N with the number of the GPU"
_ONE = 'a module that others have, such as "mymodels"'
ALLOW = Annotated[
    Sequence[Annotated[str, Meta(pattern=_MODULE, description=_ONE)]],
    Meta(description='a list of modules, such as ["mymodels"]'),
]
DEVICE = Annotated[str, Meta(pattern=_DEVICE, description=DEVICES)]
WAIT_S = Annotated[
    float, Meta(ge=0.1, le=3600, description="a number of seconds from 0.1 to 3600")
]
_ADDRESS = Annotated[Address, reads(_address, _ADDRESSES)]


class SessionSettings(RunSettings, frozen=True, kw_only=True):
    """What a session is configured by: each node gets it as main has it.

    `jdag.launch` describes it.
    """

    deadline_s: WAIT_S = _DEADLINE_S
    trace: bool = False
    events_max: COUNT = TRACE_EVENTS_MAX
    journal: Annotated[Any, where(is_path, "the path of a folder")] | None = None
    journal_bytes: COUNT = JOURNAL_BYTES_MAX
    value_bytes_max: COUNT = VALUE_BYTES_MAX


class WorkerTable(Settings, frozen=True):
    """One worker: its addresses, its device, and what it allows to be named."""

    control: _ADDRESS
    data: _ADDRESS | None = None
    device: DEVICE | None = None
    allow: ALLOW = ()


class TlsTable(Settings, frozen=True):
    """The files of mutual TLS: the trusted authority, this certificate, its key."""

    ca: TEXT
    certificate: TEXT
    key: TEXT


class ClusterSettings(Settings, frozen=True, kw_only=True):
    """What a cluster's file says; `path` is the file."""

    workers: Annotated[
        dict[str, WorkerTable], where(lambda it: 1 <= len(it) <= WORKERS_MAX, _WORKERS)
    ]
    tls: TlsTable | None = None
    token_file: TEXT | None = None
    deadline_s: WAIT_S = _DEADLINE_S
    # So long `jdag up` and `connect` wait for workers that start.
    ready_s: WAIT_S = READY_S
    # Of one value: none that is larger leaves a worker, or has memory taken for it.
    value_bytes_max: COUNT = VALUE_BYTES_MAX
    nesting_max: NESTING = NESTING_MAX
    path: Path

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the workers, in the order of the file."""
        return tuple(self.workers)

    def worker(self, name: str) -> WorkerTable:
        """Return the table of one worker; ScenarioError if there is none."""
        if not isinstance(name, str) or name not in self.names:
            allowed = f"one of {', '.join(self.names)}{meant(str(name), self.names)}"
            said = unusable("name", name, f"{allowed}, as the file names them")
            raise ScenarioError(f"{spelled(self.path)}: {said}")
        return self.workers[name]

    def listener(self, name: str) -> str:
        """Return the address of a worker's listener.

        Without TLS all are on one host, where Unix sockets are the fastest.
        """
        worker = self.worker(name)
        if worker.data is None and self.tls is None:
            return "unix:@"
        # Port 0 lets the system choose.
        return f"tcp:{worker.data or Address(worker.control.host)}"

    @property
    def token(self) -> str:
        """The secret that all processes have; empty if there is none.

        Raises:
            ScenarioError: the token's file cannot be read, or is no usable secret.
        """
        name, own = self.token_file, self._own_token_file
        if name is None and (self.tls is not None or not own.exists()):
            return ""
        with said_with_its_file(self.path):
            if name is None:
                _refuse_shared(own)
                name = own.name
            path = self.path.parent / name
            try:
                text = text_in(path).strip()
            except ScenarioError as error:
                allowed = f"a file that can be read; {spelled(path)}: {error}"
                raise ScenarioError(unusable("token_file", name, allowed)) from error
            if not TOKEN_CHARACTERS_MIN <= len(text) <= TOKEN_CHARACTERS_MAX:
                allowed = (
                    f"a file with {TOKEN_CHARACTERS_MIN} to {TOKEN_CHARACTERS_MAX} "
                    f"characters (openssl rand -hex 32 makes some); it has {len(text)}"
                )
                raise ScenarioError(unusable("token_file", name, allowed))
        return text

    @property
    def _own_token_file(self) -> Path:
        return self.path.with_name(f"{self.path.name}.token")

    def make_token(self) -> None:
        """Make a secret beside the file, unless there is one or another is configured.

        So that no other user of this host takes a worker that listens on loopback.

        Raises:
            ScenarioError: it cannot be written there.
        """
        path = self._own_token_file
        if self.tls is not None or self.token_file is not None or path.exists():
            return
        try:
            # Complete or not there, since another process may make it now.
            with tempfile.NamedTemporaryFile("w", dir=path.parent) as made:
                made.write(f"{fresh_secret()}\n")
                made.flush()
                with suppress(FileExistsError):
                    os.link(made.name, path)
        except OSError as error:
            allowed = f"the name of a file; {path} cannot be made: {reason(error)}"
            said = unusable("token_file", None, allowed)
            raise ScenarioError(f"{self.path}: {said}") from error

    @property
    def tls_files(self) -> tuple[Path, Path, Path] | None:
        """Where ca, certificate and key of `[tls]` lie; None without it.

        Raises:
            ScenarioError: one of them cannot be read, or is not what it ought to be.
        """
        if self.tls is None:
            return None
        folder, tls = self.path.parent, self.tls
        found = (folder / tls.ca, folder / tls.certificate, folder / tls.key)
        try:
            load_tls(*found)
        except JdagError as error:
            raise ScenarioError(f"{self.path}: {error}") from error
        return found


def _refuse_shared(path: Path) -> None:
    found = path.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        allowed = (
            "a file of this user that nobody else can read (chmod 600); "
            "token_file may name another one"
        )
        raise ScenarioError(unusable("token", str(path), allowed))


class WorkerOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a worker process.

    Attributes:
        worker: its name.
        node: import path of what makes its node maker from these options:
            `module:function`.
        control: the address of its control server.
        data: the address of its listener.
        token: the secret of the cluster; empty if there is none.
        allow: modules whose functions others may name.
        device: where it computes; None: as JAX chooses.
        config: settings of JAX, by name.
        path: Python's module search path.
        pythonpath: that variable, for processes started from there.
        cores: the CPUs to compute on.
        tls: the files of ca, certificate and key.
        hosts: of all workers, by name; their certificates may be for these.
        once: whether it stops after its first session.
        script: what its module `__main__` is, when that is first needed.
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
        """Return options that were written."""
        return msgspec.json.decode(data, type=cls, dec_hook=lambda kind, it: kind(it))

    def written(self) -> bytes:
        """Return the options as JSON."""
        return msgspec.json.encode(self, enc_hook=str)

    def __repr__(self) -> str:  # Without its secret.
        return f"WorkerOptions({self.worker!r}, ...)"


def load_cluster_file(path: str | Path) -> ClusterSettings:
    """Read and check a cluster's file.

    Raises:
        ScenarioError: one line: file, key, value and what is allowed.
    """
    path = Path(path)
    with said_with_its_file(path):
        table = read_toml(path, FILE)[1]
        for key, instead in GONE_SETTINGS.items():
            if key in table:
                raise ScenarioError(f"{key} = {table[key]!r} has gone: {instead}")
        settings = settings_from(ClusterSettings, table, path=path)
        for name in settings.names:
            if not is_name(name):
                raise ScenarioError(unusable("workers", name, NAMES))
        _check_addresses(settings)
    return settings


def _check_addresses(settings: ClusterSettings) -> None:
    taken: dict[Address, str] = {}
    for name, worker in settings.workers.items():
        for kind, address in (("control", worker.control), ("data", worker.data)):
            if address is None:
                continue
            key = f"workers.{name}.{kind}"
            if settings.tls is None and not address.is_loopback:
                allowed = (
                    "an address of loopback (127.0.0.1), or any once [tls] names ca, "
                    "certificate and key"
                )
                raise ScenarioError(unusable(key, str(address), allowed))
            if address in taken:
                allowed = f"an address of its own; {taken[address]} has this one"
                raise ScenarioError(unusable(key, str(address), allowed))
            taken[address] = key
