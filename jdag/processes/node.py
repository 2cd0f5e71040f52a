"""A node: the engine and the values of one worker of a session, in a process.

A node has one loop (`jdag.processes.net.loop`). Connections convert received bytes to
events (`jdag.processes.net.connection`). The node passes each message to the engine and
carries out the engine's effects: messages to peers, jobs (`jdag.processes.jobs`), and
programs, each on a separate thread. Messages and effects are handled with the loop lock
held, on a thread that waits for a result or on the background thread.

Invariants: the effects of an event are carried out in order and before the next event.
After `close` the node handles no event, sends no message and starts no job, and waiting
programs are interrupted.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from msgspec.structs import replace

from jdag.compute.buffers import Buffers
from jdag.compute.machine import Machine
from jdag.engine import Engine
from jdag.engine.protocol import (
    ACKNOWLEDGED,
    FROM_OWNER,
    Alarm,
    Arrived,
    Event,
    Job,
    Key,
    Listed,
    Message,
    Return,
    Returned,
    Run,
    Send,
    Skip,
    Spawn,
    Worker,
    check_owner,
    incarnated,
)
from jdag.errors import JdagError, other_thread
from jdag.processes.functions.code_fingerprint import coded_name
from jdag.processes.functions.decoder import BOUND, FunctionDecoder
from jdag.processes.functions.encoder import NAMING, check_size
from jdag.processes.jobs import Jobs
from jdag.processes.net import receiving
from jdag.processes.net.connection import Connection
from jdag.processes.net.large_values import Delivery
from jdag.processes.net.loop import PROCESS, Loop, clock_ns
from jdag.processes.node_queries import NodeQueries
from jdag.processes.node_trace import TraceCollector, journal_of, recording_of
from jdag.processes.peers import LEFT, PeerTable, broke
from jdag.processes.session.session_info import SessionInfo
from jdag.processes.step_runner import StepRunner
from jdag.processes.stuck import Waits
from jdag.runtime.failures import failure_of
from jdag.runtime.trace import Trace
from jdag.runtime.waiters import Cancel, Waiters
from jdag.runtime.worker_runtime import (
    ProgramPort,
    RunProgram,
    WorkerRuntime,
    run_and_report,
)
from jdag.wire.messages import Codec

DRAIN_S, DRAIN_LOOK_S = 30.0, 0.05
LAST_INFO_S = 1.0  # Time limit of `close` for the statistics of other workers.
FLUSH_NS = 100_000  # The outputs of all events in this period are sent at once.
SWEEP_NS = 10**9  # Receive buffers unused for this long are freed.
ROUNDS_MAX = 64

_log = logging.getLogger(__name__)


class SessionOver(BaseException):
    """Raised in a program when it calls jdag after the session has ended.

    This ends the program's thread, which cannot be ended from outside. The class is not
    a subclass of Exception, so that `except Exception` in a program does not catch it.
    """


class Node:
    """One worker of a session, in this process."""

    session: Any = None  # On main: the `Session`.
    launch: Any = None  # On main: the launched processes.

    def __init__(
        self,
        session: SessionInfo,
        *,
        run_program: RunProgram,
        functions: FunctionDecoder,
    ) -> None:
        self.name = name = session.worker
        self.workers = tuple(session.settings.workers)
        self.incarnation = incarnation = session.members.incarnation
        self.worker = incarnated(name, incarnation)
        self._session = session
        self._began_ns = clock_ns()
        self._run_program = run_program
        self._functions = functions
        self._loop = Loop(self._flush)
        self.guard_signals = self._loop.guard_signals
        self._codec = Codec(self.workers, coded_name)
        self._buffers = Buffers()
        losses: dict[str, str] = {}
        self._recording = recording = recording_of(session, self._record_no_more)
        self._waiters = Waiters()
        self._host = host = self._make_host(losses)
        self.peers = peers = PeerTable(
            session,
            loop=self._loop,
            codec=self._codec,
            losses=losses,
            connect=self._connector(),
            tell=self._host.handle,
            answer=self._answer,
        )
        if incarnation:
            self._codec.joined(name, incarnation)
            peers.incarnations[name] = incarnation
        self._about_peer: Mapping[type, Callable[[Connection, Any], None]] = {
            receiving.Control: peers.control,
            receiving.Broken: peers.redial,
            receiving.Failed: peers.failed,
            receiving.Exhausted: peers.exhausted,
        }
        self.joined, self.lost = peers.joined, peers.lost
        self.received, self.adopt = peers.received, peers.adopt
        self.incarnations = peers.incarnations
        self._jobs = Jobs(host, self._loop, session.steps, recording)
        host.engine.drive(StepRunner(host, self._jobs, peers))
        queries = NodeQueries(host, peers, self._jobs, self._check_open, recording)
        self._queries = queries
        self.graph, self.settle = queries.graph, queries.settle
        self.times = queries.times
        main = name == session.main
        self._collector: TraceCollector | None = None
        if recording is not None and main:
            self._collector = TraceCollector(recording, peers, self._began_ns)
        self.port = ProgramPort(self._host)
        self._thread_local = threading.local()  # `port`: port of this thread's program.
        self._thread_local.port = self.port if main else None
        self._running: dict[threading.Thread, None] = {}  # Excludes the main program.
        self._waits = Waits(queries, self._waiters, running=self._running, main=main)
        self._counted: Mapping[str, Mapping[str, Any]] | None = None
        self._broken: BaseException | None = None
        self._closed = False
        self._trace: Trace | None = None
        self._congested = False  # Whether programs wait until output has been sent.
        self._flushed_ns = 0
        self._background: threading.Thread | None = None
        self._loop.at(self._began_ns + SWEEP_NS, self._sweep)

    def _make_host(self, losses: Mapping[str, str]) -> WorkerRuntime:
        recorder = None if self._recording is None else self._recording.recorder
        host = WorkerRuntime(
            self.worker,
            Engine(self.name, self.workers, self.incarnation),
            Machine("real", leaving_bytes_max=self._session.settings.value_bytes_max),
            driver=self,
            waiters=self._waiters,
            lost=losses,
            value_bytes_max=self._session.settings.value_bytes_max,
            recorder=recorder,
        )
        host.journal = self._journal = journal_of(self._session)
        return host

    def _connector(self) -> Callable[[str, int], Connection]:
        return partial(
            Connection,
            loop=self._loop,
            codec=self._codec,
            buffers=self._buffers,
            deadline_ns=round(self._session.settings.deadline_s * 1e9),
            value_bytes_max=self._session.settings.value_bytes_max,
            handle=self._receive,
            sends=None if self._recording is None else self._recording.sent,
        )

    def _answer(self, query: Mapping[str, Any]) -> Any:
        if query == {"what": "rest"}:
            return self._waits.rest()
        return self._queries.answer(query)

    def __repr__(self) -> str:
        return f"Node({self.worker!r}, incarnation {self.incarnation})"

    @property
    def current(self) -> ProgramPort:
        """The port of this thread's program.

        Raises JdagError if the thread has no program, or in a forked process.
        """
        if PROCESS["id"] != self._loop.process:
            self._loop.check_process()
        port: ProgramPort | None = getattr(self._thread_local, "port", None)
        if port is None:
            self._refuse_thread()
        return port

    def _refuse_thread(self) -> NoReturn:
        if self._jobs.is_computing:
            raise JdagError(
                "a hook or a called function cannot use the cluster or fetch values; "
                "only programs can"
            )
        raise other_thread(threading.current_thread().name)

    @property
    def now_ns(self) -> int:
        return clock_ns() - self._began_ns

    def info(self) -> Mapping[str, Mapping[str, Any]]:
        return self._counted or self._queries.info(None)

    @property
    def trace(self) -> Trace | None:
        """On main, the trace of all nodes so far. None if tracing is off."""
        if self._collector is not None and not self._closed:
            self._trace = self._collector.trace()
        return self._trace

    def sample_clocks(self) -> None:
        if self._collector is not None:
            self._collector.sample()

    def _record_no_more(self) -> None:
        self._host.recorder = None

    def tell(
        self, port: ProgramPort, event: Event, values: Sequence[tuple[Key, Any]]
    ) -> None:
        loop = self._loop
        if self._broken or self._closed or self._jobs.computing:
            self._check_open()
        if event.__class__ in NAMING:
            self._functions.encoder.prepare(event, self.worker, self.peers.allowed_on)
        with loop:
            if self._broken or self._closed:
                self._check_open()
            self._host.tell(port, event, values)
            if self._jobs.due or clock_ns() - self._flushed_ns > FLUSH_NS:
                loop.flush()
        if self._congested:
            loop.drive(lambda: self._closed or not self.peers.congested)

    def wait(self, port: ProgramPort, waiter: int) -> tuple[Any, int]:
        results = self._waiters.results
        if waiter not in results:
            if self._broken or self._closed or self._jobs.computing:
                self._check_open()
            users = port is self.port and self.name == self._session.main
            self._waits.block(waiter, users=users)
            if waiter not in results:
                self._check_open()
        return results[waiter]

    def until(self, holds: Callable[[], bool], within_ns: int) -> bool:
        self._loop.drive_until(lambda: self._closed or holds(), within_ns)
        self._check_open()
        return holds()

    def _check_open(self) -> None:
        if self._broken is not None:
            text = f"internal error on worker {self.worker!r}: {self._broken!r}"
            raise JdagError(text) from self._broken
        if self._closed:
            if getattr(self._thread_local, "port", None) not in (None, self.port):
                raise SessionOver
            raise JdagError("this cluster is closed; create another one")
        if self._jobs.is_computing:
            self._refuse_thread()

    def transmit(
        self,
        host: WorkerRuntime,
        send: Send,
        message: Message,
        values: tuple[tuple[Key, ...], tuple[Any, ...]],
        cause: int,
    ) -> None:
        """Send a message. If a Run or Return cannot be sent, its program fails."""
        peer = self.peers.connections.get(send.to) or self.peers.peer(send.to)
        if peer.lost:
            return  # `send.to` was notified of its loss.
        if send.zeros:
            peer.sent.zero_bytes += sum([zero.nbytes for zero in send.zeros])
        causes: tuple[int, ...] = ()
        if self._recording is not None:
            causes = self._recording.causes(cause, values[0])
        try:
            if message.__class__ in NAMING:
                encoder = self._functions.encoder
                message, needed = encoder.outgoing(message, peer.allowed)
                for definition in needed:
                    peer.define(definition.digest, definition.data)
            peer.send(message, values[1], causes)
        except Exception as error:  # Otherwise a program would wait forever.
            if message.__class__ in ACKNOWLEDGED:  # It is counted, but will not arrive.
                kind = type(message).__name__
                self.peers.lose(peer, f"a {kind} cannot be sent to it: {error}")
            ended = _ended_by(error, message, self.worker)
            if isinstance(message, Return):
                peer.send(ended, ())
            else:
                self._loop.soon(partial(host.handle, Arrived(send.to, ended)))
        self.peers.hurries = True

    def compute(self, host: WorkerRuntime, job: Job, cause: int) -> None:
        self._jobs.add(job, cause)

    def skip(self, host: WorkerRuntime, skip: Skip | Listed) -> None:
        self._jobs.skip(skip)

    def spawn(self, host: WorkerRuntime, spawn: Spawn, cause: int) -> None:
        port = ProgramPort(host, cause)
        name = f"program on {self.worker}"
        run = partial(self._jobs.under_settings, self._program, port, spawn)
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._running[thread] = None
        thread.start()

    def alarm(self, host: WorkerRuntime, alarm: Alarm, cause: int) -> Cancel:
        go_off = partial(host.handle, alarm.event, (cause,))
        return self._loop.at(clock_ns() + alarm.after_ns, go_off).cancel

    def wake(self, host: WorkerRuntime, waiter: int) -> None:
        self._loop.wake_waiting()

    def _program(self, port: ProgramPort, spawn: Spawn) -> None:
        self._thread_local.port = port
        try:
            run_and_report(self._checked, port, spawn, SessionOver)
        except SessionOver:
            return  # The session has ended.
        finally:
            del self._running[threading.current_thread()]

    def _checked(self, port: ProgramPort, spawn: Spawn) -> Returned:
        returned = self._run_program(port, spawn)
        check_size(spawn.function, "returned", returned.result)
        return returned

    def _flush(self) -> None:
        # Acknowledgements are sent in the same flush as the results of short jobs.
        jobs = self._jobs
        for jobs_were_run in range(ROUNDS_MAX):
            if self.peers.hurries or jobs_were_run or not jobs.due:
                self.send_out()
            if not jobs.due:
                return
            jobs.run()
        self._loop.dirty = True  # Keep the loop from blocking.

    def send_out(self) -> None:
        """Send what waits. No event is handled meanwhile."""
        unflushed, self.peers.hurries = self._loop.unflushed, False
        if unflushed and self._journal is not None:
            self._journal.flush()  # Inputs must be saved before their outputs.
        for _ in range(len(unflushed)):
            peer = unflushed.popleft()
            peer.flush()
            if self._congested or peer.waiting_bytes or peer.bulk.nbytes:
                self._congested = self.peers.congested
        self._flushed_ns = clock_ns()

    def _sweep(self) -> None:
        self._buffers.sweep()
        if self._journal is not None:
            self._journal.flush()
        self._loop.at(clock_ns() + SWEEP_NS, self._sweep)

    def _receive(self, peer: Connection, events: Sequence[receiving.PeerEvent]) -> None:
        # An authenticated peer is assumed to follow the protocol. If one of its
        # messages raises an error, here or in the engine, only that peer is lost.
        host = self._host
        for event in events:
            if peer.lost:
                return
            try:
                match event:
                    case Delivery():
                        message, worker = event.message, peer.worker
                        if message.__class__ in FROM_OWNER:
                            check_owner(message, worker, self.workers)
                        if message.__class__ in BOUND:
                            message = self._functions.bind(message, worker, self._codec)
                        number = (event.number,)
                        if is_counted := message.__class__ in ACKNOWLEDGED:
                            peer.order.handing(event)
                        record = host.arrived(worker, message, event.values, number)
                        if is_counted:
                            peer.handled.append(record)
                    case receiving.ReceivedAcknowledgement(message, number):
                        host.handle(message, (number,))
                    case receiving.ReceivedDefinition(digest, data):
                        self._functions.define(digest, data)
                    case _:
                        self._about_peer[event.__class__](peer, event[0])
            except JdagError as error:
                self.peers.lose(peer, f"it broke the protocol: {error}")
            except Exception as error:
                _log.exception("%s from %s", type(event).__name__, peer)
                kind = type(getattr(event, "message", event)).__name__
                why = f"a {kind} cannot be handled: {error!r}"
                self.peers.lose(peer, f"it broke the protocol: {why}")

    def begin(self) -> None:
        name = f"loop of {self.worker}"
        run = partial(self._jobs.under_settings, partial(self.run, spin=False))
        self._background = threading.Thread(None, run, name, daemon=True)
        self._background.start()

    def run(self, *, spin: bool = True) -> None:
        try:
            self._loop.background(spin=spin)
        except BaseException as error:
            self._broken = error
            self._loop.wake_waiting()
            raise

    def drain(self) -> None:
        """Finish pending work, then close the node. Callable from any thread."""
        due_ns = clock_ns() + round(DRAIN_S * 1e9)
        while not self._closed and clock_ns() < due_ns:
            if self._queries.quiet()["idle"] and not self._running:
                break
            self.peers.stopping.wait(DRAIN_LOOK_S)
        self.close("it stopped on request")

    def close(self, why: str = LEFT) -> None:
        """Notify the peers, leave the session and free all resources. Idempotent."""
        if self._closed:
            return
        if self.name == self._session.main and self._broken is None:
            self._counted = self._queries.info(LAST_INFO_S)
            self._trace = self.trace
        self.peers.end()
        with self._loop:
            if self._closed:
                return
            self._closed = True
            self.peers.close(why if self._broken is None else broke(self._broken))
            self._jobs.close()
            self._waiters.clear()
            self._host.clear()
            if self._journal is not None:
                self._journal.close()
            self._buffers.clear()
            self._loop.close()
        background = self._background
        if background is not None and background is not threading.current_thread():
            background.join(timeout=5)


def _ended_by(error: Exception, message: Message, worker: Worker) -> Return:
    """Return a Return message with the failure of a Run or Return that cannot be sent.

    For any other message, raise `error`.
    """
    if not isinstance(message, Run | Return):
        raise error
    failure = failure_of(error, worker, message.path, "")
    values = "arguments" if isinstance(message, Run) else "result"
    text = f"the {values} of a program cannot be sent: {failure.message}"
    failure = replace(failure, message=text)
    if isinstance(message, Return):
        return replace(message, result=None, failure=failure)
    return Return(message.context, message.path, None, failure, (), ())


MakeNode = Callable[[SessionInfo], Node]
