"""Recovery: leaves and objects of a lost worker are made again, from copies.

Inputs:  what the main program assigns, drops, hosts and runs on workers.
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

from jdag.api import hosted
from jdag.api.leaves import Assignments
from jdag.api.refs import Leaf, Ref
from jdag.compute.avals import frozen
from jdag.compute.pytrees import flatten, unflatten
from jdag.engine.protocol import LeafId, Worker, incarnated, named
from jdag.errors import JdagError, RecoveryError, WorkerLost
from jdag.runtime.host import Port

Copies = tuple[Ref, ...]


class Recovery:
    """The copies of one main program, and where its workers are now.

    Args:
        cluster: the main program's `Cluster`.
    """

    def __init__(self, cluster: Any) -> None:
        self.count = 0  # Of recoveries.
        self.workers: tuple[str, ...] = cluster.workers
        self.here: str = cluster.here
        self.driver = cluster.driver
        self._cluster = cluster
        self._state = state = cluster.state
        self._port: Port = cluster._port
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
        made: dict[Leaf, Copies] = {leaf: (copy,) for leaf, copy in near}
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

    def _source(self, leaf: Leaf, copies: Copies) -> Ref:
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
