"""Recovery: restores leaves and objects of a lost worker from copies.

Inputs:  assignments, drops, hosted objects and runs of the main program; its requests.
Outputs: copies of leaves; after a loss, the leaves and objects of the last commit, on
         workers that are not lost.
A commit saves the values of all leaves at one time.

Invariants: `_saved` holds each leaf's value at the last commit, either the array that
the program has put, or refs of copies, the first of which is on the leaf's own worker.
A commit replaces the copies of all changed leaves together, after all new copies have
arrived. If a worker is lost before that, no copy is replaced. A leaf in `_dirty` may
have a different value on its worker; a leaf in `_absent` does not exist there. `now`
maps names of workers to incarnations; only `moved` changes it, together with the ids of
leaves.
"""

# ruff: noqa: D417 - the first argument is the `self` of a method of `Cluster`.

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from jdag.compute.avals import frozen
from jdag.compute.pytrees import flatten, unflatten
from jdag.context import hosted
from jdag.context.leaves import Assignments
from jdag.context.outcome import nanoseconds
from jdag.context.refs import Leaf, Ref
from jdag.engine.protocol import LeafId, Worker, incarnated, incarnation_of, named
from jdag.errors import JdagError, JoinError, RecoveryError, WorkerLost, meant, unusable
from jdag.runtime.worker_runtime import ProgramPort

_Copies = tuple[Ref, ...]
TIMEOUT_S = 60.0


