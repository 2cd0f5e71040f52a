"""The control plane: a gRPC server in each worker, and who asks it.

Requests and answers are JSON; a request is one of `jdag.rpc.requests`, and its rpc has
its name. Each call has a deadline and each message a largest size. A call that does not
bring its request in time is cancelled. The server listens on loopback unless it has
certificates; with them both sides show theirs.

A call says ahead of its request, by a proof, that who calls has a secret that is known
here. Those have most of the room, of which each has a share; all others have some of
their own, of which each address has a share. So neither a stranger nor a worker that
has gone mad keeps others out.

A refusal comes back as a `JoinError` with what the server said; so does a host that is
not there, a port in use, a certificate that is not trusted: each in one line.
"""

import errno
import json
import logging
import os
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import BoundedSemaphore, Timer
from typing import Any, TypeVar

import grpc
from pydantic import BaseModel, ValidationError

from jdag.errors import JdagError, JoinError, reason
from jdag.rpc.certified import hold_to, names_shown
from jdag.rpc.requests import REQUESTS, Answer, Request
from jdag.rpc.rooms import Room
from jdag.rpc.settings import Address
from jdag.rpc.tls import Tls
from jdag.rpc.tokens import proof_of
from jdag.rpc.tunnel import METHOD, Carry
from jdag.rpc.tunnel import SERVER_OPTIONS as TUNNEL_OPTIONS

BODY_BYTES_MAX = 1 << 22
ANSWERS_MAX = 16
# Calls under way: of those who are known, of one of them; of others, of one address.
KNOWN_MAX, KNOWN_EACH_MAX = 256, 64
STRANGERS_MAX, STRANGERS_EACH_MAX = 128, 48
READ_S = 5.0
CARRIES_MAX = 256
CARRY_BYTES_MAX = 1 << 22
ASK_S = 10.0
_SERVICE, CARRY = METHOD.strip("/").split("/")
# The first byte of a handshake, and of an alert.
_TLS_RECORDS = (b"\x16", b"\x15")
_PROBE_S = 2.0
_BOTH = "[tls] has to be in the cluster's file on both sides"
PROOF = "jdag-proof"

Kind = TypeVar("Kind", bound=Answer)
Answers = Mapping[type[Request], Callable[[Any], Mapping[str, Any]]]

_OPTIONS = (
    ("grpc.max_receive_message_length", CARRY_BYTES_MAX + 64),
    ("grpc.max_send_message_length", CARRY_BYTES_MAX + 64),
    ("grpc.max_metadata_size", 16 << 10),
    # A proxy that the environment names is for the web.
    ("grpc.enable_http_proxy", 0),
)
_SERVER_OPTIONS = (
    *_OPTIONS,
    *TUNNEL_OPTIONS,
    # Without this two processes could have one port, each half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", KNOWN_EACH_MAX + STRANGERS_MAX + CARRIES_MAX),
)
_CLIENT_OPTIONS = (
    *_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)

_log = logging.getLogger(__name__)


def _nobody(proof: str) -> bool:
    return False


class ControlServer:
    """What answers requests at an address, until it is closed; `address` is where.

    Args:
        address: where to listen; with port 0 the system chooses one.
        answers: for each class of request what answers it, on any of some threads. A
            `JdagError` that it raises is the refusal.
        tls: mutual TLS; without them only loopback may be listened at.
        carry: what carries streams of bytes, if they may come; see `jdag.rpc.tunnel`.
        hosts: of workers, by name; with TLS, whoever says to be a worker has to show a
            certificate of it.
        knows: whether something is the proof of a secret that is known here, see
            `jdag.rpc.tokens`; nobody is known without it.

    Raises:
        JoinError: it cannot listen there, or may not.
    """

    def __init__(
        self,
        address: Address,
        answers: Answers,
        *,
        tls: Tls | None = None,
        carry: Carry | None = None,
        hosts: Mapping[str, str] | None = None,
        knows: Callable[[str], bool] = _nobody,
    ) -> None:
        _refuse_open(address, tls)
        _refuse_taken(address)
        threads = (
            KNOWN_MAX
            + STRANGERS_MAX
            + ANSWERS_MAX
            + (0 if carry is None else CARRIES_MAX)
        )
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="control")
        self._server = grpc.server(
            self._threads,
            options=_SERVER_OPTIONS,
            maximum_concurrent_rpcs=threads,
        )
        door = _Door(knows)
        methods = {
            asked.__name__: grpc.stream_unary_rpc_method_handler(
                door.reading(answering(asked, answers[asked], hosts or {}))
            )
            for asked in REQUESTS
            if asked in answers
        }
        if carry is not None:
            bounded = _bounded(carry)
            methods[CARRY] = grpc.stream_stream_rpc_method_handler(bounded)
        handler = grpc.method_handlers_generic_handler(_SERVICE, methods)
        self._server.add_generic_rpc_handlers((handler,))
        self.address = Address(address.host, self._listen(address, tls))
        self._server.start()

    def _listen(self, address: Address, tls: Tls | None) -> int:
        try:
            if tls is None:
                return int(self._server.add_insecure_port(str(address)))
            credentials = tls.server_credentials()
            return int(self._server.add_secure_port(str(address), credentials))
        except (OSError, RuntimeError) as error:
            self._threads.shutdown(wait=False)
            raise JoinError(f"cannot listen at {address}: {error}") from error

    def close(self, grace_s: float = 1.0) -> None:
        """Answer what is being answered, at most so long, then no more."""
        self._server.stop(grace_s).wait(grace_s + 1.0)
        self._threads.shutdown(wait=False, cancel_futures=True)


