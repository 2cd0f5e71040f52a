"""Peer identity: a certificate must be for the claimed worker or for its host.

A certificate must contain the name of the worker, or the name of the worker's host in
the cluster file. Several workers on one host may therefore share a certificate. It is
not enough that the cluster's authority issued the certificate, since it issues one for
every host.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from jdag.errors import JoinError

Names = Sequence[str] | None  # The names in a certificate; None without TLS.
_NAMES = ("x509_common_name", "x509_subject_alternative_name")
_SHOWN_MAX = 200


def names_in(certificate: Mapping[str, Any] | None) -> Sequence[str]:
    """Return the names in a certificate that `ssl.SSLObject.getpeercert` returned."""
    if not certificate:
        return ()
    subject = [pair for part in certificate.get("subject", ()) for pair in part]
    common = [value for key, value in subject if key == "commonName"]
    return (*common, *[value for _, value in certificate.get("subjectAltName", ())])


def names_of(auth_context: Mapping[str, Sequence[bytes]]) -> Names:
    if list(auth_context.get("transport_security_type", ())) != [b"ssl"]:
        return None
    names = [name for key in _NAMES for name in auth_context.get(key, ())]
    return [name.decode(errors="replace") for name in names]


def check_identity(names: Names, worker: str, host: str | None) -> None:
    allowed = (worker,) if host is None else (worker, host)
    if names is None or any(_fits(shown, name) for shown in names for name in allowed):
        return
    shown = ", ".join(dict.fromkeys(names))[:_SHOWN_MAX] or "no name"
    raise JoinError(
        f"a process that joins as worker {worker!r} has a certificate for {shown}; "
        f"expected a certificate for {' or '.join(allowed)}"
    )


def _fits(name: str, allowed: str) -> bool:
    if name.startswith("*."):  # A certificate for all hosts of a domain.
        _, _, domain = allowed.partition(".")
        return bool(domain) and name[2:].lower() == domain.lower()
    try:
        return ipaddress.ip_address(name) == ipaddress.ip_address(allowed)
    except ValueError:
        return name.lower() == allowed.lower()
