"""Requests of the control plane. Each rpc has a class; requests are validated.

Replies with content are validated too. Every string, list and number is bounded. Main
sends AttachWorker, Mesh, Peer and Detach to workers. Info requires the cluster's token.
Any process may send Health.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

from jdag.engine.protocol import NAME, WORKERS_MAX
from jdag.processes.session.cluster_file import SessionSettings
from jdag.schedules import from_csv
from jdag.settings.validation import settings_from

_Name = Annotated[str, Meta(pattern=rf"\A{NAME}\Z")]
_Text = Annotated[str, Meta(max_length=4096)]
LISTS_MAX = 1 << 19
Incarnation = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Modules = Annotated[tuple[_Text, ...], Meta(max_length=4096)]
_Handshake = Annotated[dict[str, Any], Meta(max_length=64)]


class Request(Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of requests. Unknown fields and values of other types are refused."""

    def __repr__(self) -> str:  # Hides the secrets.
        return f"{type(self).__name__}(...)"

    @property
    def key(self) -> str:
        return str(getattr(self, "token", "") or getattr(self, "secret", ""))


class ScheduleCsv(Struct, frozen=True, forbid_unknown_fields=True):
    """A pipeline schedule: its workers, and the workers' action lists as CSV."""

    workers: Annotated[tuple[_Name, ...], Meta(max_length=WORKERS_MAX)]
    csv: Annotated[str, Meta(max_length=LISTS_MAX)]


class AttachWorker(Request, frozen=True):
    """Begin a session: the receiver becomes `worker` in the session of `main`.

    From now on, `secret` authenticates main and the worker to each other. `secrets`
    contains the secrets that the worker shares with the other workers. `control` is the
    address at which main answers Health, or "". `settings` contains the fields of
    `SessionSettings`; its `schedule` is sent as CSV. See `SessionInfo` for `watched`
    and `program`.
    """

    token: _Text
    secret: Annotated[str, Meta(min_length=16, max_length=4096)]
    secrets: Annotated[dict[_Name, _Text], Meta(max_length=WORKERS_MAX)]
    main: _Name
    worker: _Name
    settings: Annotated[dict[str, Any], Meta(max_length=64)]
    incarnations: Annotated[dict[_Name, Incarnation], Meta(max_length=WORKERS_MAX)]
    allow: _Modules
    handshake: _Handshake
    control: _Text = ""
    watched: bool = False
    schedule: ScheduleCsv | None = None
    program: _Text = ""

    def session_settings(self) -> SessionSettings:
        listed, schedule = self.schedule, None
        if listed is not None:
            schedule = from_csv(listed.csv, workers=listed.workers)
        return settings_from(
            SessionSettings, self.settings, "settings", schedule=schedule
        )


class WorkerAddress(Struct, frozen=True, forbid_unknown_fields=True):
    """The address of a worker's process, and the modules that the process allows."""

    incarnation: Incarnation
    data: _Text
    allow: _Modules


class Mesh(Request, frozen=True):
    """Register `peers`, and connect to the peers in `dial` before the reply."""

    secret: _Text
    peers: Annotated[dict[_Name, WorkerAddress], Meta(max_length=WORKERS_MAX)]
    dial: Annotated[tuple[_Name, ...], Meta(max_length=WORKERS_MAX)]


class Peer(Request, frozen=True):
    """Register a new incarnation of a worker, which will dial the receiver.

    `shared` is the secret that authenticates the two workers to each other.
    """

    secret: _Text
    shared: _Text
    worker: _Name
    whereabouts: WorkerAddress


class Detach(Request, frozen=True):
    """End the session."""

    secret: _Text


class Info(Request, frozen=True):
    """Query the state of the process."""

    token: _Text


class Health(Request, frozen=True):
    """Query whether the process is alive."""


class WorkerAttached(Struct, frozen=True):
    """Reply to AttachWorker: the worker's data address and its properties."""

    data: _Text
    allow: _Modules
    handshake: _Handshake
