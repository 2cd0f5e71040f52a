"""Mutual TLS for the control plane and the data plane, configured by three files.

Every node has a certificate, its key, and the certificates of the authorities (`ca`).
Both ends of a connection send their certificates, and verify the other's certificate
with `ca`. The dialling end also checks that the certificate contains the dialled name
(a host, an address or a worker's name). Only TLS 1.3 is used.

A TlsStream runs TLS between two buffers in memory, so that no call blocks and a caller
need not pass accepted bytes again. A truncated connection cannot be distinguished from
an orderly end. This is harmless, because frames have lengths and numbers.
"""

import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from jdag.errors import JdagError, reason, spelled
from jdag.processes.net.peer_identity import Names, names_in
from jdag.processes.net.streams import SocketStream, peer_closed

# Maximum number of bytes per call of TLS, and thus of bytes that wait for the socket.
_TAKEN_MAX = 1 << 18


@dataclass(frozen=True)
class Tls:
    """The certificate of a node, and the authorities that it trusts; see `load_tls`."""

    ca: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    serving: ssl.SSLContext
    dialling: ssl.SSLContext

    def serve(self, plain: SocketStream) -> "TlsStream":
        return TlsStream(plain, self.serving, None)

    def dial(self, plain: SocketStream, name: str) -> "TlsStream":
        return TlsStream(plain, self.dialling, name)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)

    def server_credentials(self) -> grpc.ServerCredentials:
        pair = (self.key, self.certificate)
        return grpc.ssl_server_credentials([pair], self.ca, require_client_auth=True)


def load_tls(ca: Path, certificate: Path, key: Path) -> Tls:
    """Read the PEM files of a node, and check that they match.

    Raises:
        JdagError: a file is missing, unreadable or not in PEM form; the key belongs to
            another certificate or has a passphrase; or the certificate has expired, is
            not yet valid, was not issued by `ca`, or may not be used at both ends. The
            message names the file and the mistake.
    """
    files = _read("ca", ca), _read("certificate", certificate), _read("key", key)
    serving = _context(ssl.PROTOCOL_TLS_SERVER, ca, certificate, key)
    serving.num_tickets = 0  # TLS sessions are never resumed.
    dialling = _context(ssl.PROTOCOL_TLS_CLIENT, ca, certificate, key)
    try:
        _try_on_itself(serving, dialling)
    except ssl.SSLCertVerificationError as error:
        raise JdagError(
            f"TLS certificate {certificate} is not valid for peers that use ca {ca}: "
            f"{error.verify_message}"
        ) from error
    return Tls(*files, serving, dialling)


def _read(role: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise JdagError(f"TLS {role} {spelled(path)}: {reason(error)}") from error


def _context(side: int, ca: Path, certificate: Path, key: Path) -> ssl.SSLContext:
    def _refuse_passphrase() -> str:
        raise JdagError(f"TLS key {key} has a passphrase; use a key without passphrase")

    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise JdagError(f"TLS ca {ca} contains no certificate in PEM form") from error
    try:
        context.load_cert_chain(certificate, key, password=_refuse_passphrase)
    except ssl.SSLError as error:
        text = f"TLS certificate {certificate} or key {key} is not in PEM form"
        if error.reason == "KEY_VALUES_MISMATCH":
            text = f"TLS key {key} is not the key of certificate {certificate}"
        raise JdagError(text) from error
    return context


def _try_on_itself(serving: ssl.SSLContext, dialling: ssl.SSLContext) -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    dialling.check_hostname = False
    client = dialling.wrap_bio(to_client, to_server)
    dialling.check_hostname = True
    for end in (client, server, client, server):
        with suppress(ssl.SSLWantReadError):  # The other end goes on.
            end.do_handshake()


class TlsStream(SocketStream):
    """A stream with TLS. `name` is the dialled name, or None at the accepting end."""

    buffered = True

    def __init__(
        self, plain: SocketStream, context: ssl.SSLContext, name: str | None
    ) -> None:
        super().__init__(plain._socket, plain.peer)
        self.local = False
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=name is None,
            server_hostname=name,
        )
        self._room = memoryview(bytearray(_TAKEN_MAX))
        self._unsent = memoryview(b"")
        self._more = False

    @property
    def certificate(self) -> Names:  # type: ignore[override]
        try:
            return names_in(self._tls.getpeercert())
        except ValueError:
            return ()

    def shake_hands(self) -> None:
        """Continue the handshake. Raises BlockingIOError until the peer replies."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._push()
                try:
                    self._fetch()
                except ConnectionError as error:
                    text = f"{error}, during the TLS handshake"
                    raise ConnectionError(text) from error
            except ssl.SSLError as error:
                raise self._failed(error) from error
            else:
                self._push()
                return

    def recv_into(self, view: memoryview) -> int:
        self._push()
        received = 0
        while received < len(view):
            try:
                rest = view[received:]
                count: int = self._tls.read(len(rest), rest)  # type: ignore[assignment]
            except ssl.SSLWantReadError:
                self._push()
                if received:
                    break
                self._more = False
                self._fetch()
            except ssl.SSLError as error:
                if received:
                    break
                raise self._failed(error) from error
            else:
                if not count and not received:
                    raise peer_closed(self.peer)
                received += count
        self._more = received == len(view)
        return received

    def send(self, views: Sequence[memoryview]) -> int:
        self.flush()
        try:
            count = self._tls.write(_front(views))
        except ssl.SSLWantReadError:  # The handshake is not complete yet.
            self._push()
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise self._failed(error) from error
        self._push()
        return count

    def pending(self) -> bool:
        return self._more

    def wants_write(self) -> bool:
        return bool(self._unsent) or self._outgoing.pending > 0

    def flush(self) -> None:
        self._push()
        if self.wants_write():
            raise BlockingIOError

    def _fetch(self) -> None:
        count = super().recv_into(self._room)
        self._incoming.write(self._room[:count])

    def _push(self) -> None:
        while self.wants_write():
            if not self._unsent:
                self._unsent = memoryview(self._outgoing.read())
            try:
                self._unsent = self._unsent[super().send([self._unsent]) :]
            except BlockingIOError:
                return

    def _failed(self, error: ssl.SSLError) -> ConnectionError:
        # The pending output contains the reason for the other end. If the connection is
        # already closed, only this end reports an error.
        with suppress(ConnectionError):
            self._push()
        why = _REASONS.get(error.reason, str(error.reason).replace("_", " ").lower())
        if isinstance(error, ssl.SSLCertVerificationError):
            why = error.verify_message
        return ConnectionError(f"TLS with {self.peer} failed: {why}")


# Descriptions of OpenSSL errors that the configuration of the other end causes.
_REASONS = {
    "HTTP_REQUEST": "it does not use TLS",
    "WRONG_VERSION_NUMBER": "it does not use TLS",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it sent no certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it requires a certificate",
    "TLSV1_ALERT_DECRYPT_ERROR": "it does not trust the issuer of our certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust the issuer of our certificate",
}


def _front(views: Sequence[memoryview]) -> bytes | memoryview:
    front: list[memoryview] = []
    room = _TAKEN_MAX
    for view in views:
        if len(view):
            front.append(view[:room])
            room -= len(front[-1])
        if not room:
            break
    assert front, "expected a view that is not empty"
    return front[0] if len(front) == 1 else b"".join(front)
