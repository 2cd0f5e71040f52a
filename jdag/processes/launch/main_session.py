"""Main's side of a session: attach, connect, monitor and detach all workers.

Main attaches every worker, connects to every worker, and requests the connections
between workers. Then the main program runs. Main announces the loss of a worker to the
others. With `rejoin`, main polls the address of a lost worker. A new process at that
address joins as the next incarnation of the worker.

Invariants: only main numbers the incarnations of a worker: 0, 1, ... The other workers
receive the number and secret of a new incarnation before it connects to them. If the
session fails to start, all workers are detached.
"""

import atexit
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import asdict

from jdag.errors import JdagError, JoinError
from jdag.processes.launch.dialling import Routes
from jdag.processes.net.addresses import Address, host_towards
from jdag.processes.net.handshake import other_cpu, refuse_mismatch
from jdag.processes.net.pulse import helper_at
from jdag.processes.net.shared_secrets import fresh_secret, secret_between
from jdag.processes.net.tls import Tls
from jdag.processes.node import MakeNode
from jdag.processes.session.cluster_file import SessionSettings
from jdag.processes.session.control import ControlClient, ControlServer
from jdag.processes.session.membership import Membership
from jdag.processes.session.requests import (
    AttachWorker,
    Detach,
    Health,
    Info,
    Mesh,
    Peer,
    Request,
    ScheduleCsv,
    WorkerAddress,
    WorkerAttached,
)
from jdag.processes.session.session_info import SessionInfo
from jdag.schedules import to_csv

POLL_S = 1.0
REQUESTS_AT_ONCE_MAX = 16
_HEALTH_S = 2.0
_RETRY_S = 0.1
# Timeouts of a detach. The process of a launched worker is stopped afterwards.
_DETACH_S, _DETACH_LAUNCHED_S = 5.0, 1.0
_SECOND_NS = 1_000_000_000

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SessionPlan:
    """Settings of a session.

    Attributes:
        settings: the settings of all nodes; their list of workers includes main.
        controls: the control addresses of all workers except main.
        ready_s: total time to wait for workers that have not started.
        rejoin: whether a new process at the address of a lost worker may join.
        control: main's own address, bound during the session to reserve the name.
        watched, program: see `jdag.processes.session.session_info.SessionInfo`.
    """

    main: str
    settings: SessionSettings
    controls: Mapping[str, Address]
    handshake: Mapping[str, Any]
    make_node: MakeNode
    token: str = field(default="", repr=False)
    allow: tuple[str, ...] = ()
    ready_s: float = 0.0
    program: str = ""
    rejoin: bool = False
    watched: bool = False
    control: Address | None = None
    tls: Tls | None = None


