"""The control plane: a gRPC server in each worker process, and its client.

Inputs: calls whose metadata hold the caller's protocol version and a proof of a secret.
    Each has one message, a request of `jdag.processes.session.requests` in JSON; the
    rpc is named after its class.
Outputs: answers in JSON, or a refusal. The client raises a one-line `JoinError` for a
    refusal, an unreachable host or an untrusted certificate.
Invariants: without certificates, the server listens on loopback only; with them, TLS is
    mutual. A call waits for its request on an asyncio loop, for at most READ_S, without
    holding a thread. ANSWERS_MAX threads answer. Authenticated callers may have
    CALLS_MAX calls, which wait for a thread. All others share STRANGERS_MAX calls and
    get idle threads only, so a flood of them delays authenticated callers only by the
    time to read its metadata.
"""

import asyncio
import errno
import json
import logging
import os
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio
import msgspec

from jdag.errors import JdagError, JoinError, reason
from jdag.processes.net.addresses import Address, bound, hold_to_loopback
from jdag.processes.net.background import loop, wait_for
from jdag.processes.net.handshake import PROTOCOL, protocols_differ
from jdag.processes.net.peer_identity import Names, check_identity, names_of
from jdag.processes.net.shared_secrets import proof_of
from jdag.processes.net.tls import Tls
from jdag.processes.session.requests import AttachWorker, Request

BODY_BYTES_MAX = 1 << 22
ANSWERS_MAX = 16
# Concurrent calls: authenticated, anonymous.
CALLS_MAX, STRANGERS_MAX = 256, 64
READ_S = 5.0
ASK_S = 10.0
PROOF, VERSION = "jdag-proof", "jdag-protocol"
_SERVICE = "jdag.Control"
# To find out whether a server uses TLS, without checking its certificate.
_TRUSTING = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_TRUSTING.check_hostname, _TRUSTING.verify_mode = False, ssl.CERT_NONE
_PROBE_S = 2.0
_BOTH = "[tls] has to be in the cluster's file on both sides"

# What decoding raises; its texts contain no values, which may be secrets.
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

Kind = TypeVar("Kind")
Answers = Mapping[type[Request], Callable[[Any], Mapping[str, Any]]]
_Context = Any

_OPTIONS = (
    ("grpc.max_receive_message_length", BODY_BYTES_MAX + 64),
    ("grpc.max_send_message_length", BODY_BYTES_MAX + 64),
    ("grpc.max_metadata_size", 16 << 10),
    # Ignore a web proxy set in the environment.
    ("grpc.enable_http_proxy", 0),
)
_SERVER_OPTIONS = (
    *_OPTIONS,
    # Otherwise two processes could share one port, each getting half of the calls.
    ("grpc.so_reuseport", 0),
)
_CLIENT_OPTIONS = (
    *_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)

_log = logging.getLogger(__name__)


class Refusal(Exception):
    """A call is refused: the status code and the reason."""

    def __init__(self, code: grpc.StatusCode, said: str) -> None:
        super().__init__(said)
        self.code = code


