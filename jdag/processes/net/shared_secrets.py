"""Secrets that two processes share.

Any two processes of a session share a secret that main derives from its own and from
both their names. By it one knows the other's requests (`proof_of`), and data
connections (`jdag.processes.net.greeting`). No secret is sent over a data connection.
"""

import hmac
import secrets

SECRET_BYTES = 32


def secret_between(session: str, one: str, other: str) -> str:
    """Return the secret that two workers, with their incarnations, share.

    `session` is the secret of the session, which main alone has.
    """
    both = " ".join(sorted((one, other)))
    return hmac.new(session.encode(), both.encode(), "sha256").hexdigest()


def proof_of(secret: str) -> str:
    """Return a proof of a secret, of no use for anything else: hexadecimal digits."""
    return hmac.new(secret.encode(), b"proof", "sha256").hexdigest()


def fresh_secret() -> str:
    """Return a random secret as text."""
    return secrets.token_hex(SECRET_BYTES)
