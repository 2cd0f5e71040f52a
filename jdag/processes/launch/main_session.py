"""Main's side of a session: attach, connect, monitor and detach all workers.

Main attaches every worker, dials all, and has the others dial each other; then its
program runs. The loss of a worker is announced to the others. With `rejoin`, main polls
the address of a lost worker, and a new process there joins as the next incarnation.

Invariants: main alone numbers the incarnations of a name: 0, 1, ... The others know a
new one, and its secret, before it dials them. After a failure all workers are detached.
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
ASKED_AT_ONCE_MAX = 16
_WHO_S = 2.0
_AGAIN_S = 0.1
# So long a worker may take to leave; one that is launched is then stopped as a process.
_LEAVING_S, _LEAVING_LAUNCHED_S = 5.0, 1.0
_SECOND_NS = 1_000_000_000

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SessionPlan:
    """Settings of a session.

    The workers of `settings` are all, including main; `controls` are the addresses of
    the others. `control` is main's own address, which is bound while the session lasts
    so that no other process can use the name; None if that is impossible. With
    `rejoin`, a new process at the address of a lost worker joins. Workers that have not
    started are waited for, for `ready_s` in all. `watched`, `program`: see
    `jdag.processes.session.session_info.SessionInfo`.
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
    """A session with all workers joined; a context manager that closes it.

    `node` is main's. The parent of worker processes calls `lost`. At exit, an open
    session says goodbye.

    Raises:
        JoinError: a worker is not reached, refuses, or differs; all are detached again.
    """

    def __init__(self, plan: SessionPlan) -> None:
        self._plan = plan
        self._deadline_s = plan.settings.deadline_s
        self._process = os.getpid()
        self._moved: dict[str, Address] = {}  # Where workers that joined again are.
        self._attached_at: dict[str, Address] = {}
        self._refused: dict[str, str] = {}  # Why lost ones have not joined again.
        # Starts the process of a worker anew, within so many seconds.
        self.restart: Callable[[str, float], Address] | None = None
        self._secret = fresh_secret()
        # Main and a name know each other by one secret, whichever process has the name.
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
        self._joining = threading.Lock()  # One worker joins again at a time.
        self._closing = False
        self._no_more = threading.Event()  # Set when no worker is waited for any more.
        self._server: ControlServer | None = None
        self._asking = ThreadPoolExecutor(ASKED_AT_ONCE_MAX, "asking")
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
        atexit.register(self._goodbye)
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

    # ------------------------------------------------------------------- beginning

    def _begin(self) -> None:
        if self._plan.control is not None:
            self._server = _hold(self._plan, self._plan.control)
        others = tuple(self._plan.controls)
        self.node.begin()
        due_ns = time.monotonic_ns() + round(self._plan.ready_s * _SECOND_NS)
        # A worker that is attached and not connected within `deadline_s` leaves.
        self._each(others, lambda peer: self._wait_for(peer, due_ns))
        self._each(others, lambda peer: self._attach(peer, 0))
        self._each(others, lambda peer: self._routes.connect(self.node, peer))
        order = self._plan.settings.workers.index
        # Of two workers the one with the lower number dials.
        self._each(
            others,
            lambda peer: self._mesh(
                peer, [one for one in others if order(one) > order(peer)]
            ),
        )

    def _each(self, peers: Iterable[str], do: Callable[[str], object]) -> None:
        """Run `do` for all peers in parallel; raise errors of answers first."""
        futures = [self._asking.submit(do, peer) for peer in peers]
        errors = [future.exception() for future in futures]
        for error in sorted(errors, key=lambda error: getattr(error, "absent", False)):
            if error is not None:
                raise error

    def _wait_for(self, peer: str, due_ns: int) -> None:
        ready_s, is_told = self._plan.ready_s, False
        while True:
            try:
                return self._find(peer)
            except JoinError as error:
                if not error.absent or self._no_more.is_set():
                    self._no_more.set()  # Stop waiting for the others.
                    raise
                if time.monotonic_ns() >= due_ns:
                    late = f"worker {peer!r} is not ready within ready_s={ready_s:g}"
                    raise JoinError(f"{late}: {error}", absent=True) from None
                if not is_told:
                    is_told = True
                    _log.warning("waiting for at most %g s: %s", ready_s, error)
                self._no_more.wait(_AGAIN_S)

    def _control(self, peer: str) -> Address:
        """Return the address of a worker, which may have moved since it was started."""
        return self._moved.get(peer) or self._plan.controls[peer]

    def _find(self, peer: str) -> None:
        asked = Info(token=self._plan.token)
        with self._client(peer, self._control(peer)) as client:
            client.ask(asked, timeout_s=self._deadline_s)

    def _client(self, peer: str, at: Address | None = None) -> closing[ControlClient]:
        """Return a client of a peer, at its address or where it was attached."""
        if at is not None:
            self._attached_at[peer] = at
        address, tls = self._attached_at[peer], self._plan.tls
        return closing(ControlClient(f"worker {peer!r}", address, tls=tls))

    def _attach(self, peer: str, incarnation: int) -> WorkerAddress:
        plan = self._plan
        present = self.members.incarnations
        # As JSON has them, but for the schedule.
        settings = asdict(plan.settings)
        schedule = settings.pop("schedule")
        listed = schedule and ScheduleCsv(schedule.workers, to_csv(schedule))
        asked = AttachWorker(
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
            schedule=listed,
            program=plan.program,
            handshake=dict(plan.handshake),
        )
        mine, its = f"main {plan.main!r}", f"worker {peer!r}"
        with self._client(peer, self._control(peer)) as client:
            try:
                answer = client.learn(asked, WorkerAttached, timeout_s=self._deadline_s)
                refuse_mismatch(plan.handshake, answer.handshake, mine, its)
            except JoinError as error:
                if error.reached:  # It may hold the unwanted session.
                    with suppress(JoinError):
                        client.ask(self._detach(peer), timeout_s=self._leaving_s)
                raise
        other = other_cpu(plan.handshake, answer.handshake, mine, its)
        if other is not None:
            warnings.warn(other, stacklevel=2)
        there = WorkerAddress(
            incarnation=incarnation, data=answer.data, allow=answer.allow
        )
        self.members.attach(peer, incarnation, there, is_dialled=True)
        self.node.joined(peer, incarnation)
        return there

    def _mesh(self, peer: str, dial: Sequence[str]) -> None:
        peers = self.members.announced
        peers.pop(peer, None)
        asked = Mesh(secret=self._secrets[peer], peers=peers, dial=tuple(dial))
        with self._client(peer) as client:
            client.ask(asked, timeout_s=self._deadline_s)

    def _detach(self, peer: str) -> Detach:
        return Detach(secret=self._secrets[peer])

    @property
    def _leaving_s(self) -> float:
        most_s = _LEAVING_LAUNCHED_S if self._plan.watched else _LEAVING_S
        return min(self._deadline_s, most_s)

    def _between(self, peer: str, incarnation: int, other: str) -> str:
        # So a lost incarnation cannot pass for the one that joined under its name.
        number = self.members[other].incarnation
        return secret_between(
            self._secret, f"{peer}#{incarnation}", f"{other}#{number}"
        )

    # --------------------------------------------------------------------- keeping

    def lost(self, worker: str, why: str) -> None:
        """Note that the process of a worker has ended, as its parent reports.

        Main's node learns of it and tells the others. Never blocks.
        """
        arguments = (worker, why, self.members[worker].incarnation)
        threading.Thread(target=self.node.lost, args=arguments, daemon=True).start()

    def join(self, worker: str, control: Address | None = None) -> None:
        """Have a new process take the name of a lost worker; waits until it has joined.

        `control`: where its control server listens; None: where the former's did.

        Raises:
            JoinError: it is not reached, refuses, or is not lost; or the session is
                closed.
        """
        with self._joining:
            self._refuse_if_closing(worker)
            incarnation = self.members.next_incarnation(worker)
            if control is not None:
                self._moved[worker] = control
            others = self.members.joined
            there = self._attach(worker, incarnation)
            self._refuse_if_closing(worker)
            try:

                def asked(other: str) -> Peer:
                    return Peer(
                        secret=self._secrets[other],
                        shared=self._between(worker, incarnation, other),
                        worker=worker,
                        whereabouts=there,
                    )

                self._tell(others, asked, self._deadline_s)
                self._routes.connect(self.node, worker)
                self._mesh(worker, others)
            except Exception as error:
                said = f"incarnation {incarnation} did not join: {error}"
                self.node.lost(worker, said)
                raise
            self._refused.pop(worker, None)

    def _refuse_if_closing(self, worker: str) -> None:
        if self._closing:
            said = f"worker {worker!r} cannot join: the session is closed"
            raise JoinError(said)

    def rejoined(self, worker: str, former: int, within_ns: int) -> bool:
        """Wait until a later incarnation of a worker has joined; False: it has not.

        With `restart` the process of a lost worker is started anew.

        Raises:
            JoinError: the reason why the last attempt has failed, if there was one.
        """
        incarnations = self.node.incarnations

        def joined() -> bool:
            return incarnations.get(worker, 0) > former

        if self.restart is not None and not joined():
            self.node.until(lambda: worker in self.members.lost, within_ns)
            self.join(worker, self.restart(worker, within_ns / _SECOND_NS))
        has_joined = self.node.until(joined, within_ns)
        if not has_joined and (why := self._refused.get(worker)) is not None:
            raise JoinError(why)
        return has_joined

    def _poll(self) -> None:
        while not self._no_more.wait(POLL_S):
            for worker in self.members.lost:
                try:
                    self.join(worker)
                except JdagError as error:
                    self._refused[worker] = str(error)
                    _log.debug("%s has not joined again: %s", worker, error)
                except Exception:  # The others may still join.
                    _log.exception("%s has not joined again", worker)

    def _tell(
        self, peers: Iterable[str], asked: Callable[[str], Request], within_s: float
    ) -> None:
        """Send a request to each peer; nodes detect losses themselves."""
        due_s = time.monotonic() + within_s

        def tell(peer: str) -> None:
            while (rest_s := due_s - time.monotonic()) > 0:
                try:
                    with self._client(peer) as client:
                        client.ask(asked(peer), timeout_s=rest_s)
                    return
                except JoinError as error:
                    _log.info("%s was not told: %s", peer, error)
                    if error.reached or error.absent:
                        return
                time.sleep(min(_AGAIN_S, rest_s))  # A stream that is mended is found.

        self._each(peers, tell)

    # --------------------------------------------------------------------- leaving

    def close(self) -> None:
        """Say goodbye to all peers, and detach every worker. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._no_more.set()
        self._leave()
        atexit.unregister(self._goodbye)
        # A worker that is being attached is detached as well.
        is_free = self._joining.acquire(timeout=self._leaving_s)
        self._tell(self.members.joined, self._detach, self._leaving_s)
        if is_free:
            self._joining.release()
        self._asking.shutdown(wait=False)
        if self._server is not None:
            self._server.close()

    def _goodbye(self) -> None:
        """At exit, have the node say goodbye, except in a forked child."""
        if self._process == os.getpid():
            self._leave()

    def _leave(self) -> None:
        self.node.close()
        self._end_helper()

    def _end_helper(self) -> None:
        if self._helper is not None:
            self._helper.close()


def _host(plan: SessionPlan) -> str:
    """The host by which the workers reach main; empty without workers."""
    if plan.control is not None:
        return plan.control.host
    return next(map(host_towards, plan.controls.values()), "")


def _hold(plan: SessionPlan, control: Address) -> ControlServer:
    health = {"worker": plan.main, "state": "main", "pid": os.getpid()}
    try:
        name = f"main {plan.main!r}"
        return ControlServer(name, control, {Health: lambda _: health}, tls=plan.tls)
    except JoinError as error:
        raise JoinError(
            f"cannot be {plan.main!r}: {error}{_who(plan, control)}"
        ) from error


def _who(plan: SessionPlan, control: Address) -> str:
    """Name the process that answers at main's own address, if it is a cluster's."""
    rule = "each name of the file is for one process, on the host of its address"
    client = ControlClient("it", control, tls=plan.tls)
    try:
        found = client.ask(Health(), timeout_s=_WHO_S)
    except JoinError:
        return f"; {rule}"
    finally:
        client.close()
    said = f" by process {found.get('pid')}, {found.get('worker')!r}; {rule}"
    if found.get("worker") == plan.main and found.get("state") != "main":
        said += f" (jdag up --except {plan.main} leaves it to this one)"
    return said
