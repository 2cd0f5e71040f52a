"""Requests of the control plane: one class per rpc, validated before use.

Non-empty answers are validated too. Every text, list and number is bounded. Main sends
Attach, Mesh, Peer and Detach to workers; Info requires the cluster's token; any process
may send Health.
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
    """A request: unknown fields are refused, and nothing is converted."""

    def __repr__(self) -> str:  # Without its secrets.
        return f"{type(self).__name__}(...)"

    @property
    def key(self) -> str:
        """The token or secret that authenticates the caller, if any."""
        return str(getattr(self, "token", "") or getattr(self, "secret", ""))


class ScheduleCsv(Struct, frozen=True, forbid_unknown_fields=True):
    """A schedule of pipelines: its workers, and the CSV of their lists."""

    workers: Annotated[tuple[_Name, ...], Meta(max_length=WORKERS_MAX)]
    csv: Annotated[str, Meta(max_length=LISTS_MAX)]


class AttachWorker(Request, frozen=True):
    """Begin a session: `main` takes the asked process for its `worker`.

    By `secret` the two know each other from now on; `secrets` has those by which the
    worker and each of the others do. `control` is where main itself answers Health, if
    it does. `settings` has the fields of `SessionSettings`, of which `schedule` is sent
    as CSV. `watched`, `program`: see `jdag.processes.session.session_info.SessionInfo`.
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
        """Return the settings of the session; JdagError if one is unusable."""
        listed, schedule = self.schedule, None
        if listed is not None:
            schedule = from_csv(listed.csv, workers=listed.workers)
        return settings_from(
            SessionSettings, self.settings, "settings", schedule=schedule
        )


class WorkerAddress(Struct, frozen=True, forbid_unknown_fields=True):
    """Which process a name stands for, where it is reached, and what it allows."""

    incarnation: Incarnation
    data: _Text
    allow: _Modules


class Mesh(Request, frozen=True):
    """Register these peers, and dial some; answered when all are connected."""

    secret: _Text
    peers: Annotated[dict[_Name, WorkerAddress], Meta(max_length=WORKERS_MAX)]
    dial: Annotated[tuple[_Name, ...], Meta(max_length=WORKERS_MAX)]


class Peer(Request, frozen=True):
    """Know that a new incarnation of a worker joins, and will dial.

    By `shared` the two know each other.
    """

    secret: _Text
    shared: _Text
    worker: _Name
    whereabouts: WorkerAddress


class Detach(Request, frozen=True):
    """End the session."""

    secret: _Text


class Info(Request, frozen=True):
    """Return what this process is and does."""

    token: _Text


class Health(Request, frozen=True):
    """Return that this process is alive."""


class WorkerAttached(Struct, frozen=True):
    """Answer to AttachWorker: where the worker is dialled, what it says of itself."""

    data: _Text
    allow: _Modules
    handshake: _Handshake
