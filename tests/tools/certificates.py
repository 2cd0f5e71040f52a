"""Certificates for tests: an authority, and what it issues, as files."""

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)
_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)
PRIVATE = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8


class Files(NamedTuple):
    ca: Path
    certificate: Path
    key: Path


class Issuer:
    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = (
            self._builder(name, name, self.key, 0)
            .add_extension(x509.BasicConstraints(True, None), True)
            .add_extension(_SIGNS, True)
            .sign(self.key, hashes.SHA256())
        )
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def _builder(self, subject: str, issuer: str, key, starts: int, lasts: int = 9):
        now = datetime.datetime.now(datetime.UTC)  # noqa: TID251
        start = now + starts * DAY - DAY / 2
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(start + lasts * DAY)
            # Without these two, contexts that Python makes by default refuse it.
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(
                    self.key.public_key()
                ),
                False,
            )
        )

    def issue(self, name: str, *, starts=0, lasts=9, usage=None, passphrase=None):
        """Write a certificate for a worker, which may be reached at loopback too."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = self._builder(name, self.name, key, starts, lasts).add_extension(
            x509.SubjectAlternativeName(names), False
        )
        if usage is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), False)
        files = Files(self.ca, self.folder / f"{name}.crt", self.folder / f"{name}.key")
        certificate = builder.sign(self.key, hashes.SHA256())
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        files.certificate.write_bytes(pem)
        locked = (
            serialization.BestAvailableEncryption(passphrase)
            if passphrase
            else serialization.NoEncryption()
        )
        files.key.write_bytes(key.private_bytes(*PRIVATE, locked))
        return files
