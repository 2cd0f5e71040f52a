"""Whom a certificate is for.

It is one of a worker if it has the name of the worker, or that of its host in the
cluster's file: then several workers of one host may share it. An authority vouches for
all hosts of a cluster; so who shows a certificate is not yet whoever it says it is.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from jdag.errors import JoinError

Shown = Sequence[str] | None  # The names in a certificate; None where there is no TLS.
_NAMES = ("x509_common_name", "x509_subject_alternative_name")
_SHOWN_MAX = 200


def names_in(certificate: Mapping[str, Any] | None) -> Sequence[str]:
    """Return the names in a certificate, as Python's TLS has it."""
    if not certificate:
        return ()
    subject = [pair for part in certificate.get("subject", ()) for pair in part]
    common = [value for key, value in subject if key == "commonName"]
    return (*common, *[value for _, value in certificate.get("subjectAltName", ())])


def names_shown(context: grpc.ServicerContext) -> Shown:
    """Return the names in the certificate of who calls, as gRPC has it."""
    found = context.auth_context()
    if found.get("transport_security_type") != [b"ssl"]:
        return None
    names = [name for key in _NAMES for name in found.get(key, ())]
    return [name.decode(errors="replace") for name in names]


def hold_to(shown: Shown, worker: str, host: str | None) -> None:
    """See that a certificate is one of a worker, which is at a host if that is known.

    Raises:
        JoinError: it is another's.
    """
    wanted = (worker,) if host is None else (worker, host)
    if shown is None or any(_fits(name, one) for name in shown for one in wanted):
        return
    names = ", ".join(dict.fromkeys(shown))[:_SHOWN_MAX] or "nobody"
    raise JoinError(
        f"who comes as worker {worker!r} shows a certificate for {names}; it has to be "
        f"for {' or '.join(wanted)}"
    )


def _fits(name: str, wanted: str) -> bool:
    if name.startswith("*."):  # For all hosts of a domain.
        _, _, domain = wanted.partition(".")
        return bool(domain) and name[2:].lower() == domain.lower()
    try:
        return ipaddress.ip_address(name) == ipaddress.ip_address(wanted)
    except ValueError:
        return name.lower() == wanted.lower()
