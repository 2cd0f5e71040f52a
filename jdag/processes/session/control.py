"""The control plane: a gRPC server in each worker process, and its client.

Inputs: calls whose metadata contain the caller's protocol version and a proof of a
secret. A call has one message, which is a request of `jdag.processes.session.requests`
in JSON. The rpc has the name of the request's class.

Outputs: replies in JSON, or a refusal. The client raises a one-line `JoinError` for a
refusal, an unreachable host or an untrusted certificate.

Invariants: without certificates, the server listens on loopback only. With
certificates, TLS is mutual. A call waits for its request on an asyncio loop, for at
most READ_S seconds, and uses no thread while it waits. Requests are answered on
ANSWERS_MAX threads. Authenticated callers may have CALLS_MAX calls at a time, which
wait for a thread. Other callers may have STRANGERS_MAX calls at a time, which use idle
threads only. Many anonymous calls therefore delay authenticated callers only while the
server reads their metadata.
"""

import asyncio
import errno
import json
import logging
import os
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

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
# Maximum numbers of concurrent calls of authenticated and of anonymous callers.
CALLS_MAX, STRANGERS_MAX = 256, 64
READ_S = 5.0
ASK_S = 10.0
PROOF, VERSION = "jdag-proof", "jdag-protocol"
_SERVICE = "jdag.Control"
# A context that accepts any certificate, to detect whether a server uses TLS.
_TRUSTING = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_TRUSTING.check_hostname, _TRUSTING.verify_mode = False, ssl.CERT_NONE
_PROBE_S = 2.0
_BOTH = "[tls] must be in the cluster file on both sides"

# Decoding errors. Their messages contain no values, since values may be secrets.
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

Answers = Mapping[type[Request], Callable[[Any], Mapping[str, Any]]]

_OPTIONS = (
    ("grpc.max_receive_message_length", BODY_BYTES_MAX + 64),
    ("grpc.max_send_message_length", BODY_BYTES_MAX + 64),
    ("grpc.max_metadata_size", 16 << 10),
    # Ignore web proxies that the environment configures.
    ("grpc.enable_http_proxy", 0),
)
_SERVER_OPTIONS = (
    *_OPTIONS,
    # Otherwise two processes could share a port, and each would get half of the calls.
    ("grpc.so_reuseport", 0),
)
_CLIENT_OPTIONS = (
    *_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)

_log = logging.getLogger(__name__)