class ControlServer:
    """Answers requests at an address until it is closed; `address` is where.

    Args:
        name: of this process, as refusals name it: `worker 'ps0'`.
        address: where to listen; with port 0 the system chooses one.
        answers: for each class of request a function that answers it, on a thread. A
            `JdagError` that it raises is the refusal.
        tls: mutual TLS; without it only loopback may be listened at.
        hosts: of workers, by name; with TLS, a caller that claims to be a worker has to
            show a certificate of it.
        knows: whether a text proves a secret of this process (`shared_secrets`).

    Raises:
        JoinError: it cannot listen there, or may not.
    """

    def __init__(
        self,
        name: str,
        address: Address,
        answers: Answers,
        *,
        tls: Tls | None = None,
        hosts: Mapping[str, str] = {},
        knows: Callable[[str], bool] = lambda proof: False,
    ) -> None:
        if tls is None:
            hold_to_loopback(address, "is listened at")
        try:
            bound(address).close()  # The errors of gRPC are long.
        except OSError as error:
            raise JoinError(f"cannot listen at {address}: {reason(error)}") from error
        self._name = name
        self._knows = knows
        self._under_way: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(ANSWERS_MAX, "control")
        methods = {
            kind.__name__: grpc.stream_unary_rpc_method_handler(
                partial(_guarded, partial(self._call, answering(kind, answer, hosts)))
            )
            for kind, answer in answers.items()
        }
        handler = grpc.method_handlers_generic_handler(_SERVICE, methods)
        self.address = Address(
            address.host, wait_for(self._start(address, tls, handler))
        )

    async def _start(self, address: Address, tls: Tls | None, handler: Any) -> int:
        self._server = server = grpc.aio.server(options=_SERVER_OPTIONS)
        server.add_generic_rpc_handlers((handler,))
        try:
            if tls is None:
                port = server.add_insecure_port(str(address))
            else:
                port = server.add_secure_port(str(address), tls.server_credentials())
        except (OSError, RuntimeError) as error:
            raise JoinError(f"cannot listen at {address}: {error}") from error
        await server.start()
        return int(port)

    def close(self, grace_s: float = 1.0) -> None:
        """Stop; running answers get at most `grace_s` to finish."""
        wait_for(self._server.stop(grace_s))
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _counted(self, whose: str, most: int) -> Iterator[None]:
        if self._under_way[whose] >= most:
            said = f"{most} {whose} are under way; ask again"
            raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, said)
        self._under_way[whose] += 1
        try:
            yield
        finally:
            self._under_way[whose] -= 1

    async def _call(
        self,
        answer: Callable[[bytes, Names], bytes],
        messages: AsyncIterator[bytes],
        context: _Context,
    ) -> bytes:
        metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
        theirs = str(metadata.get(VERSION, ""))
        if theirs != str(PROTOCOL):
            said = protocols_differ(theirs, "this process", self._name)
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, said)
        is_known = self._knows(str(metadata.get(PROOF, "")))
        whose, most = "calls of strangers", STRANGERS_MAX
        if is_known:
            whose, most = "calls", CALLS_MAX
        with self._counted(whose, most):
            body = await _body(messages)
            # Only authenticated callers wait for a thread.
            free = CALLS_MAX + STRANGERS_MAX if is_known else ANSWERS_MAX
            with self._counted("answers", free):
                names = names_of(context.auth_context())
                run = loop().run_in_executor
                return await run(self._threads, answer, body, names)


async def _guarded(
    serve: Callable[[AsyncIterator[bytes], _Context], Awaitable[Any]],
    messages: AsyncIterator[bytes],
    context: _Context,
) -> Any:
    try:
        return await serve(messages, context)
    except Refusal as error:
        await context.abort(error.code, str(error)[:4096])


async def _body(messages: AsyncIterator[bytes]) -> bytes:
    try:
        async with asyncio.timeout(READ_S):
            async for message in messages:
                return message
    except TimeoutError:
        said = f"no request came within {READ_S:g} s"
        raise Refusal(grpc.StatusCode.CANCELLED, said) from None
    return b""


def answering(
    kind: type[Request],
    answer: Callable[[Any], Mapping[str, Any]],
    hosts: Mapping[str, str],
) -> Callable[[bytes, Names], bytes]:
    """Return a function that answers the bytes of a request, or raises a Refusal."""
    # Made here: two threads that make the first one of a class at once may crash.
    decode = msgspec.json.Decoder(kind).decode

    def handle(body: bytes, names: Names) -> bytes:
        try:
            request = decode(body)
            if isinstance(request, AttachWorker):
                check_identity(names, request.main, hosts.get(request.main))
            return json.dumps(answer(request)).encode()
        except _MALFORMED as error:
            said = f"{kind.__name__}: {error}"
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, said) from None
        except JdagError as error:
            code = grpc.StatusCode.FAILED_PRECONDITION
            if isinstance(error, JoinError) and error.given_up:
                code = grpc.StatusCode.ABORTED
            raise Refusal(code, str(error)) from None

    return handle