def _refuse_open(address: Address, tls: Tls | None) -> None:
    if tls is None and not address.is_loopback:
        raise JoinError(
            f"without TLS only loopback may be listened at or asked, and {address} is "
            "not; name certificates in the [tls] of the cluster's file"
        )


def _refuse_taken(address: Address) -> None:
    """Say in one line why nothing can listen there: gRPC says it in many."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(where)
    except OSError as error:
        raise JoinError(f"cannot listen at {address}: {reason(error)}") from error


def answering(
    asked: type[Request],
    answer: Callable[[Any], Mapping[str, Any]],
    hosts: Mapping[str, str],
) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    """Return what answers the bytes of a request: those of an answer, or a refusal."""

    def handle(body: bytes, context: grpc.ServicerContext) -> bytes:
        if len(body) > BODY_BYTES_MAX:
            said = f"{asked.__name__} has {len(body)} bytes; at most {BODY_BYTES_MAX}"
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, said)
        try:
            request = asked.model_validate_json(body)
        except ValidationError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, _said(asked, error))
        try:
            if request.by is not None:
                hold_to(names_shown(context), request.by, hosts.get(request.by))
            return json.dumps(answer(request)).encode()
        except JdagError as error:
            code = grpc.StatusCode.FAILED_PRECONDITION
            if isinstance(error, JoinError) and error.given_up:
                code = grpc.StatusCode.ABORTED
            context.abort(code, str(error)[:4096])
        raise AssertionError(asked)  # abort raises.

    return handle


class _Door:
    """Where calls come in, and wait for their one message; gRPC itself would for ever.

    `knows` is that of a server.
    """

    def __init__(self, knows: Callable[[str], bool]) -> None:
        self._knows = knows
        self._known = Room(KNOWN_MAX, KNOWN_EACH_MAX)
        self._strangers = Room(STRANGERS_MAX, STRANGERS_EACH_MAX)
        self._answers = BoundedSemaphore(ANSWERS_MAX)

    def reading(
        self, handle: Callable[[bytes, grpc.ServicerContext], bytes]
    ) -> Callable[[Iterator[bytes], grpc.ServicerContext], bytes]:
        """Return what has the message of a call handled, if there is room for it."""

        def read(came: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            proof = str(dict(context.invocation_metadata()).get(PROOF, ""))
            is_known = self._knows(proof)
            room = self._known if is_known else self._strangers
            holder = proof if is_known else context.peer().rpartition(":")[0]
            with room.place(holder) as there_is:
                if not there_is:
                    _refuse(context, "too many calls are under way from there")
                body = _body(came, context)
                if not self._answers.acquire(timeout=READ_S if is_known else 0.0):
                    _refuse(context, f"{ANSWERS_MAX} requests are being answered")
                try:
                    return handle(body, context)
                finally:
                    self._answers.release()

        return read


def _refuse(context: grpc.ServicerContext, why: str) -> None:
    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{why}; ask again")


def _body(came: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    late = Timer(READ_S, context.cancel)
    late.daemon = True
    late.start()
    try:
        return next(came, b"")
    finally:
        late.cancel()


def _said(asked: type[BaseModel], error: ValidationError) -> str:
    """Say what is wrong with it, and nothing of what is in it: secrets are."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part)[:64] for part in first["loc"][:4])
    return f"{asked.__name__}.{place}: {first['msg'][:200]}".replace(".:", ":")


def _bounded(carry: Carry) -> Carry:
    """Return what carries at most so many streams at once, and refuses others."""
    free = BoundedSemaphore(CARRIES_MAX)

    def carried(
        came: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        if not free.acquire(blocking=False):
            said = f"{CARRIES_MAX} streams are open, and there may be no more"
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, said)
        try:
            yield from carry(came, context)
        finally:
            free.release()

    return carried


