"""One-time tokens, which a gate lets in once and soon; and what is asked for them by.

Each two processes of a session have a secret of their own, which main makes of the
session's and of both their names: by it each is known to the other, and to nobody else
it is of use.
"""

import hmac
import secrets
import threading
import time
from collections.abc import Callable

from jdag.errors import JoinError

TOKEN_BYTES = 32
SECRET_BYTES = 32
LIFE_S = 10.0
TOKENS_MAX = 1024
_SECOND_NS = 1_000_000_000


class Tokens:
    """The tokens that were issued and neither used nor expired; thread-safe.

    Args:
        life_s: how long a token works.
        clock_ns: what tells the time.
    """

    def __init__(
        self, life_s: float = LIFE_S, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._life_ns = round(life_s * _SECOND_NS)
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        # In the order in which they expire.
        self._issued: list[tuple[int, bytes, tuple[str, int]]] = []

    def __len__(self) -> int:
        with self._lock:
            self._forget_expired()
            return len(self._issued)

    def issue(self, worker: str, incarnation: int) -> bytes:
        """Return a new token that lets one incarnation of a worker in.

        Raises:
            JoinError: too many are on their way.
        """
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._lock:
            self._forget_expired()
            if len(self._issued) >= TOKENS_MAX:
                raise JoinError(
                    f"{TOKENS_MAX} tokens are issued and not used yet; try again when "
                    "some have expired"
                )
            due_ns = self._clock_ns() + self._life_ns
            self._issued.append((due_ns, token, (worker, incarnation)))
        return token

    def use(self, token: bytes) -> tuple[str, int] | None:
        """Return whom a token lets in, and forget it; None if it is none of ours."""
        with self._lock:
            self._forget_expired()
            # All are compared, so that the time taken does not tell which is like it.
            found = [hmac.compare_digest(token, one) for _, one, _ in self._issued]
            return self._issued.pop(found.index(True))[2] if any(found) else None

    def _forget_expired(self) -> None:
        now_ns = self._clock_ns()
        self._issued = [one for one in self._issued if one[0] > now_ns]


def secret_between(session: str, one: str, other: str) -> str:
    """Return what two processes of a session know each other by, as text.

    Args:
        session: the secret of the session, which main alone has.
        one: who one of them is, its incarnation included.
        other: who the other one is.
    """
    both = " ".join(sorted((one, other)))
    return hmac.new(session.encode(), both.encode(), "sha256").hexdigest()


def proof_of(secret: str) -> str:
    """Return what shows that one has a secret, to whoever has it: hexadecimal digits.

    It is of no use for anything else.
    """
    return hmac.new(secret.encode(), b"proof", "sha256").hexdigest()


def fresh_secret() -> str:
    """Return a secret that nobody can guess, as text."""
    return secrets.token_hex(SECRET_BYTES)
