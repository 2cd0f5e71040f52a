"""A worker process's side of sessions: it serves one caller after the other.

Each session has a node, which runs on the thread that calls `serve`;
`jdag.processes.session.membership.LEASE` has the states of the process.
Invariants: there is a lease exactly while a caller holds the worker; another caller is
    told which one does. Before `serve` waits for the next session, the listener and
    the node of the former one are closed. No answer, error or log
    contains a secret.
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

ENDING_S = 5.0
_SHOWN_MAX = 300


class CallerLease:
    """One session of a worker process, held by its caller (`main`)."""

    def __init__(
        self,
        options: WorkerOptions,
        asked: AttachWorker,
        make_node: MakeNode,
        tls: Tls | None,
        helper: Helper | None,
    ) -> None:
        self.asked = asked
        settings = asked.session_settings()
        self.main = main = asked.main
        self.worker = worker = options.worker
        self.secret = asked.secret  # By it main is known.
        incarnation = asked.incarnations[worker]
        self.members = Membership(worker, settings.workers, incarnation)
        # By these this process and the others know each other, former ones too.
        self.secrets: dict[Worker, str] = {
            incarnated(name, asked.incarnations.get(name, 0)): secret
            for name, secret in {**asked.secrets, main: asked.secret}.items()
        }
        for name, number in asked.incarnations.items():
            if name != worker:
                self.members.attach(name, number)
        number = asked.incarnations[main]
        where = WorkerAddress(incarnation=number, data="", allow=asked.allow)
        self.members.attach(main, where.incarnation, where)
        self.ended = threading.Event()
        self._hosts = options.hosts
        self._began_s = time.monotonic()
        self.routes = Routes(
            self.members, self._secret_of, tls=tls, timeout_s=settings.deadline_s
        )
        self._lookout = MainLiveness(
            main, asked.control, asked.handshake.get("pid"), tls
        )
        self.node = make_node(
            SessionInfo(
                worker=worker,
                main=main,
                settings=settings,
                members=self.members,
                dial=self.routes.dial,
                look=self._lookout.look,
                watched=asked.watched,
                program=asked.program,
                helper=helper,
            )
        )
        self.node.joined(main, where.incarnation)
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
        """The process that holds the worker, and for how long."""
        handshake, held_s = self.asked.handshake, time.monotonic() - self._began_s
        where = f"process {handshake.get('pid')} on {handshake.get('host')}"
        return f"main {self.main!r} ({where}, for {held_s:.0f} s)"[:_SHOWN_MAX]

    def serve(self) -> None:
        """Run the node until the session has ended, then close everything.

        It ends also if main does not connect within the deadline.
        """
        threading.Thread(target=self._lookout.find, daemon=True).start()
        try:
            self.node.run()
        finally:
            self.listener.close()
            self.node.close()

    def _secret_of(self, peer: str) -> str:
        peer_now = incarnated(peer, self.members[peer].incarnation)
        return self.secrets.get(peer_now, "")

    def _pairs(self) -> list[ConnectionPair]:
        here = incarnated(self.worker, self.members.incarnation)
        known = tuple(self.secrets.items())  # At once: others may join meanwhile.
        return [ConnectionPair(one, here, secret) for one, secret in known]

    def _admit(self, worker: Worker, names: Names) -> int:
        name = named(worker)
        check_identity(names, name, self._hosts.get(name))
        self.members.admit(name, incarnation_of(worker))
        return self.node.received(name)

    def _take(self, worker: Worker, stream: Stream, received: int) -> None:
        name, number = named(worker), incarnation_of(worker)
        self.node.adopt(name, number, stream, received)

    def is_main(self, secret: str) -> bool:
        """Whether this is the secret shared with main."""
        return hmac.compare_digest(self.secret.encode(), secret.encode())

    def _announce(self, name: str, where: WorkerAddress, *, is_dialled: bool) -> None:
        number = where.incarnation
        self.members.attach(name, number, where, is_dialled=is_dialled)
        self.node.joined(name, number)

    def mesh(self, asked: Mesh) -> Mapping[str, Any]:
        """Register the other workers, and dial some of them."""
        for name, where in asked.peers.items():
            self._announce(name, where, is_dialled=name in asked.dial)
        for name in asked.dial:
            if name not in asked.peers:
                raise JoinError(f"{name!r} is to be dialled, and not said to be there")
            self.routes.connect(self.node, name)
        return {}

    def peer(self, asked: Peer) -> Mapping[str, Any]:
        """Register a new incarnation of a worker, which will dial."""
        number = asked.whereabouts.incarnation
        self.secrets[incarnated(asked.worker, number)] = asked.shared
        self._announce(asked.worker, asked.whereabouts, is_dialled=False)
        return {}


class WorkerServer:
    """The control server's `answers`, and the sessions of a worker process."""

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
        # One session is begun or ended at a time.
        self._turn = threading.Lock()
        self._state = IDLE
        self._lease: CallerLease | None = None
        self.asked_to_stop = False
        self.answers: Answers = {
            AttachWorker: self._attach,
            Mesh: lambda asked: self._held_by(asked.secret).mesh(asked),
            Peer: lambda asked: self._held_by(asked.secret).peer(asked),
            Detach: self._detach,
            Info: self._info,
            Health: self._health,
        }

    def knows(self, proof: str) -> bool:
        """Whether this proves the secret of the cluster, or that of main."""
        lease = self._lease
        secrets = [self._options.token, lease.secret if lease else ""]
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
                    self._apply("end")
                    if self._options.once:
                        self._apply("stop")
                lease.ended.set()
            del lease
            gc.collect()  # What the session held is let go of now.

    def _next(self) -> CallerLease | None:
        with self._changed:
            self._changed.wait_for(lambda: self._lease or self._state == STOPPING)
            return self._lease

    def _apply(self, event: str) -> None:
        self._state = after(LEASE, self._name, self._state, event)
        self._changed.notify_all()

    def stop(self) -> None:
        """Finish what is under way, then let `serve` return."""
        with self._changed:
            self.asked_to_stop = True
            self._apply("stop")
            lease = self._lease
        if lease is not None:
            lease.node.drain()

    def _attach(self, asked: AttachWorker) -> Mapping[str, Any]:
        worker = self._options.worker
        self._check_token(asked.token)
        if asked.worker != worker:
            raise JoinError(f"this is {self._name}, not {asked.worker!r}")
        _check_names(asked)
        main = f"main {asked.main!r}"
        refuse_mismatch(asked.handshake, self._handshake, main, self._name)
        with self._turn:
            self._end_former(asked)
            lease = self._lease_to(asked)
            try:
                with self._changed:
                    self._apply("attach")  # It may have been asked to stop meanwhile.
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

    def _end_former(self, asked: AttachWorker) -> None:
        """End a session that this main has left; refuse if another one goes on."""
        with self._changed:
            lease = self._lease
            if self._state == STOPPING:
                self._apply("attach")  # Raises.
        if lease is None:
            return
        is_newer = asked.incarnations[asked.worker] > lease.members.incarnation
        is_same = lease.is_main(asked.secret)
        is_left = is_same and is_newer
        if not is_left and not _is_dead(lease.asked.handshake, self._handshake):
            raise JoinError(
                f"{self._name} is {HELD} by {lease.holder}; it is free when that "
                "session has ended"
            )
        self._end(lease)

    def _end(self, lease: CallerLease) -> None:
        lease.node.close()
        if not lease.ended.wait(ENDING_S):
            raise JoinError(
                f"{self._name} has not left the session of {lease.main!r} within "
                f"{ENDING_S:g} s; what it computes has to end, or the process has to "
                "be stopped"
            )

    def _detach(self, asked: Detach) -> Mapping[str, Any]:
        lease = self._lease
        if lease is None or not lease.is_main(asked.secret):
            return {"ended": False}
        self._end(lease)
        return {"ended": True}

    def _info(self, asked: Info) -> Mapping[str, Any]:
        self._check_token(asked.token)
        lease = self._lease
        return {
            **self._health(Health()),
            "main": lease and lease.main,
            "incarnation": lease and lease.members.incarnation,
            "handshake": self._handshake,
        }

    def _health(self, asked: Health) -> Mapping[str, Any]:
        worker = self._options.worker
        return {"worker": worker, "state": self._state, "pid": os.getpid()}

    def _check_token(self, token: str) -> None:
        if not hmac.compare_digest(token.encode(), self._options.token.encode()):
            what = "the token is wrong" if token else "it wants a token, and none came"
            raise JoinError(
                f"{self._name} refused: {what}; token_file, or else the .token beside "
                "the cluster's file, has to hold the same secret on both sides"
            )

    def _held_by(self, secret: str) -> CallerLease:
        lease = self._lease
        if lease is None:
            raise JoinError(f"{self._name} is in no session")
        if not lease.is_main(secret):
            raise JoinError(
                f"{self._name} refused: the secret is not that of {lease.main!r} in "
                "this session"
            )
        return lease


def _check_names(asked: AttachWorker) -> None:
    workers = asked.session_settings().workers
    for name in (asked.main, asked.worker):
        if workers.count(name) != 1 or name not in asked.incarnations:
            raise JoinError(f"{name!r} has to be once among the workers of the session")
    for name in asked.incarnations:
        if name not in workers:
            raise JoinError(f"{name!r} has an incarnation and is no worker")


def _is_dead(holder: Handshake, own: Handshake) -> bool:
    # Then a crashed program can be restarted without waiting for the deadline.
    pid = holder.get("pid")
    is_here = holder.get("boot") == own.get("boot")
    if not is_here or type(pid) is not int or not 0 < pid < 1 << 31:
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False