class Recovery:
    """The copies of leaves of a cluster, and the incarnations of its workers."""

    def __init__(self, cluster: Any) -> None:
        self.count = 0  # The number of recoveries.
        self.workers: tuple[str, ...] = cluster.workers
        self.here: str = cluster.here
        self.driver = cluster.driver
        self._cluster = cluster
        self._state = state = cluster.state
        self._port: ProgramPort = cluster._port
        state.recovery = cluster._assignments.recovery = self
        numbers: Mapping[str, int] = self.driver.incarnations
        self.current = {
            name: incarnated(name, numbers.get(name, 0)) for name in self.workers
        }
        self._replicates = False  # Whether peers have copies.
        self._to: str | None = None  # The peer of all workers; None: the next worker.
        self._copier = Assignments(state, self._port)  # Makes copies, without recovery.
        self._copied = weakref.WeakSet[Leaf]()
        self._saved: dict[Leaf, Any] = {}
        self._dirty: dict[Leaf, None] = {}
        self._absent: dict[Leaf, None] = {}
        self.stale: dict[str, None] = {}  # Workers that moved and are not restored yet.
        self._hosted: dict[hosted.Hosted, tuple[str, Any]] = {}  # Worker, arguments.

    # ------------------------------------------------------------------------- commits

    def assigned(self, leaves: Iterable[Leaf], written: Mapping[Leaf, Any]) -> None:
        """Copy leaves after an assignment, or save the values that were `written`.

        Raises:
            WorkerLost: a worker was lost before all copies arrived; new leaves are
                dropped.
        """
        if written:
            self._saved.update(written)
            for leaf in written:
                self._dirty.pop(leaf, None)
            return
        self._dirty.update(dict.fromkeys(leaves))
        try:
            self._commit()
        except WorkerLost as error:
            new = [leaf for leaf in leaves if leaf not in self._saved]
            self._cluster._assignments.drop(list(map(self._state.leaf_ref, new)))
            raise WorkerLost(
                f"{error}\nthis change of leaves is undone, since some copies have not "
                "arrived: call cluster.recover(), then repeat the change"
            ) from error.__cause__

    def staged(self, leaves: Iterable[LeafId]) -> None:
        """Copy leaves that a step of a plan has replaced; see `assigned`."""
        self.assigned([self._state.leaves[id] for id in leaves], {})

    @contextmanager
    def running(self) -> Iterator[None]:
        """Copy all leaves at the end of the block, in which any leaf may change.

        After a loss of a worker, leaves are not copied: `recover` undoes the changes.
        """
        self._dirty.update(dict.fromkeys(self._own()))
        try:
            yield
        except WorkerLost:
            raise
        except JdagError:
            self._ran()
            raise
        self._ran()

    def _ran(self) -> None:
        self.dropped([leaf for leaf in self._saved if leaf.dropped])
        self.assigned(self._own(), {})

    def replicate(self, to: str | None) -> None:
        """Make copies of all leaves on peers, and maintain them from now on."""
        before, dirty = (self._replicates, self._to), self._dirty
        self._replicates, self._to = True, to
        self._dirty = dict.fromkeys(self._own())
        try:
            self._commit()
        except WorkerLost:
            (self._replicates, self._to), self._dirty = before, dirty
            raise

    def dropped(self, leaves: Iterable[Leaf]) -> None:
        for leaf in leaves:
            for table in (self._saved, self._dirty, self._absent):
                table.pop(leaf, None)
        self._copier.forget()

    def _own(self) -> list[Leaf]:
        leaves = self._state.leaves.values()
        return [leaf for leaf in leaves if leaf not in self._copied]

    def _commit(self) -> None:
        """Copy all changed leaves. Raise WorkerLost if not all copies have arrived."""
        refs = list(map(self._state.leaf_ref, self._dirty))
        copies: dict[Leaf, _Copies] = {
            leaf: (copy,)
            for leaf, copy in zip(self._dirty, self._copies(refs), strict=True)
        }
        by_peer: dict[str, list[Ref]] = {}
        for ref in refs:
            if (peer := self._peer(ref.owner)) is not None:
                by_peer.setdefault(peer, []).append(ref)
        if by_peer:
            with self._cluster.context() as ctx:  # Waits until all have arrived.
                for peer, group in by_peer.items():
                    moved = self._copies(ctx.move(peer, group))
                    for ref, copy in zip(group, moved, strict=True):
                        copies[ref.leaf] += (copy,)  # type: ignore[index]
        self._saved.update(copies)
        self._dirty.clear()
        self._copier.forget()

    def _copies(self, refs: Sequence[Ref]) -> list[Ref]:
        copies: list[Ref] = self._copier.keep(list(refs), apart=True)
        self._copied.update([ref.leaf for ref in copies if ref.leaf is not None])
        return copies

    def _peer(self, worker: Worker) -> str | None:
        if not self._replicates:
            return None
        begin = self.workers.index(named(worker)) + 1
        peers = (*self.workers[begin:], *self.workers[:begin])
        if self._to is not None:
            peers = (self._to, *peers)
        return next((peer for peer in peers if self.current[peer] != worker), None)

    # ------------------------------------------------------------------------- objects

    def host(self, handle: hosted.Hosted, worker: str, *arguments: Any) -> None:
        leaves, treedef = flatten(arguments)
        fixed = [frozen(x) if isinstance(x, np.ndarray) else x for x in leaves]
        self._hosted[handle] = worker, unflatten(treedef, fixed)

    def unhost(self, handle: hosted.Hosted) -> None:
        self._hosted.pop(handle, None)

    def _host_again(self) -> None:
        """Make lost objects again, by the same factories in the same order."""
        state = self._state
        for handle, (worker, (factory, args, kwargs)) in self._hosted.items():
            if self._port.lost(handle.data.worker) is not None:
                name = f"cluster.recover of {handle!r}"
                task = hosted.launched(
                    state,
                    hosted.make,
                    name,
                    self.current[worker],
                    factory,
                    *args,
                    **kwargs,
                )
                handle.data = task.result().data
                state.handles[handle.data] = handle

    # ---------------------------------------------------------------------- recovering

    def lost(self, name: str) -> str | None:
        """Return why a worker is lost; None if it is not lost, or was replaced."""
        return self._port.lost(self.current[name])

    @property
    def lost_workers(self) -> list[str]:
        return [name for name in self.workers if self.lost(name) is not None]

    def moved(self, name: str, successor: Worker) -> None:
        """Replace a lost worker, and make the successor the owner of its leaves."""
        former = self.current[name]
        for worker in self.workers:  # Other workers may have been replaced by `former`.
            if self.current[worker] == former:
                self.current[worker] = successor
                self.stale[worker] = None
        leaves = self._state.leaves
        for leaf in [leaf for leaf in self._saved if leaf.id.worker == former]:
            leaf.moved(successor)
            self._absent[leaf] = None
        renamed = {leaf.id: leaf for leaf in leaves.values()}
        leaves.clear()
        leaves.update(renamed)

    def restore_all(self) -> None:
        """Restore leaves and objects. This can be repeated after a further loss."""
        self._dirty = dict.fromkeys(self._restored())
        self._commit()
        self._host_again()
        self.stale.clear()
        self.count += 1

    def _restored(self) -> list[Leaf]:
        """Restore leaves to the last commit; return leaves that have lost a copy."""
        sources: dict[Leaf, Any] = {}  # The saved value of each leaf to restore.
        lacking: list[Leaf] = []
        for leaf, saved in self._saved.items():
            source = saved
            if type(saved) is tuple:
                source = self._source(leaf, saved)
                if any([self._port.lost(copy.owner) is not None for copy in saved]):
                    lacking.append(leaf)
            if leaf in self._absent or leaf in self._dirty:
                sources[leaf] = source
        self._dirty.update(dict.fromkeys(sources))  # Until all values have arrived.
        self._restore(sources)
        return lacking

    def _source(self, leaf: Leaf, copies: _Copies) -> Ref:
        """Return a copy of a leaf that is not lost, preferably on its own worker."""
        alive = [copy for copy in copies if self._port.lost(copy.owner) is None]
        if not alive:
            raise RecoveryError(
                f"{leaf.id.label} is lost with worker {named(copies[0].owner)!r}, and "
                "there is no copy of it: cluster.replicate_leaves() keeps copies of "
                "leaves on peers. Call cluster.load or cluster.drop for this leaf, "
                "then cluster.recover again"
            )
        return next((c for c in alive if c.owner == leaf.id.worker), alive[0])

    def _restore(self, sources: dict[Leaf, Any]) -> None:
        with self._cluster.context() as ctx:  # Waits until all have arrived.
            for leaf, source in sources.items():
                if isinstance(source, Ref) and source.owner != leaf.id.worker:
                    sources[leaf] = ctx.move(self._state.leaf_ref(leaf).place, source)
            self._copier.restore(sources, self._absent)
            self._absent.clear()


