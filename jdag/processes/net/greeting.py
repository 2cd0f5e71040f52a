"""How a data connection opens: each end proves that it knows the secret of both.

Before any frame come four records of fixed length; the first two do not wait for each
other, so that an end that expects TLS sees at once that there is none:

    each      opening  magic, version of the protocol, nonce, frames received
    dialler   proof
    listener  answer   verdict, frames received, proof

A proof is an HMAC, under the secret that the two share in their session, of the
direction, of both workers with their incarnations, and of all that was said before it.
What was overheard is therefore of no use on another connection, in the other direction,
or for another worker, incarnation or session. These functions do no I/O; that is for
`jdag.processes.net.listener`.
"""

import hmac
import secrets
import struct
from typing import Literal, NamedTuple

from jdag.engine.protocol import Worker
from jdag.errors import JoinError
from jdag.processes.net.handshake import PROTOCOL, protocols_differ

OPENING = struct.Struct("<4sB3x32sQ")
VERDICT = struct.Struct("<B7xQ")
PROOF_BYTES = 32
HELLO_BYTES, ANSWER_BYTES = OPENING.size + PROOF_BYTES, VERDICT.size + PROOF_BYTES
WELCOME, UNKNOWN, GIVEN_UP = range(3)  # Verdicts.
_MAGIC = b"jdag"


class ConnectionPair(NamedTuple):
    """The two ends of a data connection, and their shared secret."""

    dialler: Worker
    listener: Worker
    secret: str

    def proof(self, by: Literal["dialler", "listener"], *said: bytes) -> bytes:
        """Return the proof of one end, after all that both have said."""
        names = f"{by} {self.dialler} {self.listener} ".encode()
        return hmac.digest(self.secret.encode(), names + b"".join(said), "sha256")


def opening(received: int = 0) -> bytes:
    """Return what an end says first, on this connection alone."""
    return OPENING.pack(_MAGIC, PROTOCOL, secrets.token_bytes(32), received)


def opened(said: bytes, they: str, we: str) -> int:
    """Return how many frames the other end has received, by its opening.

    Raises:
        ConnectionError: it is none.
        JoinError: it is one of another version of the protocol.
    """
    magic, protocol, _, received = OPENING.unpack_from(said)
    if magic != _MAGIC:
        raise ConnectionError(f"{they} does not speak jdag's protocol")
    if protocol != PROTOCOL:
        raise JoinError(protocols_differ(protocol, they, we))
    return int(received)


def is_by(pair: ConnectionPair, ours: bytes, hello: bytes) -> bool:
    """Whether a hello, opening and proof, is by the dialler of a pair."""
    said, shown = hello[: OPENING.size], hello[OPENING.size :]
    return hmac.compare_digest(pair.proof("dialler", ours, said), shown)


def hello_answer(
    pair: ConnectionPair | None,
    ours: bytes,
    hello: bytes,
    verdict: int,
    received: int = 0,
) -> bytes:
    """Return the answer to a hello; one to UNKNOWN diallers proves nothing."""
    said = VERDICT.pack(verdict, received)
    proof = pair.proof("listener", ours, hello, said) if pair else bytes(PROOF_BYTES)
    return said + proof


def answered(pair: ConnectionPair, theirs: bytes, hello: bytes, reply: bytes) -> int:
    """Return how many frames the listener has received, by its answer.

    Raises:
        ConnectionError: what listens there is another worker.
        JoinError: it does not know this worker, or has given it up.
    """
    said, shown = reply[: VERDICT.size], reply[VERDICT.size :]
    verdict, received = VERDICT.unpack(said)
    it = f"worker {pair.listener!r}"
    if verdict == UNKNOWN:
        raise JoinError(f"{it} does not know this one in its session, or by its TLS")
    if not hmac.compare_digest(pair.proof("listener", theirs, hello, said), shown):
        raise ConnectionError("it does not prove that it is that worker")
    if verdict == GIVEN_UP:
        raise JoinError(f"{it} has given this one up", given_up=True)
    return int(received)
