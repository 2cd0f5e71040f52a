"""The worker's side of sessions: one caller (main) after another.

Each session has a node, which runs on the thread that calls `serve`. The states of the
process are in the table `jdag.processes.session.membership.LEASE`.
Invariants: a lease exists exactly while a main program holds the worker. The error for
    another caller names the holder. The listener and the node of a session are closed
    before `serve` waits for the next session. No answer, error or log contains a
    secret.
"""

import gc
import hmac
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jdag.engine.protocol import Worker, incarnated, incarnation_of, named
from jdag.errors import JoinError
from jdag.processes.launch.dialling import MainLiveness, Routes
from jdag.processes.net.greeting import ConnectionPair
from jdag.processes.net.handshake import Handshake, refuse_mismatch
from jdag.processes.net.listener import Listener
from jdag.processes.net.peer_identity import Names, check_identity
from jdag.processes.net.pulse import Helper
from jdag.processes.net.shared_secrets import proof_of
from jdag.processes.net.streams import Stream
from jdag.processes.net.tls import Tls
from jdag.processes.node import MakeNode
from jdag.processes.session.cluster_file import WorkerOptions
from jdag.processes.session.control import Answers
from jdag.processes.session.membership import (
    HELD,
    IDLE,
    LEASE,
    STOPPING,
    Membership,
    after,
)
from jdag.processes.session.requests import (
    AttachWorker,
    Detach,
    Health,
    Info,
    Mesh,
    Peer,
    WorkerAddress,
)
from jdag.processes.session.session_info import SessionInfo

SESSION_END_S = 5.0
_SHOWN_MAX = 300


class CallerLease:
    """One session of a worker process, in which a main program holds the worker."""

    def __init__(
        self,
        options: WorkerOptions,
        request: AttachWorker,
        make_node: MakeNode,
        tls: Tls | None,
        helper: Helper | None,
    ) -> None:
        self.request = request
        settings = request.session_settings()
        self.main = main = request.main
        self.worker = worker = options.worker
        self.secret = request.secret  # Authenticates main.
        incarnation = request.incarnations[worker]
        self.members = Membership(worker, settings.workers, incarnation)
        # Secrets shared with each incarnation of a peer, including former ones.
        self.secrets: dict[Worker, str] = {
            incarnated(name, request.incarnations.get(name, 0)): secret
            for name, secret in {**request.secrets, main: request.secret}.items()
        }
        for name, number in request.incarnations.items():
            if name != worker:
                self.members.attach(name, number)
        number = request.incarnations[main]
        address = WorkerAddress(incarnation=number, data="", allow=request.allow)
        self.members.attach(main, number, address)
        self.ended = threading.Event()
        self._hosts = options.hosts
        self._began_s = time.monotonic()
        self.routes = Routes(
            self.members, self._secret_of, tls=tls, timeout_s=settings.deadline_s
        )
        self._main_liveness = MainLiveness(
            main, request.control, request.handshake.get("pid"), tls
        )
        self.node = make_node(
            SessionInfo(
                worker=worker,
                main=main,
                settings=settings,
                members=self.members,
                dial=self.routes.dial,
                look=self._main_liveness.look,
                watched=request.watched,
                program=request.program,
                helper=helper,
            )
        )
        self.node.joined(main, number)
        try:
            self.listener = Listener(
                options.data,
                tls=tls,
                pairs=self._pairs,
                admit=self._admit,
                take=self._take,
            )
        except BaseException:
            self.node.close()
            raise

    @property
    def holder(self) -> str:
        handshake, held_s = self.request.handshake, time.monotonic() - self._began_s
        where = f"process {handshake.get('pid')} on {handshake.get('host')}"
        return f"main {self.main!r} ({where}, for {held_s:.0f} s)"[:_SHOWN_MAX]

    def serve(self) -> None:
        # The session also ends if main does not connect within the deadline.
        threading.Thread(target=self._main_liveness.find, daemon=True).start()
        try:
            self.node.run()
        finally:
            self.listener.close()
            self.node.close()

    def _secret_of(self, peer: str) -> str:
        incarnation = incarnated(peer, self.members[peer].incarnation)
        return self.secrets.get(incarnation, "")

    def _pairs(self) -> list[ConnectionPair]:
        own_incarnation = incarnated(self.worker, self.members.incarnation)
        secrets = tuple(self.secrets.items())  # Copied: other threads add secrets.
        return [ConnectionPair(peer, own_incarnation, s) for peer, s in secrets]

    def _admit(self, worker: Worker, names: Names) -> int:
        name = named(worker)
        check_identity(names, name, self._hosts.get(name))
        self.members.admit(name, incarnation_of(worker))
        return self.node.received(name)

    def _take(self, worker: Worker, stream: Stream, received: int) -> None:
        name, number = named(worker), incarnation_of(worker)
        self.node.adopt(name, number, stream, received)

    def is_main(self, secret: str) -> bool:
        return hmac.compare_digest(self.secret.encode(), secret.encode())

    def _add_peer(self, name: str, address: WorkerAddress, *, is_dialled: bool) -> None:
        number = address.incarnation
        self.members.attach(name, number, address, is_dialled=is_dialled)
        self.node.joined(name, number)

    def mesh(self, request: Mesh) -> Mapping[str, Any]:
        for name, address in request.peers.items():
            self._add_peer(name, address, is_dialled=name in request.dial)
        for name in request.dial:
            if name not in request.peers:
                raise JoinError(f"the request to dial {name!r} lacks an address for it")
            self.routes.connect(self.node, name)
        return {}

    def peer(self, request: Peer) -> Mapping[str, Any]:
        """Register a new incarnation of a worker, which will connect to this worker."""
        number = request.whereabouts.incarnation
        self.secrets[incarnated(request.worker, number)] = request.shared
        self._add_peer(request.worker, request.whereabouts, is_dialled=False)
        return {}


