"""A node: one worker's engine and values in a process, among real peers.

What its engine asks for is carried out here: messages go to peers (`jdag.rpc.company`),
jobs are computed (`jdag.rpc.jobs`), programs run on threads (`jdag.rpc.programs`). All
of it happens with the baton of the node's loop held (`jdag.rpc.loop`), by whichever
thread has it: that of a program which tells something or waits, or the background's.

Told by programs: through their `Port`. By peers: messages and functions. By its
       session, from any thread: about peers (`jdag.rpc.company`); `drain`, `close`.

Invariants: an engine's effects are carried out in their order and before the next
event; after `close` nothing is told, sent or computed, and who waits is interrupted.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from jdag.compute.buffers import Buffers
from jdag.compute.machine import Machine, failure_of
from jdag.engine import Engine
from jdag.engine.drawing import Drawing
from jdag.engine.vocabulary import (
    Acknowledge,
    Alarm,
    AnyKey,
    Arrived,
    Awaited,
    Compute,
    Computed,
    ContextId,
    Differentiated,
    Drop,
    Event,
    Failure,
    Fetched,
    Job,
    Joined,
    Key,
    Launched,
    Left,
    Lost,
    Message,
    Resume,
    Return,
    Returned,
    Send,
    Spawn,
    incarnated,
    landing,
    named,
)
from jdag.errors import JdagError, ProtocolError, other_thread
from jdag.functions import name_of
from jdag.rpc.company import LEFT, Company, broke
from jdag.rpc.exports import check_size
from jdag.rpc.functions import Functions
from jdag.rpc.jobs import Jobs
from jdag.rpc.loop import Loop, clock_ns
from jdag.rpc.peer import Peer
from jdag.rpc.place import Place
from jdag.rpc.port import Port
from jdag.rpc.programs import Over, Programs, ended_by
from jdag.rpc.settings import VALUE_BYTES_MAX
from jdag.rpc.sizes import check_values
from jdag.rpc.standing import info, info_of_all, quiet, settle
from jdag.wire.encoding import encoded
from jdag.wire.messages import Codec

RunProgram = Callable[[Port, Spawn], Returned]

DRAIN_S, DRAIN_LOOK_S = 30.0, 0.05
LAST_INFO_S = 1.0  # Who closes does not wait long for what others have counted.
FLUSH_NS = 50_000  # What a program tells in a row leaves together, so often.
SWEEP_NS = 10**9  # Memory that is not received into for so long is let go of.
ROUNDS_MAX = 64

_WAITING = (Launched, Awaited, Fetched, Differentiated, Left)
_log = logging.getLogger(__name__)


class Node:
    """One worker of a session, in this process.

    Args:
        place: where it stands in its session.
        run_program: runs a program that the engine asked for; it says how it ended.
        functions: turns names into functions, as far as they are allowed.
        value_bytes_max: the largest value that it sends, and takes from a peer.
    """

    def __init__(
        self,
        place: Place,
        *,
        run_program: RunProgram,
        functions: Functions,
        value_bytes_max: int = VALUE_BYTES_MAX,
    ) -> None:
        self.name = name = place.worker
        self.workers = place.workers
        self.incarnation = incarnation = place.incarnations[name]
        self.worker = worker = incarnated(name, incarnation)
        self.trace = None
        self._place = place
        self._began_ns = clock_ns()
        self._run_program = run_program
        self._functions = functions
        self._engine: Any = Engine(name, self.workers, incarnation)
        self._machine = Machine("real", leaving_bytes_max=value_bytes_max)
        self._value_bytes_max = value_bytes_max
        self._loop = Loop(self._flush)
        self._codec = Codec(self.workers)
        self._buffers = Buffers()
        self.company = Company(
            place,
            self,
            loop=self._loop,
            codec=self._codec,
            buffers=self._buffers,
            value_bytes_max=value_bytes_max,
        )
        if incarnation:
            self._codec.joined(name, incarnation)
            self.company.incarnations[name] = incarnation
        # What a session tells a node of peers is for its company.
        self.joined, self.lost = self.company.joined, self.company.lost
        self.received, self.adopt = self.company.received, self.company.adopt
        self._jobs = Jobs(worker, self._machine, self._loop, self._computed)
        self.port = Port(self)
        self._programs = Programs(self.port if name == place.main else None)
        self._counted: Mapping[str, Mapping[str, Any]] | None = None
        self._broken: BaseException | None = None
        self._closed = False
        self._hurries = False  # More than acknowledgements wait for the next flush.
        self._flushed_ns = 0
        self._background: threading.Thread | None = None
        self._loop.at(self._began_ns + SWEEP_NS, self._sweep)

    def __repr__(self) -> str:
        return f"Node({self.worker!r}, incarnation {self.incarnation})"

    # ------------------------------------------------------------------ what users see

    @property
    def current(self) -> Port:
        """The port of the program that runs on this thread.

        Raises:
            JdagError: none does, or this process is forked from that of the node.
        """
        self._loop.check_process()
        port = self._programs.current
        if port is None:
            self._refuse_thread()
        assert port is not None
        return port

    def _refuse_thread(self) -> None:
        if self._jobs.is_computing:
            raise JdagError(
                "what a worker computes, such as a hook, cannot use the cluster or "
                "fetch from it; only programs can"
            )
        raise other_thread(threading.current_thread().name)

    @property
    def incarnations(self) -> Mapping[str, int]:
        """How often each has joined anew, of the workers that have."""
        return self.company.incarnations

    @property
    def now_ns(self) -> int:
        """The time since the node was made, on this host's clock."""
        return clock_ns() - self._began_ns

    def info(self) -> Mapping[str, Mapping[str, Any]]:
        """For each worker, what it holds and what it has sent and computed so far."""
        return self._info(None) if self._counted is None else self._counted

    def _info(self, within_s: float | None) -> Mapping[str, Mapping[str, Any]]:
        own = partial(self._apart, self._own_info)
        return info_of_all(self._place, self.company, own, within_s)

    def graph(self, context: ContextId) -> dict[str, Drawing]:
        """The graph of a context as it is now: what each worker has of it."""
        of = (context.number, context.counter, context.incarnation)
        answers = self.company.ask_all({"what": "graph", "of": of}, or_raise=True)
        drawn: dict[str, Any] = {self.name: self._apart(self._engine.graph, context)}
        for worker, data in answers.items():
            drawn[worker] = self._codec.decode_drawing(bytes.fromhex(data))
        return {w: drawn[w] for w in self.workers if drawn.get(w) is not None}

    def settle(self) -> None:
        """Wait until nothing goes on anywhere; see `jdag.rpc.standing`."""
        settle(self.company, partial(self._apart, self._quiet), self._check_open)

    # ------------------------------------------------------------------ for programs

    def tell(self, event: Event, values: Sequence[tuple[Key, Any]] = ()) -> None:
        """Have the engine handle an event of a program here; see `Port.tell`."""
        loop = self._loop
        if self._broken or self._closed or self._jobs.computing:
            self._check_open()
        self._functions.exports.prepare(event, self.worker, self.company.allowed_on)
        with loop:
            if self._broken or self._closed:
                self._check_open()
            if isinstance(event, _WAITING):
                self._programs.ask(event.waiter, type(event).__name__)
            try:
                for key, value in values:
                    self._machine.values.put(key, value)
                if self._machine.values.bytes_peak > self._value_bytes_max:
                    check_values(event, self.worker, self._value_bytes_max)
                self._handle(event)
            except JdagError:
                self._drop([key for key, _ in values])
                raise
            if self._jobs.due or clock_ns() - self._flushed_ns > FLUSH_NS:
                loop.flush()
        if self.company.congested:
            loop.drive(lambda: self._closed or not self.company.congested)

    def number(self) -> int:
        """A number that no other waiter of the node has."""
        return self._programs.number()

    def wait(self, waiter: int) -> Any:
        """Block until that waiter is resumed; return what it was given."""
        programs = self._programs
        try:
            given = programs.given
            if waiter not in given:
                self._check_open()
                self._loop.drive(lambda: waiter in given or self._closed)
                if waiter not in given:
                    self._check_open()
            return programs.take(waiter)
        finally:
            programs.forget(waiter)

    def loss(self, worker: str) -> str | None:
        """Why that worker is gone; None if it is not."""
        return self.company.gone.get(worker)

    def _check_open(self) -> None:
        if self._broken is not None:
            said = f"worker {self.worker!r} broke down: {self._broken!r}"
            raise JdagError(said) from self._broken
        if self._closed:
            if self._programs.current not in (None, self.port):
                raise Over
            raise JdagError("this cluster is closed; make another one")
        if self._jobs.is_computing:
            self._refuse_thread()

    # ------------------------------------------------------------------ what it asks

    def _handle(self, event: Event) -> None:
        """Let the engine handle an event; carry out all effects, and then raise."""
        failed: Exception | None = None
        for effect in self._engine.handle(event):
            try:
                self._carry_out(effect)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _carry_out(self, effect: Any) -> None:
        kind = effect.__class__
        if kind is Send:
            self._send(effect)
        elif kind is Compute:
            self._jobs.add(effect.job)
        elif kind is Drop:
            self._drop(effect.keys)
        elif kind is Resume:
            self._resume(effect)
        elif kind is Alarm:
            when_ns = clock_ns() + effect.after_ns
            timer = self._loop.at(when_ns, partial(self._handle, effect.event))
            self._programs.alarm(effect.waiter, timer)
        else:
            assert kind is Spawn, effect
            port = Port(self)
            self._programs.start(port, partial(self._program, port, effect))

    def _send(self, send: Send) -> None:
        """Send a message; a program whose Run or Return cannot leave ends by that."""
        try:
            self._say(send)
        except Exception as error:  # Whatever it is, somebody waits for that program.
            ended = ended_by(error, send.message, self.worker)
            if isinstance(send.message, Return):
                self._say(replace(send, message=ended))
            else:
                self._loop.soon(partial(self._handle, Arrived(send.to, ended)))

    def _say(self, send: Send) -> None:
        peer = self.company.peer(send.to)
        if peer.lost:
            return  # It is about to be told that this worker is gone.
        message, values = send.message, ()
        if send.values:
            message, _, values = self._machine.load(message, send.values, self.worker)
        message, needed = self._functions.exports.outgoing(message, peer.allowed)
        for definition in needed:
            peer.define(definition.digest, definition.data)
        if send.zeros:
            peer.zero_bytes += sum([zero.nbytes for zero in send.zeros])
        peer.send(message, values)
        if message.__class__ is not Acknowledge:
            self._hurries = True

    def _drop(self, keys: Sequence[Key]) -> None:
        values = self._machine.values
        for key in keys:
            if key in values:
                values.drop(key)

    def _resume(self, resume: Resume) -> None:
        waiter, result = resume.waiter, resume.result
        programs = self._programs
        programs.silence(waiter)
        asked = programs.asked(waiter)
        if asked is None:
            return  # Who waited was interrupted, and is not there any more.
        if asked == Fetched.__name__:  # Before another event can replace a leaf.
            keys = [one for one in result if isinstance(one, AnyKey)]
            result = self._machine.fetched(result, self.worker)
            self._drop([key for key in keys if key.kind == "reading"])
        programs.give(waiter, result)
        self._loop.wake_waiting()

    def _program(self, port: Port, spawn: Spawn) -> None:
        """What a program's thread runs."""
        try:
            returned = self._run_program(port, spawn)
            check_size(spawn.function, "returned", returned.result)
        except Over:
            raise
        except BaseException as error:  # A KeyboardInterrupt of its own, say.
            name = name_of(spawn.function)
            failure = failure_of(error, self.worker, spawn.path, name)
            returned = Returned(spawn.context, spawn.path, None, failure)
        self.tell(returned)

    def _computed(self, job: Job, failure: Failure | None) -> None:
        self._handle(Computed(job.id, failure))

    def _flush(self) -> None:
        """At the end of a turn: let messages leave, and compute what takes little.

        What need not hurry waits for the first jobs, and leaves with what they make.
        """
        jobs = self._jobs
        for jobs_were_run in range(ROUNDS_MAX):
            if self._hurries or jobs_were_run or not jobs.due:
                self._hurries = False
                self.company.flush()
                self._flushed_ns = clock_ns()
            if not jobs.due:
                return
            jobs.run()
        self._loop.soon(self._loop.dirty)  # It is not to block.

    def _sweep(self) -> None:
        """Now and then: let go of memory for large values that nobody needs."""
        self._buffers.sweep()
        self._loop.at(clock_ns() + SWEEP_NS, self._sweep)

    # ------------------------------------------------------------------ what peers say

    def arrived(self, peer: Peer, message: Message, values: Sequence[Any]) -> None:
        """A message came; see `jdag.rpc.company.Host`."""
        try:
            message = self._functions.bind(message, peer.worker)
            if values:
                put = self._machine.values.put
                for key, value in zip(landing(message), values, strict=True):
                    put(key, value)
            self._handle(Arrived(peer.worker, message))
        except JdagError:
            raise
        except Exception as error:
            _log.exception("%s from %s", type(message).__name__, peer)
            raise ProtocolError(
                f"a {type(message).__name__} that makes no sense: {error!r}"
            ) from error

    def defined(self, digest: bytes, data: bytes) -> None:
        """A function came; see `jdag.rpc.company.Host`."""
        self._functions.define(digest, data)

    # ------------------------------------------------------------------ of peers

    def left(self, worker: str, why: str) -> None:
        """A peer is gone."""
        self._handle(Lost(worker, why))
        if named(worker) == self._place.main:
            self._end_soon()

    def back(self, worker: str, incarnation: int) -> None:
        """A worker of that name has joined anew."""
        self._handle(Joined(worker, incarnation))

    def given_up(self) -> None:
        """The others go on without this node."""
        self._end_soon()

    def answer(self, asked: Mapping[str, Any]) -> Any:
        """Return what another node asks for."""
        answers = {"info": self._own_info, "quiet": self._quiet}
        match asked:
            case {"what": str(what)} if what in answers:
                return answers[what]()
            case {"what": "graph", "of": [int(number), int(counter), int(incarnation)]}:
                drawing = self._engine.graph(ContextId(number, counter, incarnation))
                return encoded(drawing).hex()
            case _:
                raise ProtocolError(f"nobody asks {asked!r}")

    def _apart(self, look: Callable[..., Any], *args: Any) -> Any:
        """Return what a look gives that nobody else changes meanwhile."""
        with self._loop:
            return look(*args)

    def _quiet(self) -> dict[str, Any]:
        return quiet(self._jobs, self.company)

    def _own_info(self) -> dict[str, Any]:
        return info(self._engine, self._machine, self._jobs, self.company)

    # ------------------------------------------------------------------ the session's

    def begin(self) -> None:
        """Have a background thread drive whenever no program does."""
        run, name = partial(self.run, spin=False), f"loop of {self.worker}"
        self._background = threading.Thread(None, run, name, daemon=True)
        self._background.start()

    def run(self, *, spin: bool = True) -> None:
        """Drive whenever no program does, until the node is closed."""
        try:
            self._loop.background(spin=spin)
        except BaseException as error:
            self._broken = error
            self._loop.wake_waiting()
            raise

    def guard_signals(self) -> Callable[[], None]:
        """Hold back Ctrl-C while the engine thinks; return what undoes this."""
        return self._loop.guard_signals()

    def drain(self) -> None:
        """Finish what is under way, say goodbye, and let `run` return; any thread."""
        due_ns = clock_ns() + round(DRAIN_S * 1e9)
        while not self._closed and clock_ns() < due_ns:
            if self._apart(self._quiet)["idle"] and not self._programs.alive:
                break
            self.company.stopping.wait(DRAIN_LOOK_S)
        self.close("it was told to stop")

    def _end_soon(self) -> None:
        """The session is over: let `run` return."""
        self.company.stopping.set()
        self._loop.stop()

    def close(self, why: str = LEFT) -> None:
        """Leave: say so to all peers, and let go of everything; twice is once."""
        if self._closed:
            return
        if self.name == self._place.main and self._broken is None:
            self._counted = self._info(LAST_INFO_S)
        self._end_soon()
        with self._loop:
            if self._closed:
                return
            self._closed = True
            self.company.close(why if self._broken is None else broke(self._broken))
            self._jobs.close()
            self._programs.clear()
            self._engine = None
            self._machine.clear()
            self._buffers.clear()
            self._loop.close()
        background = self._background
        if background is not None and background is not threading.current_thread():
            background.join(timeout=5)