def replicate_leaves(cluster: Any, to: str | None = None) -> None:
    """Keep copies of all leaves and optimizer states on peers from now on.

    `Cluster.recover` restores lost leaves from these copies. Changes of leaves (an
    optimizer's step, `update`, `keep`, `make`, `run`) then wait until the copies have
    arrived. If a worker is lost before that, the change raises WorkerLost, and
    `recover` restores the values before the change. Each leaf has one copy on its own
    worker and one on a peer; it has four copies while these are replaced. Values that
    are put or loaded later are copied when they first change; until then the caller
    holds them.

    Args:
        to: the worker that keeps the copies of all other workers' leaves. Its own
            leaves are copied to the next worker in order. None: each worker's leaves
            are copied to the next worker in order, so the loss of two neighbours at the
            same time loses leaves.

    Raises:
        JdagError: the worker is unknown, there is only one worker, or the cluster was
            made without recover=True.
        WorkerLost: a worker is lost.
    """
    recovery = _recovery_of(cluster, "cluster.replicate_leaves")
    if to is not None:
        _check_name(recovery, "to", to)
    if len(recovery.workers) == 1:
        raise JdagError("cluster.replicate_leaves: the cluster has only one worker")
    recovery.replicate(to)


def recover(
    cluster: Any,
    worker: str | None = None,
    to: str | None = None,
    timeout_s: float | None = TIMEOUT_S,
) -> None:
    """Wait until a lost worker has joined again, and restore its leaves and objects.

    `launch` starts the worker's process again. Leaves and optimizer states on all
    workers get the values of the last completed change, so they are of the same step.
    The values come from the copies of `replicate_leaves`, or from the caller for leaves
    that were put and not changed since. Refs to them stay usable, and plans are
    compiled again. A call that raised WorkerLost changed nothing: repeat it.

        try:
            with cluster.context() as ctx:
                ctx.backward(loss(ctx, batches[optimizer.steps]))
                optimizer.step(ctx)
        except jdag.errors.WorkerLost:
            cluster.recover()

    Contexts in which the lost worker took part raise WorkerLost when used. Objects of
    `cluster.host` are made again by their factories, without changes by later calls.
    The loss of the calling process cannot be recovered.

    Args:
        worker: the lost worker; None: all lost workers. In both cases the call waits
            for all workers that are lost or become lost meanwhile.
        to: None, or another worker that replaces the lost one from now on, for calls,
            leaves and objects. Results keep their bits only if nothing else of the
            program runs there, since sums and transfers depend on placement.
        timeout_s: the time limit in seconds of `cluster.now_ns`.

    Raises:
        RecoveryError: the worker is not lost, or has not joined in time; or a leaf has
            no copy. In the last case the error names the leaf, and nothing is restored;
            call `recover` again after `load` or `drop` of that leaf.
        RemoteError: the factory of an object raised an exception.
        JdagError: a worker is unknown, or cannot be replaced; or the cluster was made
            without recover=True.
    """
    recovery = _recovery_of(cluster, "cluster.recover")
    timeout_ns = nanoseconds(timeout_s)
    if worker is not None:
        _check_name(recovery, "worker", worker)
        if named(recovery.current[worker]) == recovery.here:
            raise JdagError(
                f"worker = {worker!r}: expected a lost worker, not the caller's own"
            )
    if to is not None:
        _check_name(recovery, "to", to)
        if worker is None or to == worker:
            raise JdagError(
                f"to = {to!r}: expected another worker than the lost one, which it "
                f"replaces, worker = {worker!r}"
            )
    due_ns = recovery.driver.now_ns + (timeout_ns or 1 << 53)
    _wait_for(recovery, worker, to, due_ns, f"timeout_s={timeout_s!r}")


