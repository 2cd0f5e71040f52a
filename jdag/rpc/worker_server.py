"""A worker process's side of sessions: it serves one caller after the other.

Inputs: requests, on threads of the control server, and data connections; `stop`.
Outputs: answers, and a node for each session, which runs on the thread that calls
    `serve`. `jdag.rpc.membership.LEASE` has the states of the process.
Invariants: there is a lease exactly while a caller holds the worker; another caller is
    told who does. Before `serve` waits for the next session, the listener, tickets,
    routes and node of the former one are closed. No secret is ever in an answer, an
    error or a log.
"""

import gc
import hmac
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jdag.engine.protocol import incarnated
from jdag.errors import JoinError
from jdag.rpc.control import Answers
from jdag.rpc.dialling import Lookout, Routes
from jdag.rpc.handshake import refuse_mismatch
from jdag.rpc.listener import Admission, Listener
from jdag.rpc.membership import HELD, IDLE, LEASE, STOPPING, Membership, after
from jdag.rpc.node import MakeNode
from jdag.rpc.peer_identity import Names, check_identity
from jdag.rpc.requests import (
    AttachWorker,
    Detach,
    Drain,
    Health,
    Info,
    Mesh,
    Peer,
    Ticket,
    Whereabouts,
)
from jdag.rpc.session_info import SessionInfo
from jdag.rpc.streams import Stream
from jdag.rpc.tickets import Tickets, proof_of
from jdag.rpc.tls import Tls

ENDING_S = 5.0
_SECOND_NS = 1_000_000_000
_SHOWN_MAX = 300

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerConfig:
    """A worker process in all of its sessions; see `jdag.rpc.worker.WorkerOptions`.

    `data` is the address of its listener, and `handshake` what it says of itself.
    """

    worker: str
    token: str = field(repr=False)
    allow: tuple[str, ...]
    handshake: Mapping[str, Any]
    make_node: MakeNode
    data: str
    tls: Tls | None = None
    hosts: Mapping[str, str] = field(default_factory=dict)
    once: bool = False


class CallerLease:
    """One session of a worker process, which its caller (`main`) holds meanwhile."""

    def __init__(self, config: WorkerConfig, asked: AttachWorker) -> None:
        self.asked = asked
        self.main = asked.main
        self.worker = config.worker
        self.incarnation = asked.incarnations[config.worker]
        # Those that this process and each other one share.
        self.secrets = {**asked.secrets, asked.main: asked.secret}
        self.members = Membership(config.worker, asked.workers)
        for name, incarnation in asked.incarnations.items():
            if name != config.worker:
                self.members.attach(name, incarnation)
        self.tickets = Tickets()
        self.ended = threading.Event()
        self._hosts = config.hosts
        self._began_ns = time.monotonic_ns()
        self._main_came = threading.Event()
        self._lock = threading.Lock()
        self.routes = Routes(
            config.worker,
            self.incarnation,
            self.secrets,
            tls=config.tls,
            timeout_s=asked.deadline_s,
        )
        self.lookout = Lookout(asked, self.routes)
        self.info = SessionInfo(
            worker=config.worker,
            workers=asked.workers,
            main=asked.main,
            incarnations={
                config.worker: self.incarnation,
                **self.members.incarnations,
            },
            allowed={asked.main: asked.allow, config.worker: config.allow},
            deadline_s=asked.deadline_s,
            dial=self.routes.dial,
            gone=lambda peer, why: _log.info("%s is gone: %s", peer, why),
            look=self.lookout.look,
            watched=asked.watched,
            nesting_max=asked.nesting_max,
        )
        self.node = config.make_node(self.info)
        self.node.joined(asked.main, asked.incarnations[asked.main])
        try:
            self.listener = Listener(
                config.data, tls=config.tls, admit=self._admit, take=self._take
            )
        except BaseException:
            self.node.close()
            raise

    @property
    def holder(self) -> str:
        """The process that holds the worker, and for how long."""
        handshake = self.asked.handshake
        where = f"process {handshake.get('pid')} on {handshake.get('host')}"
        held_s = (time.monotonic_ns() - self._began_ns) // _SECOND_NS
        return f"main {self.main!r} ({where}, for {held_s} s)"[:_SHOWN_MAX]

    def serve(self) -> None:
        """Run the node until the session has ended, then close everything."""
        watch = threading.Timer(self.asked.deadline_s, self.end_unless_main_came)
        watch.daemon = True
        watch.start()
        threading.Thread(target=self.lookout.find, daemon=True).start()
        try:
            self.node.run()
        finally:
            watch.cancel()
            self.listener.close()
            self.node.close()
            self.routes.close()

    def end_unless_main_came(self) -> None:
        """End a session whose main has never connected."""
        if not self._main_came.is_set():
            _log.warning("main %r attached and never connected", self.main)
            self.node.close()

    def issue(self, asked: Ticket) -> bytes:
        """Return a ticket for a worker of the session."""
        with self._lock:
            known = self.members.incarnations.get(asked.worker)
            if asked.incarnation != known:  # A former one had another secret.
                self.members.admit(asked.worker, asked.incarnation)
            self.check_secret(asked.secret, asked.worker)
            self._refuse_gone(asked.worker, asked.incarnation)
        return self.tickets.issue(asked.worker, asked.incarnation)

    def _admit(self, ticket: bytes, names: Names) -> Admission | None:
        found = self.tickets.redeem(ticket)
        if found is None:
            return None
        worker, incarnation = found
        check_identity(names, worker, self._hosts.get(worker))
        with self._lock:
            self._refuse_gone(worker, incarnation)
        return Admission(worker, incarnation, self.node.received(worker))

    def _refuse_gone(self, worker: str, incarnation: int) -> None:
        self.members.admit(worker, incarnation)
        why = self.node.loss(incarnated(worker, incarnation))
        if why is not None:
            said = f"worker {self.worker!r} has given {worker!r} up: {why}"
            raise JoinError(said, given_up=True)

    def _take(self, admitted: Admission, stream: Stream, received: int) -> None:
        if admitted.worker == self.main:
            self._main_came.set()
        self.node.adopt(admitted.worker, admitted.incarnation, stream, received)

    def knows(self, secret: str, peer: str) -> bool:
        """Whether this is the secret that this process and another share."""
        known = self.secrets.get(peer, "")
        return bool(known) and hmac.compare_digest(known.encode(), secret.encode())

    def check_secret(self, secret: str, peer: str) -> None:
        """Refuse a secret that is not that of this process and another."""
        self.members.check(peer)
        if not self.knows(secret, peer):
            raise JoinError(
                f"worker {self.worker!r} refused: the secret is not that of {peer!r} in"
                f" its session with {self.main!r}"
            )

    def announce(self, peer: str, whereabouts: Whereabouts) -> None:
        """Take note of the process of a worker, or of a newer one."""
        with self._lock:
            self.members.attach(peer, whereabouts.incarnation)
            self.info.incarnations[peer] = whereabouts.incarnation
            self.info.allowed[peer] = whereabouts.allow
        self.routes.know(peer, whereabouts)
        self.node.joined(peer, whereabouts.incarnation)


