"""Mutual TLS from three files, for the control plane and the data plane.

Every node has a certificate, its key, and the certificates of the authorities (`ca`).
Both ends of a connection show their certificates and verify the other's against `ca`.
The dialling end also checks the name that it dialled (a host, an address or a worker's
name) against the names in the certificate. TLS 1.3 only.

A TlsStream keeps TLS between two buffers in memory, so that no call blocks and bytes
once taken are never asked for again. A truncated connection looks like its end: frames
have lengths, and links count them.
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

# What is encrypted before the socket is asked again, and the most that waits for it.
_TAKEN_MAX = 1 << 18


@dataclass(frozen=True)
class Tls:
    """The certificate of a node and the authorities that it trusts; see `load_tls`."""

    ca: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    serving: ssl.SSLContext
    dialling: ssl.SSLContext

    def serve(self, plain: SocketStream) -> "TlsStream":
        """Return the TLS stream of an accepted connection."""
        return TlsStream(plain, self.serving, None)

    def dial(self, plain: SocketStream, name: str) -> "TlsStream":
        """Return the TLS stream of a connection that this process made to `name`."""
        return TlsStream(plain, self.dialling, name)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a client of a control server."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return those of a control server; it wants a certificate of every client."""
        pair = (self.key, self.certificate)
        return grpc.ssl_server_credentials([pair], self.ca, require_client_auth=True)


def load_tls(ca: Path, certificate: Path, key: Path) -> Tls:
    """Read the files of a node, in PEM form, and check that they fit each other.

    Raises:
        JdagError: names the file and what is wrong: missing, unreadable, not PEM, a key
            of another certificate or with a passphrase, a certificate that has expired,
            is not yet valid, was not issued by `ca`, or may not be used at both ends.
    """
    files = _read("ca", ca), _read("certificate", certificate), _read("key", key)
    serving = _context(ssl.PROTOCOL_TLS_SERVER, ca, certificate, key)
    serving.num_tickets = 0  # No session is ever resumed.
    dialling = _context(ssl.PROTOCOL_TLS_CLIENT, ca, certificate, key)
    try:
        _try_on_itself(serving, dialling)
    except ssl.SSLCertVerificationError as error:
        raise JdagError(
            f"TLS certificate {certificate} is not one that others with ca {ca} would"
            f" take: {error.verify_message}"
        ) from error
    return Tls(*files, serving, dialling)


def _read(what: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        said = f"TLS {what} {spelled(path)}: {reason(error)}"
        raise JdagError(said) from error


def _context(side: int, ca: Path, certificate: Path, key: Path) -> ssl.SSLContext:
    def _refuse_passphrase() -> str:
        raise JdagError(f"TLS key {key} has a passphrase; give one without")

    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise JdagError(f"TLS ca {ca} has no certificate in PEM form") from error
    try:
        context.load_cert_chain(certificate, key, password=_refuse_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            said = f"TLS key {key} is not the key of certificate {certificate}"
            raise JdagError(said) from error
        said = f"TLS certificate {certificate} or key {key} is not in PEM form"
        raise JdagError(said) from error
    return context


def _try_on_itself(serving: ssl.SSLContext, dialling: ssl.SSLContext) -> None:
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = serving.wrap_bio(there, back, server_side=True)
    dialling.check_hostname = False
    client = dialling.wrap_bio(back, there)
    dialling.check_hostname = True
    for end in (client, server, client, server):
        with suppress(ssl.SSLWantReadError):  # The other end goes on.
            end.do_handshake()


class TlsStream(SocketStream):
    """A stream through TLS; `name` is the dialled name, None at the accepting end."""

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
        """See SocketStream; nothing before the handshake is done."""
        try:
            return names_in(self._tls.getpeercert())
        except ValueError:
            return ()

    def shake_hands(self) -> None:
        """Continue the handshake; the accepting end may just read instead.

        Raises:
            BlockingIOError: it waits for the other end.
            ConnectionError: it has failed.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._push()
                try:
                    self._fetch()
                except ConnectionError as error:
                    said = f"{error}, in the TLS handshake"
                    raise ConnectionError(said) from error
            except ssl.SSLError as error:
                raise self._failed(error) from error
            else:
                self._push()
                return

    def recv_into(self, view: memoryview) -> int:
        """See SocketStream."""
        self._push()
        came = 0
        while came < len(view):
            try:
                rest = view[came:]
                count: int = self._tls.read(len(rest), rest)  # type: ignore[assignment]
            except ssl.SSLWantReadError:
                self._push()
                if came:
                    break
                self._more = False
                self._fetch()
            except ssl.SSLError as error:
                if came:
                    break
                raise self._failed(error) from error
            else:
                if not count and not came:
                    raise peer_closed(self.peer)
                came += count
        self._more = came == len(view)
        return came

    def send(self, views: Sequence[memoryview]) -> int:
        """See SocketStream."""
        self.flush()
        try:
            count = self._tls.write(_front(views))
        except ssl.SSLWantReadError:  # The handshake is not done yet.
            self._push()
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise self._failed(error) from error
        self._push()
        return count

    def pending(self) -> bool:
        """See SocketStream."""
        return self._more

    def wants_write(self) -> bool:
        """See SocketStream."""
        return bool(self._unsent) or self._outgoing.pending > 0

    def flush(self) -> None:
        """See SocketStream."""
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
        # TLS tells the other end why; if it has gone, this end's error matters more.
        with suppress(ConnectionError):
            self._push()
        if isinstance(error, ssl.SSLCertVerificationError):
            why = error.verify_message
        else:
            why = _SAID.get(error.reason, str(error.reason).replace("_", " ").lower())
        return ConnectionError(f"TLS with {self.peer} failed: {why}")


# Reasons of OpenSSL when the other end is set up differently.
_SAID = {
    "HTTP_REQUEST": "it does not speak TLS",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it asks for a certificate",
    "TLSV1_ALERT_DECRYPT_ERROR": "it does not trust the issuer of our certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust the issuer of our certificate",
}


def _front(views: Sequence[memoryview]) -> bytes | memoryview:
    """Join what one call takes; a large view is not copied."""
    front: list[memoryview] = []
    room = _TAKEN_MAX
    for view in views:
        if len(view):
            front.append(view[:room])
            room -= len(front[-1])
        if not room:
            break
    assert front, "a stream was asked to send nothing"
    return front[0] if len(front) == 1 else b"".join(front)
