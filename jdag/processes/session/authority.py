"""A certificate authority for one session, for workers whose hosts are not yet known.

Each process of the session receives the authority together with the token. The process
then issues a certificate for its worker and host. Requires the package cryptography.
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
except ImportError:  # The extra jdag[ray] installs it.
    IS_USABLE = False
else:
    IS_USABLE = True

_LIFE, _SKEW = datetime.timedelta(days=365), datetime.timedelta(days=1)
_NAME = "jdag session"


class Authority(NamedTuple):
    certificate: str
    key: str

    def __repr__(self) -> str:  # Hides the key.
        return "Authority(...)"

    def issue(self, worker: str, host: str, folder: Path) -> tuple[Path, Path, Path]:
        ca, certificate, key = (folder / name for name in ("ca", "certificate", "key"))
        private = ec.generate_private_key(ec.SECP256R1())
        issuer: Any = serialization.load_pem_private_key(self.key.encode(), None)
        try:
            subject_name: Any = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            subject_name = x509.DNSName(host)
        builder = _builder(worker, private).add_extension(
            x509.SubjectAlternativeName([subject_name]), critical=False
        )
        ca.write_text(self.certificate)
        certificate.write_text(_pem(builder.sign(issuer, hashes.SHA256())))
        key.touch(mode=0o600)
        key.write_text(_key_pem(private))
        return ca, certificate, key


def fresh_authority() -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    limits = x509.BasicConstraints(ca=True, path_length=0)
    builder = _builder(_NAME, key).add_extension(limits, critical=True)
    return Authority(_pem(builder.sign(key, hashes.SHA256())), _key_pem(key))


def _builder(subject: str, key: Any) -> Any:
    def x509_name(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    today = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509_name(subject))
        .issuer_name(x509_name(_NAME))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - _SKEW)  # The clocks of hosts may differ.
        .not_valid_after(today + _LIFE)
    )


def _pem(certificate: Any) -> str:
    return str(certificate.public_bytes(serialization.Encoding.PEM).decode())


def _key_pem(key: Any) -> str:
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return str(key.private_bytes(serialization.Encoding.PEM, *form).decode())
