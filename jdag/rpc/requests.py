"""What is asked over the control plane: one class for each rpc, checked before use.

| rpc | asked of a worker by | to |
| --- | --- | --- |
| Attach | main | begin a session |
| Mesh | main | dial these of the others, and know all of them |
| Peer | main | know that a new process of that name joins |
| Ticket | a worker or main | issue a single-use ticket for its data address |
| Detach | main | end the session |
| Info | who has the cluster's token | say what it is and does |
| Health | anybody who is let in | say that it lives, and its name |

What is answered to those whose answers have something in them is checked too. Every
text, list and number has a bound.
"""

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from jdag.engine.protocol import WORKERS_MAX
from jdag.rpc.settings import NAME
from jdag.runtime.tables import NESTING_MAX

INCARNATION_MAX = (1 << 32) - 1

Name = Annotated[str, Field(pattern=f"^{NAME}$")]
Secret = Annotated[str, Field(max_length=4096, repr=False)]
Text = Annotated[str, Field(max_length=4096)]
Secrets = Annotated[dict[Name, Text], Field(max_length=WORKERS_MAX, repr=False)]
Incarnation = Annotated[int, Field(ge=0, le=INCARNATION_MAX)]
Modules = Annotated[tuple[Text, ...], Field(max_length=4096)]
Seconds = Annotated[float, Field(gt=0, le=3600)]


class Request(BaseModel):
    """A request; nothing unknown is in it, and nothing is converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    ASKER: ClassVar[str] = ""  # The field with the worker that asks, if there is one.

    @property
    def by(self) -> str | None:
        """The worker that asks, if that is said."""
        return getattr(self, self.ASKER, None)

    @property
    def key(self) -> str:
        """The token or secret by which the caller is known, if there is one."""
        return str(getattr(self, "token", "") or getattr(self, "secret", ""))


class AttachWorker(Request):
    """Begin a session: `main` takes the asked process for its `worker`.

    By `secret` the two know each other from now on; `secrets` has those by which the
    worker and each of the others do. `control` is where main itself answers Health, if
    it does. `watched`, `nesting_max`: see `jdag.rpc.session_info.SessionInfo`.
    """

    ASKER = "main"
    token: Secret
    secret: Annotated[str, Field(min_length=16, max_length=4096, repr=False)]
    secrets: Secrets
    main: Name
    worker: Name
    workers: Annotated[tuple[Name, ...], Field(max_length=WORKERS_MAX)]
    incarnations: Annotated[dict[Name, Incarnation], Field(max_length=WORKERS_MAX)]
    allow: Modules
    deadline_s: Seconds
    control: Text = ""
    watched: bool = False
    nesting_max: Annotated[int, Field(ge=1)] = NESTING_MAX
    handshake: Annotated[dict[str, Any], Field(max_length=64)]


class Whereabouts(Request):
    """Which process a name stands for, where it is reached, and what it allows."""

    incarnation: Incarnation
    control: Text
    data: Text
    allow: Modules


class Mesh(Request):
    """Know these peers, and dial some of them; the answer comes when all are."""

    secret: Secret
    peers: Annotated[dict[Name, Whereabouts], Field(max_length=WORKERS_MAX)]
    dial: Annotated[tuple[Name, ...], Field(max_length=WORKERS_MAX)]


class Peer(Request):
    """Know that a new incarnation of a worker joins, and will dial.

    By `shared` the two know each other.
    """

    secret: Secret
    shared: Secret
    worker: Name
    whereabouts: Whereabouts


class Ticket(Request):
    """Issue a single-use, short-lived ticket for a data connection of this worker.

    The secret is the one that the two share.
    """

    ASKER = "worker"
    secret: Secret
    worker: Name
    incarnation: Incarnation


class Detach(Request):
    """End the session."""

    secret: Secret


class Info(Request):
    """Say what this process is, and what it does."""

    token: Secret


class Health(Request):
    """Say that this process lives."""


class Response(BaseModel):
    """An answer; nothing is converted, and what else is in it is kept as it is."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)


class WorkerAttached(Response):
    """To Attach: where the worker is dialled, and what it says of itself."""

    data: Text
    allow: Modules
    handshake: Annotated[dict[str, Any], Field(max_length=64)]


class Healthy(Response):
    """To Health: which process it is."""

    pid: int


class TicketIssued(Response):
    """To Ticket: the ticket, in hexadecimal."""

    ticket: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
