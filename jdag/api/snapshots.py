"""Snapshots: copies of leaves, each on its own worker and on a peer, or the caller.

A copy is a kept leaf, which is never assigned to, and goes with its last ref.
Invariant: a snapshot is returned, or completed, once all its copies have arrived.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from jdag.api.current_names import CurrentNames
from jdag.api.refs import Ref
from jdag.engine.protocol import LeafId, Worker
from jdag.errors import RecoveryError

# Of one leaf, by the place where each copy is; the first is the leaf's own place.
Copies = dict[str, Ref]
Snapshot = dict[LeafId, Copies]


class Snapshots:
    """Makes snapshots of the leaves of one main program.

    Args:
        cluster: the main program's `Cluster`.
        names: tells which workers share a process.
    """

    def __init__(self, cluster: Any, names: CurrentNames) -> None:
        self.every = 0  # Updates from copy to copy; 0: there are none on peers.
        self.to: str | None = None  # The peer of all others; None: each has its own.
        self.copied: dict[LeafId, None] = {}  # The leaves that are copies.
        self._cluster = cluster
        self._state = cluster.state
        self._names = names

    def taken(self, before: Snapshot, changed: Mapping[LeafId, bool]) -> Snapshot:
        """Copy leaves that have changed since a snapshot; return the one of now.

        Those with values of the caller's own have a copy there, if on no other peer.

        Raises:
            WorkerLost: not all copies have arrived.
        """
        cluster, leaves = self._cluster, self._state.leaves
        there = [leaves[id] for id in changed if id in leaves]
        refs = [self._state.leaf_ref(leaf) for leaf in there]
        mine = self._kept(refs)
        made: Snapshot = {
            ref.key.name: {ref.place: copy}
            for ref, copy in zip(refs, mine, strict=True)
        }
        far: dict[str, list[Ref]] = {}
        for ref in refs:
            is_given = changed[ref.key.name]
            peer = self._peer(ref.worker) or (cluster.here if is_given else None)
            if peer is not None and peer != ref.worker:
                far.setdefault(peer, []).append(ref)
        if far:
            with cluster.context() as ctx:
                for peer, those in far.items():
                    copies = self._kept(ctx.move(peer, those))
                    for ref, copy in zip(those, copies, strict=True):
                        made[ref.key.name][peer] = copy
        return {id: of for id, of in (before | made).items() if id in leaves}

    def _kept(self, refs: Sequence[Ref]) -> Sequence[Ref]:
        kept: Sequence[Ref] = self._cluster._assignments.keep(list(refs), apart=True)
        self.copied.update(dict.fromkeys([ref.key.name for ref in kept]))
        return kept

    def complete(self, snapshots: Sequence[Snapshot], stale: Container[Worker]) -> None:
        """Make the copies again that stale workers had, from those on others.

        Raises:
            RecoveryError: there is none of a leaf.
            WorkerLost: not all copies have arrived; then none is used.
        """
        lacking: dict[str, list[tuple[Copies, Ref]]] = {}
        for id, copies in [item for one in snapshots for item in one.items()]:
            held = [ref for ref in copies.values() if ref.worker not in stale]
            if not held:
                raise RecoveryError(
                    f"{id} is lost with worker {id.worker!r}, and there is no copy of "
                    "it: cluster.replicate_leaves() keeps copies of leaves on peers"
                )
            for place, ref in copies.items():
                if ref.worker in stale:
                    lacking.setdefault(place, []).append((copies, held[0]))
        made: list[tuple[Copies, str, Ref]] = []
        if lacking:
            with self._cluster.context() as ctx:
                for place, those in lacking.items():
                    kept = self._kept(ctx.move(place, [ref for _, ref in those]))
                    for (copies, _), copy in zip(those, kept, strict=True):
                        made.append((copies, place, copy))
        for copies, place, copy in made:  # Now they have all arrived.
            copies[place] = copy

    def _peer(self, worker: Worker) -> Worker | None:
        """The worker that keeps copies of a worker's leaves, if one does."""
        if not self.every:
            return None
        names, now = self._state.workers, self._names.workers
        begin = names.index(worker) + 1
        others = (*names[begin:], *names[: begin - 1])
        if self.to is not None:
            others = (self.to, *others)
        same = now.get(worker, worker)
        return next((one for one in others if now.get(one, one) != same), None)