class Refusal(Exception):
    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class ControlServer:
    """Answers requests at `address` until it is closed.

    With port 0 the system chooses a port. The attribute `address` has the actual port.

    Args:
        name: the name of this process in refusals, such as `worker 'ps0'`.
        answers: maps each class of requests to the function that answers them, on a
            thread. If the function raises a `JdagError`, the request is refused.
        hosts: maps workers to hosts. With TLS, a caller that claims to be a worker must
            present a certificate for the worker or its host.
        knows: returns whether a text proves a secret of this process.
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
            hold_to_loopback(address, "cannot listen at")
        try:
            bound(address).close()  # Raises a shorter error than gRPC would.
        except OSError as error:
            raise JoinError(f"cannot listen at {address}: {reason(error)}") from error
        self._name = name
        self._knows = knows
        self._under_way: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(ANSWERS_MAX, "control")
        methods = {
            kind.__name__: grpc.stream_unary_rpc_method_handler(
                partial(self._call, answering(kind, answer, hosts))
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
        wait_for(self._server.stop(grace_s))
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _counted(self, group: str, most: int) -> Iterator[None]:
        if self._under_way[group] >= most:
            text = f"the limit of {most} concurrent {group} is reached; try again"
            raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._under_way[group] += 1
        try:
            yield
        finally:
            self._under_way[group] -= 1

    async def _call(
        self,
        answer: Callable[[bytes, Names], bytes],
        messages: AsyncIterator[bytes],
        context: Any,
    ) -> Any:
        try:
            metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
            version = str(metadata.get(VERSION, ""))
            if version != str(PROTOCOL):
                text = protocols_differ(version, "this process", self._name)
                raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, text)
            is_known = self._knows(str(metadata.get(PROOF, "")))
            group, most = "unauthenticated calls", STRANGERS_MAX
            if is_known:
                group, most = "calls", CALLS_MAX
            with self._counted(group, most):
                body = await _body(messages)
                # Only calls of authenticated callers may wait for a thread.
                free = CALLS_MAX + STRANGERS_MAX if is_known else ANSWERS_MAX
                with self._counted("answers", free):
                    names = names_of(context.auth_context())
                    run = loop().run_in_executor
                    return await run(self._threads, answer, body, names)
        except Refusal as error:
            await context.abort(error.code, str(error)[:4096])


async def _body(messages: AsyncIterator[bytes]) -> bytes:
    try:
        async with asyncio.timeout(READ_S):
            async for message in messages:
                return message
    except TimeoutError:
        text = f"no request arrived within {READ_S:g} s"
        raise Refusal(grpc.StatusCode.CANCELLED, text) from None
    return b""


def answering(
    kind: type[Request],
    answer: Callable[[Any], Mapping[str, Any]],
    hosts: Mapping[str, str],
) -> Callable[[bytes, Names], bytes]:
    # The decoder is created here, because two threads that create the first decoder of
    # a class at the same time may crash.
    decode = msgspec.json.Decoder(kind).decode

    def handle(body: bytes, names: Names) -> bytes:
        try:
            request = decode(body)
            if isinstance(request, AttachWorker):
                check_identity(names, request.main, hosts.get(request.main))
            return json.dumps(answer(request)).encode()
        except _MALFORMED as error:
            text = f"{kind.__name__}: {error}"
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, text) from None
        except JdagError as error:
            code = grpc.StatusCode.FAILED_PRECONDITION
            if isinstance(error, JoinError) and error.given_up:
                code = grpc.StatusCode.ABORTED
            raise Refusal(code, str(error)) from None

    return handle


class ControlClient:
    """Client of a control server. Its errors contain `name`. Thread-safe."""

    def __init__(self, name: str, address: Address, *, tls: Tls | None = None) -> None:
        if tls is None:
            hold_to_loopback(address, "cannot dial")
        self.name = name
        self.address = address
        self._tls = tls
        self.channel = channel_to(address, tls)

    def __str__(self) -> str:
        return f"{self.name} at {self.address}"

    def ask(
        self, request: Request, kind: Any = dict[str, Any], *, timeout_s: float = ASK_S
    ) -> Any:
        """Send a request; return the reply, decoded as `kind`.

        Raises:
            JoinError: the request was refused or timed out (`JoinError.reached`
                distinguishes these), or the reply is invalid.
        """
        rpc = type(request).__name__
        call = self.channel.unary_unary(f"/{_SERVICE}/{rpc}")
        body = msgspec.json.encode(request)
        metadata = ((PROOF, proof_of(request.key)), (VERSION, str(PROTOCOL)))
        try:
            answer: bytes = call(body, timeout=timeout_s, metadata=metadata)
            return msgspec.json.decode(answer, type=kind)
        except grpc.RpcError as error:
            raise self._refusal(rpc, error, timeout_s) from None
        except _MALFORMED as error:
            text = f"{self} sent an invalid {kind.__name__} as its reply: {error}"
            raise JoinError(text) from None

    def close(self) -> None:
        self.channel.close()

    def _refusal(self, rpc: str, error: Any, timeout_s: float) -> JoinError:
        code, details = error.code(), " ".join((error.details() or "").split())
        match code:
            case grpc.StatusCode.FAILED_PRECONDITION | grpc.StatusCode.ABORTED:
                given_up = code is grpc.StatusCode.ABORTED
                return JoinError(details, given_up=given_up)
            case grpc.StatusCode.UNAVAILABLE:
                why = why_not(self.address, self._tls) or details
                absent = why == os.strerror(errno.ECONNREFUSED)
                text = f"cannot reach {self}: {why}"
                return JoinError(text, reached=False, absent=absent)
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                text = f"{self} did not answer {rpc} within {timeout_s:g} s"
                return JoinError(text, reached=False)
        busy = code is grpc.StatusCode.RESOURCE_EXHAUSTED
        text = f"{self} refused {rpc}: {code.name}: {details}"
        return JoinError(text, reached=not busy)


def channel_to(address: Address, tls: Tls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(str(address), options=_CLIENT_OPTIONS)
    credentials = tls.channel_credentials()
    return grpc.secure_channel(str(address), credentials, options=_CLIENT_OPTIONS)


def why_not(address: Address, tls: Tls | None) -> str | None:
    """Return why an address cannot be reached, or None if no reason is found."""
    context = _TRUSTING if tls is None else tls.dialling
    try:
        with socket.create_connection(address[:2], _PROBE_S) as tried:
            family, peer = tried.family, tried.getpeername()
        # Use a new socket: wrapping a connected socket leaks it if the peer has left.
        fresh = socket.socket(family)
        with context.wrap_socket(fresh, server_hostname=address.host) as secured:
            secured.settimeout(_PROBE_S)
            secured.connect(peer)
            if tls is None:
                return f"it uses TLS and this process does not; {_BOTH}"
            # If the server refuses our certificate, this call raises the error.
            secured.recv(1)
            return None
    except ssl.SSLCertVerificationError as error:
        why = error.verify_message.lower()
        return (
            f"TLS refused: {why}; its certificate must be for {address.host}, and be "
            "issued by an authority in the ca file of this process"
        )
    except ssl.SSLError as error:
        if tls is None:
            return "it closed the connection and may be stopping"
        if error.reason == "WRONG_VERSION_NUMBER":
            return f"it does not use TLS and this process does; {_BOTH}"
        why = error.reason or str(error)
        return f"TLS refused: {str(why).lower().replace('_', ' ')}"
    except OSError as error:
        return reason(error)
