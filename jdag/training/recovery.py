"""Recovery: leaves and objects of a lost worker are made again, from copies.

Inputs:  what the main program assigns, drops, hosts and runs on workers, and asks for.
Outputs: copies of leaves; after a loss, the leaves and objects of the last commit, on
         workers that are there.
Invariants: `_saved` has the value of each leaf at the last commit: the array that the
program has put, or refs to copies of it, the first on the leaf's own worker. Leaves
that an assignment changes get new copies together, once all of these have arrived; if
a worker is lost before, it counts for none of them. A leaf in `_dirty` may have another
value on its worker, one in `_absent` has none there. `now` has the incarnation that is
meant by the name of a worker; it changes in `moved` alone, with the names of leaves.
"""

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
from jdag.errors import (
    JdagError,
    JoinError,
    RecoveryError,
    WorkerLost,
    meant,
    unusable,
)
from jdag.runtime.worker_runtime import ProgramPort

_Copies = tuple[Ref, ...]
TIMEOUT_S = 60.0


class Recovery:
    """The copies of one main program's `Cluster`, and where its workers are now."""

    def __init__(self, cluster: Any) -> None:
        self.count = 0  # Of recoveries.
        self.workers: tuple[str, ...] = cluster.workers
        self.here: str = cluster.here
        self.driver = cluster.driver
        self._cluster = cluster
        self._state = state = cluster.state
        self._port: ProgramPort = cluster._port
        state.recovery = cluster._assignments.recovery = self
        known: Mapping[str, int] = self.driver.incarnations
        self.now = {name: incarnated(name, known.get(name, 0)) for name in self.workers}
        self._replicates = False  # Whether copies are on peers, too.
        self._to: str | None = None  # The peer of all others; None: each has its own.
        self._copier = Assignments(state, self._port)  # Of what has no copies itself.
        self._copied = weakref.WeakSet[Leaf]()
        self._saved: dict[Leaf, Any] = {}
        self._dirty: dict[Leaf, None] = {}
        self._absent: dict[Leaf, None] = {}
        self.stale: dict[str, None] = {}  # Moved, and not all is made again.
        self._hosted: dict[hosted.Hosted, tuple[str, Any]] = {}  # Worker, arguments.

    # ------------------------------------------------------------------------- commits

    def assigned(self, leaves: Iterable[Leaf], given: Mapping[Leaf, Any]) -> None:
        """Leaves were assigned to: copy them, but those `given` values of the caller.

        Raises:
            WorkerLost: not all copies have arrived; then new leaves are dropped.
        """
        if given:
            self._saved.update(given)
            for leaf in given:
                self._dirty.pop(leaf, None)
            return
        self._dirty.update(dict.fromkeys(leaves))
        try:
            self._commit()
        except WorkerLost as error:
            new = [leaf for leaf in leaves if leaf not in self._saved]
            self._cluster._assignments.drop(list(map(self._state.leaf_ref, new)))
            raise WorkerLost(
                f"{error}\nno leaf counts as changed, since not all copies have "
                "arrived: cluster.recover(), then repeat what changes them"
            ) from error.__cause__

    def staged(self, leaves: Iterable[LeafId]) -> None:
        """A step of a plan has replaced leaves; see `assigned`."""
        self.assigned([self._state.leaves[id] for id in leaves], {})

    @contextmanager
    def running(self) -> Iterator[None]:
        """All leaves may change meanwhile; at the end they count as they are then.

        Not if a worker is lost: `recover` then puts them back.
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
        """Keep copies of all leaves on peers from now on; make the first ones."""
        before, dirty = (self._replicates, self._to), self._dirty
        self._replicates, self._to = True, to
        self._dirty = dict.fromkeys(self._own())
        try:
            self._commit()
        except WorkerLost:
            (self._replicates, self._to), self._dirty = before, dirty
            raise

    def dropped(self, leaves: Iterable[Leaf]) -> None:
        """Leaves were dropped: so are their copies."""
        for leaf in leaves:
            for table in (self._saved, self._dirty, self._absent):
                table.pop(leaf, None)
        self._copier.forget()

    def _own(self) -> list[Leaf]:
        """All leaves but copies."""
        leaves = self._state.leaves.values()
        return [leaf for leaf in leaves if leaf not in self._copied]

    def _commit(self) -> None:
        """Copy all that has changed; its values count from now on.

        Raises:
            WorkerLost: not all copies have arrived.
        """
        refs = list(map(self._state.leaf_ref, self._dirty))
        near = zip(self._dirty, self._kept(refs), strict=True)
        made: dict[Leaf, _Copies] = {leaf: (copy,) for leaf, copy in near}
        far: dict[str, list[Ref]] = {}
        for ref in refs:
            if (peer := self._peer(ref.owner)) is not None:
                far.setdefault(peer, []).append(ref)
        if far:
            with self._cluster.context() as ctx:  # Left once all have arrived.
                for peer, those in far.items():
                    moved = self._kept(ctx.move(peer, those))
                    for ref, copy in zip(those, moved, strict=True):
                        made[ref.leaf] += (copy,)  # type: ignore[index]
        self._saved.update(made)
        self._dirty.clear()
        self._copier.forget()

    def _kept(self, refs: Sequence[Ref]) -> list[Ref]:
        kept: list[Ref] = self._copier.keep(list(refs), apart=True)
        self._copied.update([ref.leaf for ref in kept if ref.leaf is not None])
        return kept

    def _peer(self, worker: Worker) -> str | None:
        """The name of the worker that keeps copies of a worker's leaves, or None."""
        if not self._replicates:
            return None
        begin = self.workers.index(named(worker)) + 1
        others = (*self.workers[begin:], *self.workers[:begin])
        if self._to is not None:
            others = (self._to, *others)
        return next((one for one in others if self.now[one] != worker), None)

    # ------------------------------------------------------------------------- objects

    def host(self, made: hosted.Hosted, worker: str, *given: Any) -> None:
        """An object was made on a worker, by a factory with these arguments."""
        leaves, treedef = flatten(given)
        kept = [frozen(one) if isinstance(one, np.ndarray) else one for one in leaves]
        self._hosted[made] = worker, unflatten(treedef, kept)

    def unhost(self, handle: hosted.Hosted) -> None:
        """An object was dropped."""
        self._hosted.pop(handle, None)

    def _host(self) -> None:
        """Make lost objects anew, by the same factories and in the same order."""
        state = self._state
        for handle, (worker, (factory, args, kwargs)) in self._hosted.items():
            if self._port.lost(handle.data.worker) is not None:
                name = f"cluster.recover of {handle!r}"
                of = state, hosted.make, name, self.now[worker], factory
                made: hosted.Hosted = hosted.launched(*of, *args, **kwargs).result()
                handle.data = made.data
                state.handles[handle.data] = handle

    # ---------------------------------------------------------------------- recovering

    def lost(self, name: str) -> str | None:
        """The reason why a worker is lost, and has no successor yet; else None."""
        return self._port.lost(self.now[name])

    @property
    def gone(self) -> list[str]:
        """The workers that are lost, and have no successor yet."""
        return [name for name in self.workers if self.lost(name) is not None]

    def moved(self, name: str, now: Worker) -> None:
        """What was on a lost worker is to be on this one."""
        former = self.now[name]
        for one in self.workers:  # Another may have been moved there.
            if self.now[one] == former:
                self.now[one] = now
                self.stale[one] = None
        leaves = self._state.leaves
        for leaf in [one for one in self._saved if one.id.worker == former]:
            leaf.moved(now)
            self._absent[leaf] = None
        renamed = {leaf.id: leaf for leaf in leaves.values()}
        leaves.clear()
        leaves.update(renamed)

    def again(self) -> None:
        """Make again all that was lost; repeatable if another worker is lost meanwhile.

        Raises:
            RecoveryError: there is no copy of a leaf. None is made again then.
            WorkerLost: a worker is lost.
        """
        self._dirty = dict.fromkeys(self._restored())
        self._commit()
        self._host()
        self.stale.clear()
        self.count += 1

    def _restored(self) -> list[Leaf]:
        """Give leaves the values of the last commit; return those that lack copies."""
        sources: dict[Leaf, Any] = {}  # Of leaves that get their values again.
        lacking: list[Leaf] = []
        for leaf, saved in self._saved.items():
            source = saved
            if type(saved) is tuple:
                source = self._source(leaf, saved)
                if any([self._port.lost(copy.owner) is not None for copy in saved]):
                    lacking.append(leaf)
            if leaf in self._absent or leaf in self._dirty:
                sources[leaf] = source
        self._dirty.update(dict.fromkeys(sources))  # Until all have arrived.
        self._restore(sources)
        return lacking

    def _source(self, leaf: Leaf, copies: _Copies) -> Ref:
        """A copy of a leaf that is left, on its own worker if there is one.

        Raises:
            RecoveryError: there is none.
        """
        held = [copy for copy in copies if self._port.lost(copy.owner) is None]
        if not held:
            raise RecoveryError(
                f"{leaf.id.label} is lost with worker {named(copies[0].owner)!r}, and "
                "there is no copy of it: cluster.replicate_leaves() keeps copies of "
                "leaves on peers. After cluster.load or drop of it recover once more"
            )
        return next((one for one in held if one.owner == leaf.id.worker), held[0])

    def _restore(self, sources: dict[Leaf, Any]) -> None:
        """Give leaves the values of these copies or arrays, each on its worker."""
        with self._cluster.context() as ctx:  # Left once all have arrived.
            for leaf, source in sources.items():
                if isinstance(source, Ref) and source.owner != leaf.id.worker:
                    sources[leaf] = ctx.move(self._state.leaf_ref(leaf).place, source)
            self._copier.restore(sources, self._absent)
            self._absent.clear()