class WorkerServer:
    """Answers the control requests of a worker process, and serves its sessions."""

    def __init__(
        self,
        options: WorkerOptions,
        handshake: Handshake,
        make_node: MakeNode,
        tls: Tls | None = None,
        helper: Helper | None = None,
    ) -> None:
        self._options = options
        self._name = f"worker {options.worker!r}"
        self._handshake = handshake
        self._lease_to: Callable[[AttachWorker], CallerLease] = partial(
            CallerLease, options, make_node=make_node, tls=tls, helper=helper
        )
        self._changed = threading.Condition()
        self._attach_lock = threading.Lock()  # One session begins or ends at a time.
        self._state = IDLE
        self._lease: CallerLease | None = None
        self.is_stop_requested = False
        self.answers: Answers = {
            AttachWorker: self._attach,
            Mesh: lambda request: self._lease_of(request.secret).mesh(request),
            Peer: lambda request: self._lease_of(request.secret).peer(request),
            Detach: self._detach,
            Info: self._info,
            Health: self._health,
        }

    def knows(self, proof: str) -> bool:
        lease = self._lease
        secrets = [self._options.token, lease.secret if lease else ""]
        proofs = [proof_of(secret).encode() for secret in secrets if secret]
        shown = proof.encode(errors="replace")
        return any([hmac.compare_digest(shown, expected) for expected in proofs])

    def serve(self) -> None:
        while (lease := self._next()) is not None:
            try:
                lease.serve()
            finally:
                with self._changed:
                    self._lease = None
                    self._apply("end")
                    if self._options.once:
                        self._apply("stop")
                lease.ended.set()
            del lease
            gc.collect()  # Release the memory of the ended session now.

    def _next(self) -> CallerLease | None:
        with self._changed:
            self._changed.wait_for(lambda: self._lease or self._state == STOPPING)
            return self._lease

    def _apply(self, event: str) -> None:
        self._state = after(LEASE, self._name, self._state, event)
        self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self.is_stop_requested = True
            self._apply("stop")
            lease = self._lease
        if lease is not None:
            lease.node.drain()

    def _attach(self, request: AttachWorker) -> Mapping[str, Any]:
        worker = self._options.worker
        self._check_token(request.token)
        if request.worker != worker:
            raise JoinError(
                f"the process at this address is {self._name}, not {request.worker!r}"
            )
        _check_names(request)
        main = f"main {request.main!r}"
        refuse_mismatch(request.handshake, self._handshake, main, self._name)
        with self._attach_lock:
            self._end_former(request)
            lease = self._lease_to(request)
            try:
                with self._changed:
                    self._apply("attach")  # Raises if a stop was requested meanwhile.
                    self._lease = lease
            except JoinError:
                lease.listener.close()
                lease.node.close()
                raise
        return {
            "worker": worker,
            "data": lease.listener.address,
            "allow": self._options.allow,
            "handshake": self._handshake,
        }

    def _end_former(self, request: AttachWorker) -> None:
        """End an abandoned session. Raise JoinError if the session is in use."""
        with self._changed:
            lease = self._lease
            if self._state == STOPPING:
                self._apply("attach")  # Raises JoinError.
        if lease is None:
            return
        is_newer = request.incarnations[request.worker] > lease.members.incarnation
        is_abandoned = is_newer and lease.is_main(request.secret)
        if not is_abandoned and not _is_dead(lease.request.handshake, self._handshake):
            raise JoinError(
                f"{self._name} is {HELD} by {lease.holder}; wait until that session "
                "has ended"
            )
        self._end(lease)

    def _end(self, lease: CallerLease) -> None:
        lease.node.close()
        if not lease.ended.wait(SESSION_END_S):
            raise JoinError(
                f"{self._name} did not leave the session of {lease.main!r} within "
                f"{SESSION_END_S:g} s; wait until its computation has ended, or stop "
                "the worker process"
            )

    def _detach(self, request: Detach) -> Mapping[str, Any]:
        lease = self._lease
        if lease is None or not lease.is_main(request.secret):
            return {"ended": False}
        self._end(lease)
        return {"ended": True}

    def _info(self, request: Info) -> Mapping[str, Any]:
        self._check_token(request.token)
        lease = self._lease
        return {
            **self._health(Health()),
            "main": lease and lease.main,
            "incarnation": lease and lease.members.incarnation,
            "handshake": self._handshake,
        }

    def _health(self, request: Health) -> Mapping[str, Any]:
        worker = self._options.worker
        return {"worker": worker, "state": self._state, "pid": os.getpid()}

    def _check_token(self, token: str) -> None:
        if not hmac.compare_digest(token.encode(), self._options.token.encode()):
            reason = "the token is wrong" if token else "the request has no token"
            raise JoinError(
                f"{self._name} refused the request: {reason}; token_file, or else the "
                ".token file of the cluster file, must be the same on both sides"
            )

    def _lease_of(self, secret: str) -> CallerLease:
        lease = self._lease
        if lease is None:
            raise JoinError(f"{self._name} is in no session")
        if not lease.is_main(secret):
            raise JoinError(
                f"{self._name} refused the request: it does not contain the secret of "
                f"{lease.main!r}, which holds the worker"
            )
        return lease


def _check_names(request: AttachWorker) -> None:
    workers = request.session_settings().workers
    for name in (request.main, request.worker):
        if workers.count(name) != 1 or name not in request.incarnations:
            raise JoinError(
                f"{name!r} must appear exactly once in the workers of the session, and "
                "have an incarnation"
            )
    for name in request.incarnations:
        if name not in workers:
            raise JoinError(
                f"{name!r} has an incarnation, but is not a worker of the session"
            )


def _is_dead(holder: Handshake, worker: Handshake) -> bool:
    # Detect a crash of the holder, so that main can attach again before the deadline.
    pid = holder.get("pid")
    is_here = holder.get("boot") == worker.get("boot")
    if not is_here or type(pid) is not int or not 0 < pid < 1 << 31:
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False