class ControlClient:
    """Asks the control server at an address; thread-safe.

    Args:
        name: what is asked, as errors name it: `worker 'ps0'`.
        address: where it listens.
        tls: mutual TLS; without them only loopback may be asked.

    Raises:
        JoinError: without TLS that may not be asked.
    """

    def __init__(self, name: str, address: Address, *, tls: Tls | None = None) -> None:
        _refuse_open(address, tls)
        self.name = name
        self.address = address
        self._tls = tls
        self.channel = channel_to(address, tls)

    def __str__(self) -> str:
        return f"{self.name} at {self.address}"

    def ask(self, request: Request, *, timeout_s: float = ASK_S) -> dict[str, Any]:
        """Return the answer.

        Raises:
            JoinError: it refused, or is not reached in time; see `reached`.
        """
        try:
            answer = json.loads(self._answer(request, timeout_s))
        except (ValueError, RecursionError) as error:
            raise JoinError(f"{self} answered what is not JSON") from error
        if not isinstance(answer, dict):
            raise JoinError(f"{self} answered what is no table")
        return answer

    def learn(
        self, request: Request, kind: type[Kind], *, timeout_s: float = ASK_S
    ) -> Kind:
        """Return the answer as one of its kind.

        Raises:
            JoinError: as `ask`; or the answer is not of that kind.
        """
        answer = self._answer(request, timeout_s)
        try:
            return kind.model_validate_json(answer)
        except ValidationError as error:
            said = f"{self} answered what cannot be used: {_said(kind, error)}"
            raise JoinError(said) from None

    def _answer(self, request: Request, timeout_s: float) -> bytes:
        call = self.channel.unary_unary(f"/{_SERVICE}/{type(request).__name__}")
        body, proof = request.model_dump_json().encode(), proof_of(request.key)
        try:
            answer: bytes = call(body, timeout=timeout_s, metadata=((PROOF, proof),))
        except grpc.RpcError as error:
            raise self._refusal(type(request).__name__, error, timeout_s) from None
        return answer

    def close(self) -> None:
        """Let go of the connection."""
        self.channel.close()

    def _refusal(self, asked: str, error: Any, timeout_s: float) -> JoinError:
        code, details = error.code(), " ".join((error.details() or "").split())
        match code:
            case grpc.StatusCode.FAILED_PRECONDITION:
                return JoinError(details)
            case grpc.StatusCode.ABORTED:
                return JoinError(details, given_up=True)
            case grpc.StatusCode.UNAVAILABLE:
                why = why_not(self.address, self._tls) or details
                absent = why == os.strerror(errno.ECONNREFUSED)
                said = f"cannot reach {self}: {why}"
                return JoinError(said, reached=False, absent=absent)
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                said = f"{self} did not answer {asked} within {timeout_s:g} s"
                return JoinError(said, reached=False)
            case _:
                said = f"{self} refused {asked}: {code.name}: {details}"
                busy = code is grpc.StatusCode.RESOURCE_EXHAUSTED
                return JoinError(said, reached=not busy)


def channel_to(address: Address, tls: Tls | None) -> grpc.Channel:
    """Return a channel to an address, with mutual TLS where there are certificates."""
    if tls is None:
        return grpc.insecure_channel(str(address), options=_CLIENT_OPTIONS)
    credentials = tls.channel_credentials()
    return grpc.secure_channel(str(address), credentials, options=_CLIENT_OPTIONS)


def why_not(address: Address, tls: Tls | None) -> str | None:
    """Say why an address cannot be asked, by trying it; None if nothing is found."""
    try:
        with socket.create_connection(address, _PROBE_S) as tried:
            if tls is None:
                if _uses_tls(tried):
                    return f"it uses TLS and this process does not; {_BOTH}"
                return "it closes the connection; perhaps it stops"
            host = address.host
            with tls.dialling.wrap_socket(tried, server_hostname=host) as secured:
                # A server that refuses our certificate says so only now.
                secured.recv(1)
            return None
    except ssl.SSLCertVerificationError as error:
        why = error.verify_message.lower()
        return (
            f"TLS refused: {why}; its certificate has to be for {address.host}, and "
            "issued by the authority that ca names here"
        )
    except ssl.SSLError as error:
        if error.reason == "WRONG_VERSION_NUMBER":
            return f"it does not use TLS and this process does; {_BOTH}"
        why = error.reason or str(error)
        return f"TLS refused: {str(why).lower().replace('_', ' ')}"
    except OSError as error:
        return reason(error)


def _uses_tls(connected: socket.socket) -> bool:
    """Whether the other end of a connection answers a TLS handshake, whoever it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    hello = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), hello).do_handshake()
    connected.sendall(hello.read())
    return connected.recv(1) in _TLS_RECORDS