class WorkerServer:
    """What a worker process answers, and its sessions one after the other.

    Attributes:
        answers: for each class of request; see `jdag.rpc.control`.
        asked_to_stop: whether somebody wants it to stop.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._changed = threading.Condition()
        # One session is begun or ended at a time.
        self._turn = threading.Lock()
        self._state = IDLE
        self._lease: CallerLease | None = None
        self.asked_to_stop = False
        self._sessions = 0
        self.answers: Answers = {
            AttachWorker: self._attach,
            Mesh: self._mesh,
            Peer: self._peer,
            Ticket: lambda asked: {"ticket": self._held().issue(asked).hex()},
            Detach: self._detach,
            Drain: self._drain,
            Info: self._info,
            Health: self._health,
        }

    def knows(self, proof: str) -> bool:
        """Whether this proves the secret of the cluster, or one of the session."""
        lease = self._lease
        secrets = [self._config.token, *(lease.secrets.values() if lease else ())]
        proofs = [proof_of(secret).encode() for secret in secrets if secret]
        shown = proof.encode(errors="replace")
        return any([hmac.compare_digest(shown, one) for one in proofs])

    def serve(self) -> None:
        """Serve session after session until `stop`, or one alone if `once`."""
        while (lease := self._next()) is not None:
            try:
                lease.serve()
            finally:
                with self._changed:
                    self._lease = None
                    self._sessions += 1
                    self._apply("end")
                    if self._config.once:
                        self._apply("stop")
                lease.ended.set()
            del lease
            gc.collect()  # What the session held is let go of now.

    def _next(self) -> CallerLease | None:
        with self._changed:
            self._changed.wait_for(lambda: self._lease or self._state == STOPPING)
            return self._lease

    def _apply(self, event: str) -> None:
        subject = f"worker {self._config.worker!r}"
        self._state = after(LEASE, subject, self._state, event)
        self._changed.notify_all()

    def stop(self) -> None:
        """Finish what is under way, then let `serve` return."""
        with self._changed:
            self.asked_to_stop = True
            self._apply("stop")
            lease = self._lease
        if lease is not None:
            lease.node.drain()

    def enter(self, stream: Stream) -> None:
        """Hand a stream of the control server to the session, if there is one."""
        lease = self._lease
        if lease is None:
            stream.close()
        else:
            lease.listener.enter(stream)

    def _attach(self, asked: AttachWorker) -> Mapping[str, Any]:
        config = self._config
        name = f"worker {config.worker!r}"
        self._check_token(asked.token)
        if asked.worker != config.worker:
            raise JoinError(f"this is {name}, not {asked.worker!r}")
        _check_names(asked)
        mine, main = config.handshake, f"main {asked.main!r}"
        refuse_mismatch(asked.handshake, mine, main, name)
        with self._turn:
            self._end_former(asked)
            lease = CallerLease(config, asked)
            try:
                with self._changed:
                    self._apply("attach")  # It may have been asked to stop meanwhile.
                    self._lease = lease
            except JoinError:
                lease.listener.close()
                lease.node.close()
                raise
        return {
            "worker": config.worker,
            "data": lease.listener.address,
            "allow": config.allow,
            "handshake": config.handshake,
        }

    def _end_former(self, asked: AttachWorker) -> None:
        """End a session that this main has left; refuse if another one goes on."""
        with self._changed:
            lease = self._lease
            if self._state == STOPPING:
                self._apply("attach")  # Raises.
        if lease is None:
            return
        is_newer = asked.incarnations[asked.worker] > lease.incarnation
        is_same = lease.knows(asked.secret, lease.main)
        if not (is_same and is_newer) and not _is_dead(
            lease.asked, self._config.handshake
        ):
            raise JoinError(
                f"worker {lease.worker!r} is {HELD} by {lease.holder}; it is free when "
                "that session has ended"
            )
        self._end(lease)

    def _end(self, lease: CallerLease) -> None:
        """End a session, and wait until it has."""
        lease.node.close()
        if not lease.ended.wait(ENDING_S):
            raise JoinError(
                f"worker {lease.worker!r} has not left the session of {lease.main!r} "
                f"within {ENDING_S:g} s; what it computes has to end, or the process "
                "has to be stopped"
            )

    def _mesh(self, asked: Mesh) -> Mapping[str, Any]:
        """Announce the others, and dial some of them."""
        lease = self._held_by(asked.secret)
        for peer, whereabouts in asked.peers.items():
            lease.announce(peer, whereabouts)
            lease.info.dials.pop(peer, None)
        for peer in asked.dial:
            if peer not in asked.peers:
                raise JoinError(f"{peer!r} is to be dialled, and not said to be there")
            lease.info.dials[peer] = True
            lease.routes.connect(lease.node, peer)
        return {}

    def _peer(self, asked: Peer) -> Mapping[str, Any]:
        """Announce a new incarnation of a worker, which will dial."""
        lease = self._held_by(asked.secret)
        lease.announce(asked.worker, asked.whereabouts)
        lease.info.dials.pop(asked.worker, None)
        lease.secrets[asked.worker] = asked.shared
        return {}

    def _detach(self, asked: Detach) -> Mapping[str, Any]:
        """End the session, if it is still that one."""
        lease = self._lease
        if lease is None or not lease.knows(asked.secret, lease.main):
            return {"ended": False}
        self._end(lease)
        return {"ended": True}

    def _drain(self, asked: Drain) -> Mapping[str, Any]:
        self._check_token(asked.token)
        threading.Thread(target=self.stop, name="drain", daemon=True).start()
        return {}

    def _info(self, asked: Info) -> Mapping[str, Any]:
        self._check_token(asked.token)
        with self._changed:
            lease, sessions = self._lease, self._sessions
        return {
            **self._health(Health()),
            "main": None if lease is None else lease.main,
            "incarnation": None if lease is None else lease.incarnation,
            "workers": [] if lease is None else list(lease.asked.workers),
            "sessions": sessions,
            "allow": self._config.allow,
            "handshake": self._config.handshake,
        }

    def _health(self, asked: Health) -> Mapping[str, Any]:
        worker = self._config.worker
        return {"worker": worker, "state": self._state, "pid": os.getpid()}

    def _check_token(self, token: str) -> None:
        if not hmac.compare_digest(token.encode(), self._config.token.encode()):
            name = self._config.worker
            what = "the token is wrong" if token else "it wants a token, and none came"
            raise JoinError(
                f"worker {name!r} refused: {what}; token_file, or else the .token "
                "beside the cluster's file, has to hold the same secret on both sides"
            )

    def _held(self) -> CallerLease:
        lease = self._lease
        if lease is None:
            raise JoinError(f"worker {self._config.worker!r} is in no session")
        return lease

    def _held_by(self, secret: str) -> CallerLease:
        """Return the lease, if this is the secret of its main."""
        lease = self._held()
        lease.check_secret(secret, lease.main)
        return lease


def _check_names(asked: AttachWorker) -> None:
    for name in (asked.main, asked.worker):
        if asked.workers.count(name) != 1 or name not in asked.incarnations:
            raise JoinError(f"{name!r} has to be once among the workers of the session")
    for name in asked.incarnations:
        if name not in asked.workers:
            raise JoinError(f"{name!r} has an incarnation and is no worker")


def _is_dead(asked: AttachWorker, own: Mapping[str, Any]) -> bool:
    """Whether the holding process ran on this host and has ended.

    So that a crashed program that is started again need not wait for the deadline.
    """
    pid = asked.handshake.get("pid")
    same = asked.handshake.get("boot") == own.get("boot")
    if not same or type(pid) is not int or not 0 < pid < 1 << 31:
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False
