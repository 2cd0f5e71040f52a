"""A worker process's side of sessions: idle, then held by one main, then idle again.

    idle ──Attach──▶ held ──Detach, main lost, Drain, a newer Attach of its main──▶ idle

What is asked comes on threads of the control server; the node of a session runs on the
thread that called `serve`. One main holds a worker at a time: another is told who does.

Invariants: there is a node exactly while the worker is held; when `serve` waits for the
next session, gate, tokens, routes and node of the former are closed; no secret is ever
in an answer, an error or a log.
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

from jdag.engine.vocabulary import incarnated
from jdag.errors import JoinError
from jdag.rpc.certified import Shown, hold_to
from jdag.rpc.control import Answers
from jdag.rpc.dialling import Lookout, Routes
from jdag.rpc.gate import Admission
from jdag.rpc.handshake import refuse_mismatch
from jdag.rpc.place import DialGate, MakeNode, Node, OpenGate, Place
from jdag.rpc.requests import (
    Attach,
    Detach,
    Drain,
    Health,
    Info,
    Knock,
    Mesh,
    Peer,
    Whereabouts,
)
from jdag.rpc.streams import Stream
from jdag.rpc.tls import Tls
from jdag.rpc.tokens import Tokens, proof_of

ENDING_S = 5.0
_SECOND_NS = 1_000_000_000
_SHOWN_MAX = 300

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Own:
    """What a worker process is, in whichever session.

    `hosts` are those of all workers, by name: what certificates are held to. `once`
    tells that it stops when its first session has ended.
    """

    worker: str
    token: str = field(repr=False)
    allow: tuple[str, ...]
    handshake: Mapping[str, Any]
    make_node: MakeNode
    open_gate: OpenGate
    dial_gate: DialGate
    tls: Tls | None = None
    hosts: Mapping[str, str] = field(default_factory=dict)
    once: bool = False


class _Held:
    """One session, as this worker has it."""

    def __init__(self, own: Own, asked: Attach) -> None:
        self.asked = asked
        self.hosts = own.hosts
        self.main = asked.main
        self.worker = own.worker
        self.incarnation = asked.incarnations[own.worker]
        # By which it and each other process know each other.
        self.secrets = {**asked.secrets, asked.main: asked.secret}
        self.since_ns = time.monotonic_ns()
        self.tokens = Tokens()
        self.main_came = threading.Event()
        self.ended = threading.Event()
        self.routes = Routes(
            own.worker,
            self.incarnation,
            self.secrets,
            dial_gate=own.dial_gate,
            tls=own.tls,
            timeout_s=asked.deadline_s,
        )
        self.lookout = Lookout(asked, self.routes)
        self.place = Place(
            worker=own.worker,
            workers=asked.workers,
            main=asked.main,
            incarnations=dict(asked.incarnations),
            allowed={asked.main: asked.allow, own.worker: own.allow},
            deadline_s=asked.deadline_s,
            dial=self.routes.dial,
            gone=_gone,
            look=self.lookout.look,
            watched=asked.watched,
            nesting_max=asked.nesting_max,
        )
        self.node: Node = own.make_node(self.place)
        self.node.joined(asked.main, asked.incarnations[asked.main])
        try:
            self.gate = own.open_gate(admit=self._admit, take=self._take)
        except BaseException:
            self.node.close()
            raise

    def _admit(self, token: bytes, shown: Shown) -> Admission | None:
        found = self.tokens.use(token)
        if found is None:
            return None
        worker, incarnation = found
        hold_to(shown, worker, self.hosts.get(worker))
        self.refuse_gone(worker, incarnation)
        return Admission(worker, incarnation, self.node.received(worker))

    def _take(self, admitted: Admission, stream: Stream, received: int) -> None:
        if admitted.worker == self.main:
            self.main_came.set()
        self.node.adopt(admitted.worker, admitted.incarnation, stream, received)

    def refuse_gone(self, peer: str, incarnation: int) -> None:
        """Refuse one that was given up, or in whose place another has joined."""
        known = self.place.incarnations.get(peer, 0)
        if incarnation < known:
            raise JoinError(_old(peer, incarnation, known), given_up=True)
        why = self.node.loss(incarnated(peer, incarnation))
        if why is not None:
            said = f"worker {self.worker!r} has given {peer!r} up: {why}"
            raise JoinError(said, given_up=True)

    def knows(self, secret: str, peer: str) -> bool:
        """Whether this is the secret of this process and another."""
        known = self.secrets.get(peer, "")
        return bool(known) and hmac.compare_digest(known.encode(), secret.encode())

    def check(self, peer: str) -> None:
        """See that this is one of the others."""
        if peer not in self.asked.workers or peer == self.worker:
            raise JoinError(f"{peer!r} is none of the others of {self.worker!r}")

    def know(self, peer: str, whereabouts: Whereabouts, *, dials: bool) -> None:
        """Know a peer, or a newer incarnation of it."""
        self.check(peer)
        place = self.place
        known = place.incarnations.get(peer, 0)
        if whereabouts.incarnation < known:
            raise JoinError(_old(peer, whereabouts.incarnation, known))
        place.incarnations[peer] = whereabouts.incarnation
        place.allowed[peer] = whereabouts.allow
        place.dials.pop(peer, None)
        if dials:
            place.dials[peer] = True
        self.routes.know(peer, whereabouts)
        self.node.joined(peer, whereabouts.incarnation)

    def close(self) -> None:
        self.gate.close()
        self.node.close()
        self.routes.close()


class Seat:
    """What a worker process answers, and its sessions one after the other.

    `asked_to_stop` tells that somebody wants it to stop, session or not.
    """

    def __init__(self, own: Own) -> None:
        self._own = own
        self._changed = threading.Condition()
        # One session is begun or ended at a time.
        self._turn = threading.Lock()
        self._held: _Held | None = None
        self._stopping = False
        self.asked_to_stop = False
        self._sessions = 0
        self.answers: Answers = {
            Attach: self.attach,
            Mesh: self.mesh,
            Peer: self.peer,
            Knock: self.knock,
            Detach: self.detach,
            Drain: self.drain,
            Info: self.info,
            Health: self.health,
        }

    def knows(self, proof: str) -> bool:
        """Whether this proves a secret of this worker, or of its session."""
        with self._changed:
            held = self._held
        secrets = [self._own.token, *([] if held is None else held.secrets.values())]
        proofs = [proof_of(secret).encode() for secret in secrets if secret]
        shown = proof.encode(errors="replace")
        return any([hmac.compare_digest(shown, one) for one in proofs])

    # ------------------------------------------------------------------- its thread

    def serve(self) -> None:
        """Run session after session until `stop`, or until the first if `once`."""
        while (held := self._next()) is not None:
            watch = threading.Timer(held.asked.deadline_s, _end_unless, (held,))
            watch.daemon = True
            watch.start()
            threading.Thread(target=held.lookout.find, daemon=True).start()
            try:
                held.node.run()
            finally:
                watch.cancel()
                held.close()
                with self._changed:
                    self._held = None
                    self._sessions += 1
                    self._stopping |= self._own.once
                    self._changed.notify_all()
                held.ended.set()
            del held, watch
            # What a session held goes now, not when it pleases Python.
            gc.collect()

    def _next(self) -> _Held | None:
        with self._changed:
            self._changed.wait_for(lambda: self._held is not None or self._stopping)
            return self._held

    def stop(self) -> None:
        """Finish what is under way, then let `serve` return."""
        with self._changed:
            self._stopping = self.asked_to_stop = True
            held = self._held
            self._changed.notify_all()
        if held is not None:
            held.node.drain()

    def enter(self, stream: Stream) -> None:
        """Let a stream come in to the session, if there is one."""
        with self._changed:
            held = self._held
        if held is None:
            stream.close()
        else:
            held.gate.enter(stream)

    # --------------------------------------------------------------------- answers

    def attach(self, asked: Attach) -> Mapping[str, Any]:
        """Begin a session."""
        own = self._own
        self._check_token(asked.token)
        if asked.worker != own.worker:
            raise JoinError(f"this is worker {own.worker!r}, not {asked.worker!r}")
        _check_names(asked)
        refuse_mismatch(
            asked.handshake,
            own.handshake,
            f"main {asked.main!r}",
            f"worker {own.worker!r}",
        )
        with self._turn:
            self._make_room(asked)
            held = _Held(own, asked)
            with self._changed:
                # Asked to stop meanwhile: who did has found no session to drain.
                is_late = self._stopping
                if not is_late:
                    self._held = held
                    self._changed.notify_all()
            if is_late:
                held.close()
                raise JoinError(_stopping(own))
        return {
            "worker": own.worker,
            "data": held.gate.address,
            "allow": own.allow,
            "handshake": own.handshake,
        }

    def _make_room(self, asked: Attach) -> None:
        """End a session that this main has left; refuse if another one is held."""
        with self._changed:
            held = self._held
            if self._stopping:
                raise JoinError(_stopping(self._own))
        if held is None:
            return
        is_newer = asked.incarnations[asked.worker] > held.incarnation
        is_same = held.knows(asked.secret, held.main)
        if not (is_same and is_newer) and not _is_dead(held.asked, self._own.handshake):
            raise JoinError(
                f"worker {self._own.worker!r} is held by {_holder(held)}; it is free "
                "when that session has ended"
            )
        self._end(held)

    def _end(self, held: _Held) -> None:
        """End a session, and wait until it has."""
        held.node.close()
        if not held.ended.wait(ENDING_S):
            raise JoinError(
                f"worker {self._own.worker!r} has not left the session of "
                f"{held.main!r} within {ENDING_S:g} s; what it computes has to "
                "come to an end, or it has to be stopped"
            )

    def mesh(self, asked: Mesh) -> Mapping[str, Any]:
        """Know the others, dial some of them."""
        held = self._session(asked.secret)
        for peer, whereabouts in asked.peers.items():
            held.know(peer, whereabouts, dials=peer in asked.dial)
        for peer in asked.dial:
            if peer not in asked.peers:
                raise JoinError(f"{peer!r} is to be dialled, and not said to be there")
            held.routes.connect(held.node, peer)
        return {}

    def peer(self, asked: Peer) -> Mapping[str, Any]:
        """Know that a new incarnation of a worker joins, and will dial."""
        held = self._session(asked.secret)
        held.know(asked.worker, asked.whereabouts, dials=False)
        held.secrets[asked.worker] = asked.shared
        return {}

    def knock(self, asked: Knock) -> Mapping[str, Any]:
        """Give a one-time token to a worker of the session."""
        held = self._present()
        held.check(asked.worker)
        known = held.place.incarnations.get(asked.worker)
        if known is None:
            raise JoinError(f"{asked.worker!r} is lost, and none has joined as it")
        if asked.incarnation > known:
            raise JoinError(
                f"incarnation {asked.incarnation} of {asked.worker!r} is not announced "
                f"yet; {known} is known"
            )
        if asked.incarnation == known:  # A former one had another secret.
            self._refuse_others(held, asked.secret, asked.worker)
        held.refuse_gone(asked.worker, asked.incarnation)
        token = held.tokens.issue(asked.worker, asked.incarnation)
        return {"token": token.hex()}

    def detach(self, asked: Detach) -> Mapping[str, Any]:
        """End the session, if it is still that one."""
        with self._changed:
            held = self._held
        if held is None or not held.knows(asked.secret, held.main):
            return {"ended": False}
        self._end(held)
        return {"ended": True}

    def drain(self, asked: Drain) -> Mapping[str, Any]:
        """Stop when what is under way is finished."""
        self._check_token(asked.token)
        threading.Thread(target=self.stop, name="drain", daemon=True).start()
        return {}

    def info(self, asked: Info) -> Mapping[str, Any]:
        """Say what this process is and does."""
        self._check_token(asked.token)
        with self._changed:
            held, sessions = self._held, self._sessions
        main = None if held is None else held.asked.main
        return {
            **self.health(Health()),
            "main": main,
            "incarnation": None if held is None else held.incarnation,
            "workers": [] if held is None else list(held.asked.workers),
            "sessions": sessions,
            "allow": self._own.allow,
            "handshake": self._own.handshake,
        }

    def health(self, asked: Health) -> Mapping[str, Any]:
        """Say that this process lives."""
        with self._changed:
            state = "idle" if self._held is None else "held"
            state = "stopping" if self._stopping else state
        return {"worker": self._own.worker, "state": state, "pid": os.getpid()}

    # ---------------------------------------------------------------------- checks

    def _check_token(self, token: str) -> None:
        if not hmac.compare_digest(token.encode(), self._own.token.encode()):
            own = self._own.worker
            what = "the token is wrong" if token else "it wants a token, and none came"
            raise JoinError(
                f"worker {own!r} refused: {what}; token_file, or else the .token "
                "beside the cluster's file, has to hold the same secret on both sides"
            )

    def _present(self) -> _Held:
        with self._changed:
            held = self._held
        if held is None:
            raise JoinError(f"worker {self._own.worker!r} is in no session")
        return held

    def _session(self, secret: str) -> _Held:
        """The session, for its main."""
        held = self._present()
        self._refuse_others(held, secret, held.main)
        return held

    def _refuse_others(self, held: _Held, secret: str, peer: str) -> None:
        if not held.knows(secret, peer):
            raise JoinError(
                f"worker {self._own.worker!r} refused: the secret is not that of "
                f"{peer!r} in its session with {held.main!r}"
            )


def _stopping(own: Own) -> str:
    return f"worker {own.worker!r} is stopping"


def _gone(peer: str, why: str) -> None:
    _log.info("%s is gone: %s", peer, why)


def _end_unless(held: _Held) -> None:
    """End a session whose main has never come: nobody else would notice."""
    if not held.main_came.is_set():
        _log.warning("main %r attached and never came", held.asked.main)
        held.node.close()


def _check_names(asked: Attach) -> None:
    for name in (asked.main, asked.worker):
        if asked.workers.count(name) != 1 or name not in asked.incarnations:
            raise JoinError(f"{name!r} has to be once among the workers of the session")
    for name in asked.incarnations:
        if name not in asked.workers:
            raise JoinError(f"{name!r} has an incarnation and is no worker")


def _old(worker: str, incarnation: int, known: int) -> str:
    return (
        f"incarnation {incarnation} of {worker!r} is gone, and {known} has joined in "
        "its place; the old process has to stop"
    )


def _holder(held: _Held) -> str:
    handshake = held.asked.handshake
    where = f"process {handshake.get('pid')} on {handshake.get('host')}"
    held_s = (time.monotonic_ns() - held.since_ns) // _SECOND_NS
    return f"main {held.main!r} ({where}, for {held_s} s)"[:_SHOWN_MAX]


def _is_dead(asked: Attach, own: Mapping[str, Any]) -> bool:
    """Whether the process that holds this one ran on this host, and does not any more.

    So that who starts a crashed program again need not wait for the deadline.
    """
    pid = asked.handshake.get("pid")
    same = asked.handshake.get("boot") == own.get("boot")
    if not same or type(pid) is not int or not 0 < pid < 1 << 31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
