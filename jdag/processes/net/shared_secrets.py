"""Secrets that two processes share.

Main derives a secret for each pair of processes of a session, from main's own secret
and the names of both processes. The secret authenticates control requests between the
two (`proof_of`) and their data connections (`jdag.processes.net.greeting`). Secrets are
never sent over data connections.
"""

import hmac
import secrets

SECRET_BYTES = 32


def secret_between(session: str, worker: str, peer: str) -> str:
    both = " ".join(sorted((worker, peer)))
    return hmac.new(session.encode(), both.encode(), "sha256").hexdigest()


def proof_of(secret: str) -> str:
    return hmac.new(secret.encode(), b"proof", "sha256").hexdigest()


def fresh_secret() -> str:
    return secrets.token_hex(SECRET_BYTES)
