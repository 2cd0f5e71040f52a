"""Requests of the control plane: one class per rpc, validated before use.

Non-empty answers are validated too. Every text, list and number is bounded. Main sends
Attach, Mesh, Peer and Detach to workers; Info requires the cluster's token; any process
may send Health.
"""

from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from jdag.engine.protocol import NAME, WORKERS_MAX
from jdag.runtime.validation import NESTING_MAX

Name = Annotated[str, Meta(pattern=rf"\A{NAME}\Z")]
Text = Annotated[str, Meta(max_length=4096)]
LISTS_MAX = 1 << 19
Incarnation = Annotated[int, Meta(ge=0, lt=1 << 32)]
Modules = Annotated[tuple[Text, ...], Meta(max_length=4096)]
Handshake = Annotated[dict[str, Any], Meta(max_length=64)]


class Request(Struct, frozen=True, forbid_unknown_fields=True):
    """A request: unknown fields are refused, and nothing is converted."""

    ASKER: ClassVar[str] = ""  # The field with the worker that asks, if there is one.

    def __repr__(self) -> str:  # Without its secrets.
        return f"{type(self).__name__}(...)"

    @property
    def by(self) -> str | None:
        """The worker that asks, if the request names it."""
        return getattr(self, self.ASKER, None)

    @property
    def key(self) -> str:
        """The token or secret that authenticates the caller, if any."""
        return str(getattr(self, "token", "") or getattr(self, "secret", ""))


class Listed(Struct, frozen=True, forbid_unknown_fields=True):
    """A schedule of pipelines: its workers, and the CSV of their lists."""

    workers: Annotated[tuple[Name, ...], Meta(max_length=WORKERS_MAX)]
    csv: Annotated[str, Meta(max_length=LISTS_MAX)]


class AttachWorker(Request, frozen=True):
    """Begin a session: `main` takes the asked process for its `worker`.

    By `secret` the two know each other from now on; `secrets` has those by which the
    worker and each of the others do. `control` is where main itself answers Health, if
    it does. `watched`, `nesting_max`, `events_max`, `journal`: see
    `jdag.rpc.session_info.SessionInfo`.
    """

    ASKER = "main"
    token: Text
    secret: Annotated[str, Meta(min_length=16, max_length=4096)]
    secrets: Annotated[dict[Name, Text], Meta(max_length=WORKERS_MAX)]
    main: Name
    worker: Name
    workers: Annotated[tuple[Name, ...], Meta(max_length=WORKERS_MAX)]
    incarnations: Annotated[dict[Name, Incarnation], Meta(max_length=WORKERS_MAX)]
    allow: Modules
    deadline_s: Annotated[float, Meta(gt=0, le=3600)]
    handshake: Handshake
    control: Text = ""
    watched: bool = False
    nesting_max: Annotated[int, Meta(ge=1)] = NESTING_MAX
    schedule: Listed | None = None
    events_max: Annotated[int, Meta(ge=0)] = 0
    journal: "Journaled | None" = None


class Journaled(Struct, frozen=True, forbid_unknown_fields=True):
    """Where each node writes its journal, how long it may be, and whose run it is."""

    folder: Text
    bytes_max: Annotated[int, Meta(ge=1)]
    program: Text


class Whereabouts(Struct, frozen=True, forbid_unknown_fields=True):
    """Which process a name stands for, where it is reached, and what it allows."""

    incarnation: Incarnation
    data: Text
    allow: Modules


class Mesh(Request, frozen=True):
    """Register these peers, and dial some; answered when all are connected."""

    secret: Text
    peers: Annotated[dict[Name, Whereabouts], Meta(max_length=WORKERS_MAX)]
    dial: Annotated[tuple[Name, ...], Meta(max_length=WORKERS_MAX)]


class Peer(Request, frozen=True):
    """Know that a new incarnation of a worker joins, and will dial.

    By `shared` the two know each other.
    """

    secret: Text
    shared: Text
    worker: Name
    whereabouts: Whereabouts


class Detach(Request, frozen=True):
    """End the session."""

    secret: Text


class Info(Request, frozen=True):
    """Return what this process is and does."""

    token: Text


class Health(Request, frozen=True):
    """Return that this process is alive."""


class WorkerAttached(Struct, frozen=True):
    """Answer to AttachWorker: where the worker is dialled, what it says of itself."""

    data: Text
    allow: Modules
    handshake: Handshake


class Healthy(Struct, frozen=True):
    """Answer to Health: which process it is."""

    pid: int
