"""Peer identity: a certificate must be for the claimed worker, or for its host.

The names accepted are the worker's and that of its host in the cluster's file, so
several workers of one host may share a certificate. The authority vouches for all hosts
of a cluster, so a valid certificate alone does not identify the worker.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from jdag.errors import JoinError

Names = Sequence[str] | None  # The names in a certificate; None where there is no TLS.
_NAMES = ("x509_common_name", "x509_subject_alternative_name")
_SHOWN_MAX = 200


def names_in(certificate: Mapping[str, Any] | None) -> Sequence[str]:
    """Return the names in a certificate, as Python's ssl has it."""
    if not certificate:
        return ()
    subject = [pair for part in certificate.get("subject", ()) for pair in part]
    common = [value for key, value in subject if key == "commonName"]
    return (*common, *[value for _, value in certificate.get("subjectAltName", ())])


def names_of(auth_context: Mapping[str, Sequence[bytes]]) -> Names:
    """Return the names in a caller's certificate, from the auth context of gRPC."""
    if list(auth_context.get("transport_security_type", ())) != [b"ssl"]:
        return None
    names = [name for key in _NAMES for name in auth_context.get(key, ())]
    return [name.decode(errors="replace") for name in names]


def check_identity(names: Names, worker: str, host: str | None) -> None:
    """Refuse a certificate that is neither the worker's nor its host's.

    Raises:
        JoinError: names both.
    """
    wanted = (worker,) if host is None else (worker, host)
    if names is None or any(_fits(name, one) for name in names for one in wanted):
        return
    shown = ", ".join(dict.fromkeys(names))[:_SHOWN_MAX] or "nobody"
    raise JoinError(
        f"a process that joins as worker {worker!r} shows a certificate for {shown}; "
        f"it has to be for {' or '.join(wanted)}"
    )


def _fits(name: str, wanted: str) -> bool:
    if name.startswith("*."):  # For all hosts of a domain.
        _, _, domain = wanted.partition(".")
        return bool(domain) and name[2:].lower() == domain.lower()
    try:
        return ipaddress.ip_address(name) == ipaddress.ip_address(wanted)
    except ValueError:
        return name.lower() == wanted.lower()
