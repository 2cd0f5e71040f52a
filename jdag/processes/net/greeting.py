"""The greeting (authentication handshake) of a data connection.

Each end proves that it knows the secret of the pair. Four records of fixed length
precede all frames. Neither end waits for the other's opening before it sends its own,
so an end that uses TLS detects at once that the other end does not use it:

    each      opening  magic, version of the protocol, nonce, frames received
    dialler   proof
    listener  answer   verdict, frames received, proof

A proof is an HMAC whose key is the secret that the two workers share in their session.
It covers the direction, both workers with their incarnations, and all earlier records.
A recorded greeting is therefore useless on another connection, in the other direction,
or for another worker, incarnation or session. These functions do no I/O; the I/O is in
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
    dialler: Worker
    listener: Worker
    secret: str

    def proof(self, end: Literal["dialler", "listener"], *records: bytes) -> bytes:
        names = f"{end} {self.dialler} {self.listener} ".encode()
        return hmac.digest(self.secret.encode(), names + b"".join(records), "sha256")


def opening(received: int = 0) -> bytes:
    return OPENING.pack(_MAGIC, PROTOCOL, secrets.token_bytes(32), received)


def opened(record: bytes, they: str, we: str) -> int:
    """Check an opening; return the number of frames that its sender has received.

    Raises:
        ConnectionError: the record is not an opening.
        JoinError: the versions of the protocol differ.
    """
    magic, protocol, _, received = OPENING.unpack_from(record)
    if magic != _MAGIC:
        raise ConnectionError(f"{they} does not speak jdag's protocol")
    if protocol != PROTOCOL:
        raise JoinError(protocols_differ(protocol, they, we))
    return int(received)


def is_by(pair: ConnectionPair, ours: bytes, hello: bytes) -> bool:
    """Whether the dialler of a pair sent this hello (opening and proof)."""
    record, proof = hello[: OPENING.size], hello[OPENING.size :]
    return hmac.compare_digest(pair.proof("dialler", ours, record), proof)


def hello_answer(
    pair: ConnectionPair | None,
    ours: bytes,
    hello: bytes,
    verdict: int,
    received: int = 0,
) -> bytes:
    record = VERDICT.pack(verdict, received)
    proof = pair.proof("listener", ours, hello, record) if pair else bytes(PROOF_BYTES)
    return record + proof


def answered(pair: ConnectionPair, opening: bytes, hello: bytes, reply: bytes) -> int:
    """Check an answer; return the number of frames that the listener has received.

    Raises:
        ConnectionError: another worker listens at the address.
        JoinError: the listener does not know this worker, or considers it lost.
    """
    record, proof = reply[: VERDICT.size], reply[VERDICT.size :]
    verdict, received = VERDICT.unpack(record)
    it = f"worker {pair.listener!r}"
    if verdict == UNKNOWN:
        raise JoinError(
            f"{it} refused this worker: this worker is not in its session, or has a "
            "certificate for another name"
        )
    if not hmac.compare_digest(pair.proof("listener", opening, hello, record), proof):
        raise ConnectionError(f"the process there did not prove that it is {it}")
    if verdict == GIVEN_UP:
        raise JoinError(f"{it} considers this worker lost", given_up=True)
    return int(received)
