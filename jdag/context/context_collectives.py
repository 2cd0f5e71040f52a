"""Exchanges between several workers, as calls and moves of a context.

Each is differentiable: the vjp of a gather is a sum of shares and the other way round,
that of an all-to-all is one. Routes, and so the order of a sum, are those of
`jdag.collectives.routes`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jdag.collectives.routes import How
from jdag.context.cluster_state import ClusterState


class Exchanges:
    """The part of `Context` that copies and adds up between several workers."""

    _frame: Any
    state: ClusterState

    def replicate(self, workers: Sequence[str], refs: Any, how: How = "owner") -> Any:
        """Copy arrays to workers; cotangents are added on their way back.

        Args:
            workers: workers, or devices of them.
            refs: a pytree of refs; what is untracked is copied as well.
            how: "owner", "tree" or "ring"; see `jdag.collectives.routes`.

        Returns:
            A tuple of such pytrees of refs, one for each worker, in order.

        Raises:
            JdagError: no workers, one twice or unknown; no refs; no such `how`.
        """
        return self._exchanged("replicate", workers, refs, how)

    def all_reduce(self, refs_by_worker: Mapping[str, Any], how: How = "owner") -> Any:
        """Add up equal pytrees, such as gradients, for each worker that gives one.

        Args:
            refs_by_worker: for each worker, or device of one, its pytree of refs.
            how: "owner", "tree" or "ring"; see `jdag.collectives.routes`.

        Returns:
            For each worker the sum, the same to the last bit; tracked.

        Raises:
            JdagError: two are not equal in structure, shapes and dtypes, which cannot
                be added; or as `replicate` does.
        """
        return self._exchanged("all_reduce", refs_by_worker, how)

    def all_gather(self, refs_by_worker: Mapping[str, Any], how: How = "owner") -> Any:
        """Copy what each worker gives to all of them; cotangents go back added up.

        Args:
            refs_by_worker: for each worker, or device of one, its pytree of refs.
            how: "owner" sends each pytree to every other worker, "tree" hands it down a
                binary tree from its worker, "ring" around the ring: n - 1 steps.

        Returns:
            For each worker a tuple of all pytrees, in order.

        Raises:
            JdagError: as `replicate` does.
        """
        return self._exchanged("all_gather", refs_by_worker, how)

    def reduce_scatter(
        self, refs_by_worker: Mapping[str, Any], how: How = "owner"
    ) -> Any:
        """Add up shares: each worker gets the sum of those that all have for it.

        Args:
            refs_by_worker: for each worker, or device of one, a list of pytrees of
                refs, one for each worker, in order. Shares for one worker are equal.
            how: "owner" adds where the sum stays, its own share first, then the others
                in order; "tree" along a binary tree to there; "ring" from the next
                worker around to there: n - 1 steps, of a share each.

        Returns:
            For each worker the sum of its shares.

        Raises:
            JdagError: another number of shares; or as `all_reduce` does.
        """
        return self._exchanged("reduce_scatter", refs_by_worker, how)

    def all_to_all(self, refs_by_worker: Mapping[str, Any]) -> Any:
        """Send each worker the shares that all have for it.

        Args:
            refs_by_worker: as in `reduce_scatter`; shares need not be equal.

        Returns:
            For each worker a tuple of its shares, in the order of their senders.

        Raises:
            JdagError: another number of shares; or as `replicate` does.
        """
        return self._exchanged("all_to_all", refs_by_worker, "owner")

    def _exchanged(self, kind: str, *given: Any) -> Any:
        self._frame.check(f"ctx.{kind}")
        return getattr(self._frame.replicas, kind)(self, *given, self.state.place)
