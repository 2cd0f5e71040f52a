"""A certificate authority for one session whose processes start on hosts not yet known.

Each process of the session gets the authority itself, as it gets the token, and issues
a certificate to its worker on its host. The package cryptography does the work.
"""

import datetime
import ipaddress
from pathlib import Path
from typing import Any, NamedTuple

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID
except ImportError:  # It is of the extra jdag[ray].
    IS_USABLE = False
else:
    IS_USABLE = True

_LIFE, _SKEW = datetime.timedelta(days=365), datetime.timedelta(days=1)
_NAME = "jdag session"


class Authority(NamedTuple):
    """The certificate of an authority, and its key, in PEM form."""

    certificate: str
    key: str

    def __repr__(self) -> str:  # Without the secret.
        return "Authority(...)"

    def issue(self, worker: str, host: str, folder: Path) -> tuple[Path, Path, Path]:
        """Write the three files of `jdag.processes.net.tls` for a worker on a host."""
        ca, certificate, key = (folder / name for name in ("ca", "certificate", "key"))
        own = ec.generate_private_key(ec.SECP256R1())
        issuer: Any = serialization.load_pem_private_key(self.key.encode(), None)
        try:
            named: Any = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            named = x509.DNSName(host)
        made = _builder(worker, own).add_extension(
            x509.SubjectAlternativeName([named]), critical=False
        )
        ca.write_text(self.certificate)
        certificate.write_text(_pem(made.sign(issuer, hashes.SHA256())))
        key.touch(mode=0o600)
        key.write_text(_key_pem(own))
        return ca, certificate, key


def fresh_authority() -> Authority:
    """Return a new authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    limits = x509.BasicConstraints(ca=True, path_length=0)
    made = _builder(_NAME, key).add_extension(limits, critical=True)
    return Authority(_pem(made.sign(key, hashes.SHA256())), _key_pem(key))


def _builder(subject: str, key: Any) -> Any:
    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(named(subject))
        .issuer_name(named(_NAME))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)  # Clocks of hosts differ.
        .not_valid_after(now + _LIFE)
    )


def _pem(certificate: Any) -> str:
    return str(certificate.public_bytes(serialization.Encoding.PEM).decode())


def _key_pem(key: Any) -> str:
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return str(key.private_bytes(serialization.Encoding.PEM, *form).decode())