def _recovery_of(cluster: Any, what: str) -> Recovery:
    cluster._check(what)
    recovery: Recovery | None = cluster._assignments.recovery
    if recovery is None:
        raise JdagError(
            f"{what} needs a cluster that the main program made with recover=True, as "
            "in jdag.launch(..., recover=True), jdag.simulate or jdag.connect"
        )
    return recovery


def _wait_for(
    recovery: Recovery, worker: str | None, to: str | None, due_ns: int, limit: str
) -> None:
    driver = recovery.driver

    def remaining_ns() -> int:
        remaining: int = max(due_ns - driver.now_ns, 0)
        return remaining

    def has_loss() -> bool:
        pending = [*recovery.stale, *recovery.lost_workers]
        return worker in pending if worker else bool(pending)

    if not driver.until(has_loss, remaining_ns()):
        subject = f"worker {worker!r} is not" if worker else "no worker is"
        raise RecoveryError(f"cluster.recover: {subject} lost")
    while True:
        while lost := recovery.lost_workers:  # Bounded by the time limit.
            if worker in lost and to is not None:
                if to in lost:
                    raise RecoveryError(f"to = {to!r}: this worker is lost too")
                recovery.moved(worker, recovery.current[to])
            else:
                _rejoin(recovery, lost[0], remaining_ns(), limit)
        try:
            recovery.restore_all()
            return
        except WorkerLost as error:
            if not driver.until(lambda: bool(recovery.lost_workers), remaining_ns()):
                raise RecoveryError(f"not restored within {limit}: {error}") from error


def _rejoin(recovery: Recovery, worker: str, within_ns: int, limit: str) -> None:
    driver = recovery.driver
    former = recovery.current[worker]
    name = named(former)
    why = recovery.lost(worker)
    try:
        joined = driver.rejoined(name, incarnation_of(former), within_ns)
    except JoinError as error:  # A further loss: the caller tries again.
        joined, why = within_ns > 0, str(error)
    if not joined:
        raise RecoveryError(
            f"worker {name!r} has not joined again within {limit}: {why}"
        )
    if incarnation_of(former) == driver.incarnations.get(name, 0):
        return
    recovery.moved(worker, incarnated(name, driver.incarnations[name]))


def _check_name(recovery: Recovery, key: str, name: object) -> None:
    workers = recovery.workers
    if name not in workers:
        hint = meant(name, workers) if isinstance(name, str) else ""
        allowed = f"one of {', '.join(map(repr, workers))}{hint}"
        raise JdagError(unusable(key, name, allowed))