class Recoverable:
    """The part of a `Cluster` that is about lost workers."""

    def replicate_leaves(self, to: str | None = None) -> None:
        """Keep copies of all leaves and states of optimizers on peers from now on.

        `Cluster.recover` makes lost leaves again from these. What changes leaves
        (a step of an optimizer, `update`, `keep`, `make`, `run`) then waits until the
        copies of what it changed have arrived, and counts only then; if a worker is
        lost before, it raises WorkerLost, and after `recover` all leaves are as before
        it. Each leaf has its copies twice, on its own worker and on its peer, and while
        they are replaced once more. What is put or loaded later stays with the caller
        until it changes.

        Args:
            to: the worker that keeps the copies, but those of its own leaves. None,
                and for these: the next one in the order of workers; two neighbours
                lost at once lose leaves then.

        Raises:
            JdagError: there is no such worker, or the cluster was made without
                recover=True.
            WorkerLost: a worker is lost.
        """
        recovery = self._recovery("cluster.replicate_leaves")
        if to is not None:
            _check_name(recovery, "to", to)
        if len(recovery.workers) == 1:
            raise JdagError("cluster.replicate_leaves: there is no other worker")
        recovery.replicate(to)

    def recover(
        self,
        worker: str | None = None,
        to: str | None = None,
        timeout_s: float | None = TIMEOUT_S,
    ) -> None:
        """Wait for a lost worker to join again, and make again what it held.

        With `launch` its process is started anew. Leaves and states of optimizers, on
        all workers, get the values that they had when the last change counted, so all
        are of the same step: from the copies that `replicate_leaves` keeps, or from the
        caller those that were put and not changed since. Refs to them stay usable, and
        plans are made anew. What raised WorkerLost has not happened: repeat it.

            try:
                with cluster.context() as ctx:
                    ctx.backward(loss(ctx, batches[optimizer.steps]))
                    optimizer.step(ctx)
            except jdag.errors.WorkerLost:
                cluster.recover()

        Contexts in which the lost worker took part are over: their use raises
        WorkerLost. Objects of `cluster.host` are made anew by their factories, without
        what calls have changed in them. Not covered: the loss of the caller.

        Args:
            worker: which; None: all that are lost. If others are lost too, or are
                lost meanwhile, they are waited for as well.
            to: None, or another worker that takes its place: calls on it, its leaves
                and its objects are there from now on. Bits stay the same if nothing
                else of the program runs on that one, since what is summed there, and
                what is sent, depends on placement.
            timeout_s: how long to wait, in seconds of `cluster.now_ns`.

        Raises:
            RecoveryError: the worker is not lost, or has not joined in time; or there
                is no copy of a leaf: names it, and none is made again. Another
                `recover` may follow, after `load` or `drop` of that leaf.
            RemoteError: the factory of an object raised.
            JdagError: there is no such worker, or no room for one; or the cluster was
                made without recover=True.
        """
        recovery = self._recovery("cluster.recover")
        timeout_ns = nanoseconds(timeout_s)
        if worker is not None:
            _check_name(recovery, "worker", worker)
            if named(recovery.now[worker]) == recovery.here:
                raise JdagError(f"worker = {worker!r} is the caller's own, not lost")
        if to is not None:
            _check_name(recovery, "to", to)
            if worker is None or to == worker:
                said = (
                    f"to = {to!r}: allowed is another worker, in place of one that is"
                )
                raise JdagError(f"{said} named first; this is {worker!r}")
        due_ns = recovery.driver.now_ns + (timeout_ns or 1 << 53)
        _wait_for(recovery, worker, to, due_ns, f"timeout_s={timeout_s!r}")

    def _recovery(self, what: str) -> Recovery:
        cluster: Any = self
        cluster._check(what)
        recovery: Recovery | None = cluster._assignments.recovery
        if recovery is None:
            raise JdagError(
                f"{what}: ask for it where the cluster is made, by the main program: "
                "jdag.launch(..., recover=True), or simulate or connect"
            )
        return recovery