class ControlClient:
    """Client of the control server at an address; thread-safe.

    `name` is that of the server, for errors: `worker 'ps0'`. Raises JoinError for an
    address that requires TLS, if there is none.
    """

    def __init__(self, name: str, address: Address, *, tls: Tls | None = None) -> None:
        if tls is None:
            hold_to_loopback(address, "is asked")
        self.name = name
        self.address = address
        self._tls = tls
        self.channel = channel_to(address, tls)

    def __str__(self) -> str:
        return f"{self.name} at {self.address}"

    def ask(self, request: Request, *, timeout_s: float = ASK_S) -> dict[str, Any]:
        """Return the answer as an unchecked dict; raises as `learn`."""
        return self.learn(request, dict[str, Any], timeout_s=timeout_s)

    def learn(
        self, request: Request, kind: type[Kind], *, timeout_s: float = ASK_S
    ) -> Kind:
        """Return the answer, decoded as `kind`.

        Raises:
            JoinError: the request was refused, timed out (see `reached`), or was
                answered by something else.
        """
        asked = type(request).__name__
        call = self.channel.unary_unary(f"/{_SERVICE}/{asked}")
        body = msgspec.json.encode(request)
        metadata = ((PROOF, proof_of(request.key)), (VERSION, str(PROTOCOL)))
        try:
            answer: bytes = call(body, timeout=timeout_s, metadata=metadata)
            return msgspec.json.decode(answer, type=kind)
        except grpc.RpcError as error:
            raise self._refusal(asked, error, timeout_s) from None
        except _MALFORMED as error:
            said = f"{self} answered what cannot be used: {kind.__name__}: {error}"
            raise JoinError(said) from None

    def close(self) -> None:
        """Close the connection."""
        self.channel.close()

    def _refusal(self, asked: str, error: Any, timeout_s: float) -> JoinError:
        code, details = error.code(), " ".join((error.details() or "").split())
        match code:
            case grpc.StatusCode.FAILED_PRECONDITION | grpc.StatusCode.ABORTED:
                given_up = code is grpc.StatusCode.ABORTED
                return JoinError(details, given_up=given_up)
            case grpc.StatusCode.UNAVAILABLE:
                why = why_not(self.address, self._tls) or details
                absent = why == os.strerror(errno.ECONNREFUSED)
                said = f"cannot reach {self}: {why}"
                return JoinError(said, reached=False, absent=absent)
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                said = f"{self} did not answer {asked} within {timeout_s:g} s"
                return JoinError(said, reached=False)
        busy = code is grpc.StatusCode.RESOURCE_EXHAUSTED
        said = f"{self} refused {asked}: {code.name}: {details}"
        return JoinError(said, reached=not busy)


def channel_to(address: Address, tls: Tls | None) -> grpc.Channel:
    """Return a channel to an address, with mutual TLS where there are certificates."""
    if tls is None:
        return grpc.insecure_channel(str(address), options=_CLIENT_OPTIONS)
    credentials = tls.channel_credentials()
    return grpc.secure_channel(str(address), credentials, options=_CLIENT_OPTIONS)


def why_not(address: Address, tls: Tls | None) -> str | None:
    """Probe why an address cannot be reached; None if no reason is found."""
    context = _TRUSTING if tls is None else tls.dialling
    try:
        with socket.create_connection(address[:2], _PROBE_S) as tried:
            family, found = tried.family, tried.getpeername()
        # Wrapped after its peer has gone, a connected socket would stay open.
        fresh = socket.socket(family)
        with context.wrap_socket(fresh, server_hostname=address.host) as secured:
            secured.settimeout(_PROBE_S)
            secured.connect(found)
            if tls is None:
                return f"it uses TLS and this process does not; {_BOTH}"
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
        if tls is None:
            return "it closes the connection; perhaps it stops"
        if error.reason == "WRONG_VERSION_NUMBER":
            return f"it does not use TLS and this process does; {_BOTH}"
        why = error.reason or str(error)
        return f"TLS refused: {str(why).lower().replace('_', ' ')}"
    except OSError as error:
        return reason(error)