class Session:
    """A context manager for a session that all workers have joined.

    `node` is the node of main. The parent of the worker processes calls `lost` when one
    of them ends. If the interpreter exits while the session is open, the session
    notifies its peers.

    Raises:
        JoinError: a worker is unreachable, refuses, or has an incompatible handshake.
            All workers are detached.
    """

    def __init__(self, plan: SessionPlan) -> None:
        self._plan = plan
        self._deadline_s = plan.settings.deadline_s
        self._process = os.getpid()
        self._moved: dict[str, Address] = {}  # New addresses of workers that rejoined.
        self._attached_at: dict[str, Address] = {}
        self._refused: dict[str, str] = {}  # Why a lost worker has not rejoined.
        # Replaces the process of a worker, given its name and a timeout in seconds.
        self.restart: Callable[[str, float], Address] | None = None
        self._secret = fresh_secret()
        # Main and a worker share one secret for all incarnations of the worker.
        self._secrets = {
            peer: secret_between(self._secret, plan.main, peer)
            for peer in plan.controls
        }
        self.members = Membership(plan.main, plan.settings.workers)
        self._routes = Routes(
            self.members,
            self._secrets.__getitem__,
            tls=plan.tls,
            timeout_s=self._deadline_s,
        )
        self._lock = threading.Lock()
        self._joining = threading.Lock()  # One worker rejoins at a time.
        self._closing = False
        self._stop_waiting = threading.Event()  # If set, waits for workers end.
        self._server: ControlServer | None = None
        self._requests = ThreadPoolExecutor(REQUESTS_AT_ONCE_MAX, "requests")
        self._helper = helper_at(_host(plan))
        info = SessionInfo(
            worker=plan.main,
            main=plan.main,
            settings=plan.settings,
            members=self.members,
            dial=self._routes.dial,
            watched=plan.watched,
            program=plan.program,
            helper=self._helper,
        )
        try:
            self.node = plan.make_node(info)
        except BaseException:
            self._end_helper()
            raise
        atexit.register(self._leave_at_exit)
        try:
            self._begin()
            if plan.rejoin:
                threading.Thread(target=self._poll, daemon=True).start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------------- starting

    def _begin(self) -> None:
        if self._plan.control is not None:
            self._server = _bind_name(self._plan, self._plan.control)
        others = tuple(self._plan.controls)
        order = self._plan.settings.workers.index
        self.node.begin()
        due_ns = time.monotonic_ns() + round(self._plan.ready_s * _SECOND_NS)
        # An attached worker leaves if main does not connect within `deadline_s`.
        self._each(others, lambda peer: self._wait_for(peer, due_ns))
        self._each(others, lambda peer: self._attach(peer, 0))
        self._each(others, lambda peer: self._routes.connect(self.node, peer))

        def mesh(peer: str) -> None:  # Workers connect to later workers.
            self._mesh(peer, [other for other in others if order(other) > order(peer)])

        self._each(others, mesh)

    def _each(self, peers: Iterable[str], do: Callable[[str], object]) -> None:
        """Run `do` for all peers in parallel. Errors of present peers come first."""
        futures = [self._requests.submit(do, peer) for peer in peers]
        errors = [future.exception() for future in futures]
        for error in sorted(errors, key=lambda error: getattr(error, "absent", False)):
            if error is not None:
                raise error

    def _wait_for(self, peer: str, due_ns: int) -> None:
        ready_s, has_warned = self._plan.ready_s, False
        while True:
            try:
                return self._check_reachable(peer)
            except JoinError as error:
                if not error.absent or self._stop_waiting.is_set():
                    self._stop_waiting.set()  # Stop the waits for other workers too.
                    raise
                if time.monotonic_ns() >= due_ns:
                    raise JoinError(
                        f"worker {peer!r} is not ready within ready_s={ready_s:g}: "
                        f"{error}",
                        absent=True,
                    ) from None
                if not has_warned:
                    has_warned = True
                    _log.warning("waiting for at most %g s: %s", ready_s, error)
                self._stop_waiting.wait(_RETRY_S)

    def _control(self, peer: str) -> Address:
        return self._moved.get(peer) or self._plan.controls[peer]

    def _check_reachable(self, peer: str) -> None:
        request = Info(token=self._plan.token)
        with self._client(peer, self._control(peer)) as client:
            client.ask(request, timeout_s=self._deadline_s)

    def _client(
        self, peer: str, control: Address | None = None
    ) -> closing[ControlClient]:
        if control is not None:
            self._attached_at[peer] = control
        address, tls = self._attached_at[peer], self._plan.tls
        return closing(ControlClient(f"worker {peer!r}", address, tls=tls))

    def _attach(self, peer: str, incarnation: int) -> WorkerAddress:
        plan = self._plan
        present = self.members.incarnations
        settings = asdict(plan.settings)
        schedule = settings.pop("schedule")  # The other settings are plain JSON.
        request = AttachWorker(
            token=plan.token,
            secret=self._secrets[peer],
            secrets={
                other: self._between(peer, incarnation, other)
                for other in present
                if other not in (peer, plan.main)
            },
            main=plan.main,
            worker=peer,
            settings=settings,
            incarnations={**present, peer: incarnation},
            allow=plan.allow,
            control="" if plan.control is None else str(plan.control),
            watched=plan.watched,
            schedule=schedule and ScheduleCsv(schedule.workers, to_csv(schedule)),
            program=plan.program,
            handshake=dict(plan.handshake),
        )
        names = f"main {plan.main!r}", f"worker {peer!r}"
        with self._client(peer, self._control(peer)) as client:
            try:
                answer = client.ask(request, WorkerAttached, timeout_s=self._deadline_s)
                refuse_mismatch(plan.handshake, answer.handshake, *names)
            except JoinError as error:
                if error.reached:  # The worker may have begun the session.
                    with suppress(JoinError):
                        client.ask(self._detach(peer), timeout_s=self._detach_s)
                raise
        if (warning := other_cpu(plan.handshake, answer.handshake, *names)) is not None:
            warnings.warn(warning, stacklevel=2)
        address = WorkerAddress(
            incarnation=incarnation, data=answer.data, allow=answer.allow
        )
        self.members.attach(peer, incarnation, address, is_dialled=True)
        self.node.joined(peer, incarnation)
        return address

    def _mesh(self, peer: str, dial: Sequence[str]) -> None:
        peers = self.members.announced
        peers.pop(peer, None)
        request = Mesh(secret=self._secrets[peer], peers=peers, dial=tuple(dial))
        with self._client(peer) as client:
            client.ask(request, timeout_s=self._deadline_s)

    def _detach(self, peer: str) -> Detach:
        return Detach(secret=self._secrets[peer])

    @property
    def _detach_s(self) -> float:
        limit_s = _DETACH_LAUNCHED_S if self._plan.watched else _DETACH_S
        return min(self._deadline_s, limit_s)

    def _between(self, peer: str, incarnation: int, other: str) -> str:
        # Secrets differ by incarnation, so a lost process cannot impersonate the next.
        own = f"{other}#{self.members[other].incarnation}"
        return secret_between(self._secret, f"{peer}#{incarnation}", own)

    # -------------------------------------------------------------- lost and rejoined

    def lost(self, worker: str, why: str) -> None:
        """Report that the process of a worker has ended. Never blocks."""
        arguments = (worker, why, self.members[worker].incarnation)
        threading.Thread(target=self.node.lost, args=arguments, daemon=True).start()

    def join(self, worker: str, control: Address | None = None) -> None:
        """Let a new process join as the next incarnation of a lost worker.

        `control` is its control address. None means the address of the lost process.

        Raises:
            JoinError: the process is unreachable or refuses, the worker is not lost, or
                the session is closed.
        """
        with self._joining:
            self._refuse_if_closing(worker)
            incarnation = self.members.next_incarnation(worker)
            if control is not None:
                self._moved[worker] = control
            others = self.members.joined
            address = self._attach(worker, incarnation)
            self._refuse_if_closing(worker)

            def announcement(other: str) -> Peer:
                return Peer(
                    secret=self._secrets[other],
                    shared=self._between(worker, incarnation, other),
                    worker=worker,
                    whereabouts=address,
                )

            try:
                self._send_to_each(others, announcement, self._deadline_s)
                self._routes.connect(self.node, worker)
                self._mesh(worker, others)
            except Exception as error:
                why = f"incarnation {incarnation} did not join: {error}"
                self.node.lost(worker, why)
                raise
            self._refused.pop(worker, None)

    def _refuse_if_closing(self, worker: str) -> None:
        if self._closing:
            raise JoinError(f"worker {worker!r} cannot join: the session is closed")

    def rejoined(self, worker: str, former: int, within_ns: int) -> bool:
        """Wait for an incarnation newer than `former`; return False at the timeout.

        If the session has `restart`, first replace the process of a lost worker.

        Raises:
            JoinError: the last attempt to join failed; the message contains the reason.
        """
        incarnations = self.node.incarnations

        def is_joined() -> bool:
            return incarnations.get(worker, 0) > former

        if self.restart is not None and not is_joined():
            self.node.until(lambda: worker in self.members.lost, within_ns)
            self.join(worker, self.restart(worker, within_ns / _SECOND_NS))
        has_joined = self.node.until(is_joined, within_ns)
        if not has_joined and (why := self._refused.get(worker)) is not None:
            raise JoinError(why)
        return has_joined

    def _poll(self) -> None:
        while not self._stop_waiting.wait(POLL_S):
            for worker in self.members.lost:
                try:
                    self.join(worker)
                except JdagError as error:
                    self._refused[worker] = str(error)
                    _log.debug("%s has not rejoined: %s", worker, error)
                except Exception:  # Other workers may still rejoin.
                    _log.exception("%s has not rejoined", worker)

    def _send_to_each(
        self,
        peers: Iterable[str],
        request_for: Callable[[str], Request],
        timeout_s: float,
    ) -> None:
        # Unreachable peers are ignored: nodes detect losses themselves.
        due_s = time.monotonic() + timeout_s

        def send(peer: str) -> None:
            while (rest_s := due_s - time.monotonic()) > 0:
                try:
                    with self._client(peer) as client:
                        client.ask(request_for(peer), timeout_s=rest_s)
                    return
                except JoinError as error:
                    _log.info("a request to %s failed: %s", peer, error)
                    if error.reached or error.absent:
                        return
                time.sleep(min(_RETRY_S, rest_s))

        self._each(peers, send)

    # --------------------------------------------------------------------- closing

    def close(self) -> None:
        """Tell the peers that the session ends, and detach all workers. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._stop_waiting.set()
        self._leave()
        atexit.unregister(self._leave_at_exit)
        # Wait for a worker that is joining, because it must be detached too.
        is_free = self._joining.acquire(timeout=self._detach_s)
        self._send_to_each(self.members.joined, self._detach, self._detach_s)
        if is_free:
            self._joining.release()
        self._requests.shutdown(wait=False)
        if self._server is not None:
            self._server.close()

    def _leave_at_exit(self) -> None:
        if self._process == os.getpid():  # Not a forked child.
            self._leave()

    def _leave(self) -> None:
        self.node.close()
        self._end_helper()

    def _end_helper(self) -> None:
        if self._helper is not None:
            self._helper.close()


def _host(plan: SessionPlan) -> str:
    """Return the host at which workers reach main, or "" if there are no workers."""
    if plan.control is not None:
        return plan.control.host
    return next(map(host_towards, plan.controls.values()), "")


def _bind_name(plan: SessionPlan, control: Address) -> ControlServer:
    health = {"worker": plan.main, "state": "main", "pid": os.getpid()}
    try:
        name = f"main {plan.main!r}"
        return ControlServer(name, control, {Health: lambda _: health}, tls=plan.tls)
    except JoinError as error:
        raise JoinError(
            f"cannot join as {plan.main!r}: {error}{_address_owner(plan, control)}"
        ) from error


def _address_owner(plan: SessionPlan, control: Address) -> str:
    rule = "each name in the file is one process, on the host of its address"
    client = ControlClient("it", control, tls=plan.tls)
    try:
        health = client.ask(Health(), timeout_s=_HEALTH_S)
    except JoinError:
        return f"; {rule}"
    finally:
        client.close()
    owner = f" by process {health.get('pid')}, {health.get('worker')!r}; {rule}"
    if health.get("worker") == plan.main and health.get("state") != "main":
        owner += f" (start the other workers by jdag up --except {plan.main})"
    return owner