def _wait_for(
    recovery: Recovery, worker: str | None, to: str | None, due_ns: int, limit: str
) -> None:
    """Make again what lost workers held, once there are others in their places."""
    driver = recovery.driver

    def within_ns() -> int:
        left_ns: int = due_ns - driver.now_ns
        return max(left_ns, 0)

    def noticed() -> bool:
        pending = [*recovery.stale, *recovery.gone]
        return worker in pending if worker else bool(pending)

    if not driver.until(noticed, within_ns()):
        who = f"worker {worker!r} is not" if worker else "no worker is"
        raise RecoveryError(f"cluster.recover: {who} lost")
    while True:
        while gone := recovery.gone:  # Bounded by the time limit.
            if worker in gone and to is not None:
                if to in gone:
                    raise RecoveryError(f"to = {to!r} is lost as well")
                recovery.moved(worker, recovery.now[to])
            else:
                _rejoin(recovery, gone[0], within_ns(), limit)
        try:
            recovery.again()
            return
        except WorkerLost as error:
            if not driver.until(lambda: bool(recovery.gone), within_ns()):
                raise RecoveryError(f"not within {limit}: {error}") from error


def _rejoin(recovery: Recovery, worker: str, within_ns: int, limit: str) -> None:
    """Wait until the process of a lost worker has been replaced."""
    driver = recovery.driver
    former = recovery.now[worker]
    name = named(former)
    why = recovery.lost(worker)
    try:
        joined = driver.rejoined(name, incarnation_of(former), within_ns)
    except JoinError as error:  # It was lost again while it joined: once more.
        joined, why = within_ns > 0, str(error)
    if not joined:
        said = f"worker {name!r} has not joined again within {limit}"
        raise RecoveryError(f"{said}: {why}")
    if incarnation_of(former) == driver.incarnations.get(name, 0):
        return
    recovery.moved(worker, incarnated(name, driver.incarnations[name]))


def _check_name(recovery: Recovery, key: str, name: object) -> None:
    workers = recovery.workers
    if name not in workers:
        hint = meant(name, workers) if isinstance(name, str) else ""
        allowed = f"one of {', '.join(map(repr, workers))}{hint}"
        raise JdagError(unusable(key, name, allowed))
