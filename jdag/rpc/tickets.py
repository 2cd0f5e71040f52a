"""Single-use, short-lived connection tickets, and the secrets behind them.

Any two processes of a session share a secret that main derives from its own and from
both their names. A process that knows it gets a ticket from the other's control server,
and shows the ticket in the hello of its data connection.
"""

import hmac
import secrets
import threading
import time

from jdag.errors import JoinError

TICKET_BYTES = 32
SECRET_BYTES = 32
LIFE_NS = 10 * 10**9
TICKETS_MAX = 1024


class Tickets:
    """The tickets that were issued and neither used nor expired; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # In the order in which they expire.
        self._issued: list[tuple[int, bytes, tuple[str, int]]] = []

    def issue(self, worker: str, incarnation: int) -> bytes:
        """Return a new ticket for one incarnation of a worker.

        Raises:
            JoinError: too many are on their way.
        """
        ticket = secrets.token_bytes(TICKET_BYTES)
        with self._lock:
            self._forget_expired()
            if len(self._issued) >= TICKETS_MAX:
                raise JoinError(
                    f"{TICKETS_MAX} tickets are issued and not used yet; try again when"
                    " some have expired"
                )
            due_ns = time.monotonic_ns() + LIFE_NS
            self._issued.append((due_ns, ticket, (worker, incarnation)))
        return ticket

    def redeem(self, ticket: bytes) -> tuple[str, int] | None:
        """Return the holder of a ticket, and forget the ticket; None if not valid."""
        with self._lock:
            self._forget_expired()
            # All are compared, so that the time taken tells nothing about them.
            found = [hmac.compare_digest(ticket, one) for _, one, _ in self._issued]
            return self._issued.pop(found.index(True))[2] if any(found) else None

    def _forget_expired(self) -> None:
        now_ns = time.monotonic_ns()
        self._issued = [one for one in self._issued if one[0] > now_ns]


def secret_between(session: str, one: str, other: str) -> str:
    """Return the secret that two processes of a session share.

    Args:
        session: the secret of the session, which main alone has.
        one: the worker of one of them, with its incarnation.
        other: that of the other one.
    """
    both = " ".join(sorted((one, other)))
    return hmac.new(session.encode(), both.encode(), "sha256").hexdigest()


def proof_of(secret: str) -> str:
    """Return a proof of a secret, of no use for anything else: hexadecimal digits."""
    return hmac.new(secret.encode(), b"proof", "sha256").hexdigest()


def fresh_secret() -> str:
    """Return a random secret as text."""
    return secrets.token_hex(SECRET_BYTES)
