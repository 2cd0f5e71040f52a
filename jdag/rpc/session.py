"""A session seen by its main: all workers attached, joined to each other, kept, left.

Main attaches every worker, dials all, and has the others dial each other; then its
program runs. A worker that is lost is made known to the others; where a new process may
take its name, its address is tried again and again, and a new incarnation joins. All of
that is done by one thread, the keeper, in the order in which it became known.

Invariants: incarnations of a name are numbered 0, 1, ... by main alone; the others know
a new one before it knocks at them; what is attached when something fails is detached.
"""

import atexit
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from jdag.errors import JdagError, JoinError
from jdag.rpc.addresses import Address
from jdag.rpc.control import ControlClient, ControlServer
from jdag.rpc.dialling import Routes
from jdag.rpc.handshake import other_cpu, refuse_mismatch
from jdag.rpc.membership import Membership
from jdag.rpc.node import MakeNode
from jdag.rpc.requests import (
    AttachWorker,
    Detach,
    Health,
    Info,
    Mesh,
    Peer,
    Request,
    Whereabouts,
    WorkerAttached,
)
from jdag.rpc.session_info import SessionInfo
from jdag.rpc.tickets import fresh_secret, secret_between
from jdag.rpc.tls import Tls
from jdag.runtime.tables import NESTING_MAX

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
    """What a session is to be.

    `workers` are all names in order, main's among them; `controls` are the addresses of
    the others. Main's own, `control`, is held while the session lasts, so that no other
    process has its name; None where nobody else could. With `rejoin` a new process at
    the address of a lost worker joins. Workers that are not there yet are waited for,
    for `ready_s` in all. `watched`: see `jdag.rpc.session_info.SessionInfo`.
    """

    main: str
    workers: tuple[str, ...]
    controls: Mapping[str, Address]
    handshake: Mapping[str, Any]
    make_node: MakeNode
    token: str = field(default="", repr=False)
    allow: tuple[str, ...] = ()
    deadline_s: float = 10.0
    ready_s: float = 0.0
    nesting_max: int = NESTING_MAX
    rejoin: bool = False
    watched: bool = False
    control: Address | None = None
    tls: Tls | None = None


class Session:
    """A session, from when all workers are joined; a context manager that closes it.

    `node` is main's. Who watches the processes of workers calls `lost`. A program that
    ends without closing it says goodbye all the same.

    Raises:
        JoinError: a worker is not reached, refuses, or differs; all are left again.
    """

    def __init__(self, plan: SessionPlan) -> None:
        self._plan = plan
        self._process = os.getpid()
        self._secret = fresh_secret()
        # Main and a name know each other by one secret, whichever process has the name.
        self._secrets = {
            peer: secret_between(self._secret, plan.main, peer)
            for peer in plan.controls
        }
        self._routes = Routes(
            plan.main,
            0,
            self._secrets,
            tls=plan.tls,
            timeout_s=plan.deadline_s,
        )
        self._controls = dict(plan.controls)
        self._lock = threading.Lock()
        self._closing = False
        self._no_more = threading.Event()  # Set when no worker is waited for any more.
        self._there: dict[str, Whereabouts] = {}
        self._members = Membership(plan.main, plan.workers)
        self._server: ControlServer | None = None
        self._asking = ThreadPoolExecutor(ASKED_AT_ONCE_MAX, "asking")
        self._keeper = ThreadPoolExecutor(1, "keeper")
        self.info = SessionInfo(
            worker=plan.main,
            workers=plan.workers,
            main=plan.main,
            incarnations=dict.fromkeys(plan.workers, 0),
            allowed={plan.main: plan.allow},
            deadline_s=plan.deadline_s,
            dial=self._routes.dial,
            gone=self._gone,
            dials=dict.fromkeys(plan.controls, True),
            watched=plan.watched,
            nesting_max=plan.nesting_max,
        )
        self.node = plan.make_node(self.info)
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
        others = tuple(self._controls)
        self.node.begin()
        due_ns = time.monotonic_ns() + round(self._plan.ready_s * _SECOND_NS)
        # Who is attached and not connected within `deadline_s` leaves.
        self._each(others, lambda peer: self._wait_for(peer, due_ns))
        self._each(others, lambda peer: self._attach(peer, 0))
        self._each(others, lambda peer: self._routes.connect(self.node, peer))
        order = self._plan.workers.index
        # Of two workers the one with the lower number dials.
        self._each(
            others,
            lambda peer: self._mesh(
                peer, [one for one in others if order(one) > order(peer)]
            ),
        )

    def _each(self, peers: Iterable[str], do: Callable[[str], None]) -> None:
        """Do it for all at once; then raise an error, that of an answer first."""
        futures = [self._asking.submit(do, peer) for peer in peers]
        errors = [future.exception() for future in futures]
        for error in sorted(errors, key=lambda error: getattr(error, "absent", False)):
            if error is not None:
                raise error

    def _wait_for(self, peer: str, due_ns: int) -> None:
        """Wait for a worker where nothing listens at its address yet."""
        ready_s, is_told = self._plan.ready_s, False
        while True:
            try:
                self._find(peer)
            except JoinError as error:
                if not error.absent or self._no_more.is_set():
                    self._no_more.set()  # The others need not be waited for.
                    raise
                if time.monotonic_ns() >= due_ns:
                    late = f"worker {peer!r} is not ready within ready_s={ready_s:g}"
                    raise JoinError(f"{late}: {error}", absent=True) from None
                if not is_told:
                    is_told = True
                    _log.warning("waiting for at most %g s: %s", ready_s, error)
                self._no_more.wait(_AGAIN_S)
            else:
                return

    def _find(self, peer: str) -> None:
        client = self._routes.reach(peer, self._controls[peer])
        client.ask(Info(token=self._plan.token), timeout_s=self._plan.deadline_s)

    def _attach(self, peer: str, incarnation: int) -> None:
        plan = self._plan
        with self._lock:
            present = {
                name: number
                for name, number in self.info.incarnations.items()
                if name not in self._members.lost
            }
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
            workers=plan.workers,
            incarnations={**present, peer: incarnation},
            allow=plan.allow,
            deadline_s=plan.deadline_s,
            control="" if plan.control is None else str(plan.control),
            watched=plan.watched,
            nesting_max=plan.nesting_max,
            handshake=dict(plan.handshake),
        )
        control = self._controls[peer]
        client = self._routes.reach(peer, control)
        mine = f"main {plan.main!r}"
        try:
            answer = client.learn(asked, WorkerAttached, timeout_s=plan.deadline_s)
            refuse_mismatch(plan.handshake, answer.handshake, mine, f"worker {peer!r}")
        except JoinError as error:
            if error.reached:  # It may hold the session for us that we do not want.
                with suppress(JoinError):
                    self._ask(peer, self._detach(peer))
            raise
        there = Whereabouts(
            incarnation=incarnation,
            control=str(control),
            data=answer.data,
            allow=answer.allow,
        )
        other = other_cpu(plan.handshake, answer.handshake, mine, f"worker {peer!r}")
        if other is not None:
            warnings.warn(other, stacklevel=2)
        with self._lock:
            self._members.attach(peer, incarnation)
            self._there[peer] = there
            self.info.incarnations[peer] = incarnation
            self.info.allowed[peer] = there.allow
        self._routes.know(peer, there)
        self.node.joined(peer, incarnation)

    def _mesh(self, peer: str, dial: Sequence[str]) -> None:
        with self._lock:
            peers = {
                name: self._there[name]
                for name in self._members.present
                if name != peer
            }
        secret = self._secrets[peer]
        self._ask(peer, Mesh(secret=secret, peers=peers, dial=tuple(dial)))
        with self._lock:
            self._members.join(peer)

    def _detach(self, peer: str) -> Detach:
        return Detach(secret=self._secrets[peer])

    def _between(self, peer: str, incarnation: int, other: str) -> str:
        """What an incarnation of a worker and another worker, as it is, are known by.

        So a lost incarnation cannot be taken for the one that joined under its name.
        """
        numbers = self.info.incarnations
        return secret_between(
            self._secret, f"{peer}#{incarnation}", f"{other}#{numbers[other]}"
        )

    def _ask(self, peer: str, asked: Request) -> None:
        within_s = self._plan.deadline_s
        if isinstance(asked, Detach):
            most_s = _LEAVING_LAUNCHED_S if self._plan.watched else _LEAVING_S
            within_s = min(within_s, most_s)
        self._routes.client(peer).ask(asked, timeout_s=within_s)

    # --------------------------------------------------------------------- keeping

    def lost(self, worker: str, why: str) -> None:
        """Note that the process of a worker has ended, as its watcher reports.

        Main's node learns of it and tells the others. Never blocks.
        """
        incarnation = self.info.incarnations[worker]

        def lose() -> None:
            if self.info.incarnations[worker] == incarnation:
                self.node.lost(worker, why)

        with suppress(RuntimeError):  # The session is closed.
            self._keeper.submit(lose)

    def away(self) -> dict[str, str]:
        """Return the workers that are lost, and why each is."""
        with self._lock:
            return dict(self._members.lost)

    def join(self, worker: str, address: Address | None = None) -> None:
        """Have a new process take the name of a lost worker; waits until it has joined.

        Args:
            worker: its name.
            address: where its control server listens, if not where the former's did.

        Raises:
            JoinError: it is not reached, refuses, or is not lost; or the session is
                closed.
        """
        with self._lock:
            self._check_open(worker)
            joined = self._keeper.submit(self._rejoin, worker, address)
        joined.result()

    def _check_open(self, worker: str) -> None:
        if self._closing:
            raise JoinError(f"worker {worker!r} cannot join: the session is closed")

    def _gone(self, peer: str, why: str) -> None:
        """Main's node has found a peer to be lost, and said so to the others."""
        with self._lock:
            if not self._closing:
                self._members.lose(peer, why)

    def _poll(self) -> None:
        """Look for new processes of lost workers; a thread's whole life."""
        while not self._no_more.wait(POLL_S):
            for worker in self.away():
                try:
                    self.join(worker)
                except JdagError as error:
                    _log.debug("%s has not joined again: %s", worker, error)
                except Exception:  # The others may still join.
                    _log.exception("%s has not joined again", worker)

    def _rejoin(self, worker: str, address: Address | None) -> None:
        with self._lock:
            self._check_open(worker)
            incarnation = self._members.next_incarnation(worker)
            others = self._members.present
        if address is not None:
            self._controls[worker] = address
        self._attach(worker, incarnation)
        try:
            there = self._there[worker]

            def asked(other: str) -> Peer:
                return Peer(
                    secret=self._secrets[other],
                    shared=self._between(worker, incarnation, other),
                    worker=worker,
                    whereabouts=there,
                )

            self._tell(others, asked)
            self._routes.connect(self.node, worker)
            self._mesh(worker, others)
        except Exception as error:
            said = f"incarnation {incarnation} did not join: {error}"
            self.node.lost(worker, said)
            raise

    def _tell(self, peers: Iterable[str], asked: Callable[[str], Request]) -> None:
        """Send it to each; nodes find out themselves which are lost."""

        def tell(peer: str) -> None:
            try:
                self._ask(peer, asked(peer))
            except JoinError as error:
                _log.info("%s was not told: %s", peer, error)

        self._each(peers, tell)

    # --------------------------------------------------------------------- leaving

    def close(self) -> None:
        """Say goodbye to all, and let every worker go; may be called again."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            there = self._members.present
        self._no_more.set()
        self._keeper.shutdown(wait=False)
        self.node.close()
        atexit.unregister(self._goodbye)
        self._tell(there, self._detach)
        self._asking.shutdown(wait=False)
        self._routes.close()
        if self._server is not None:
            self._server.close()

    def _goodbye(self) -> None:
        """Have the node say goodbye at the end of this process, but not of a copy."""
        if self._process == os.getpid():
            self.node.close()


def _hold(plan: SessionPlan, control: Address) -> ControlServer:
    """Bind main's own address; an error says which process has it."""
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
