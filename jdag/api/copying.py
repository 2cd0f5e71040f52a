"""New leaves of values that are on workers already."""

from collections.abc import Callable
from typing import Any

from jdag.api.leaves import Assignments


class Copying:
    """The part of a `Cluster` that makes leaves of what refs name, where it is."""

    _check: Callable[[str], None]
    _assignments: Assignments

    def copy(self, refs: Any, *, tracked: bool = True) -> Any:
        """Copy leaves where they are, such as for a target network or an average.

        An average is then kept by `update`, as in

            average = cluster.copy(params, tracked=False)
            cluster.update(lambda old, new: 0.99 * old + 0.01 * new, average, params)

        Args:
            refs: a pytree of leaves; of one that is there twice there is one copy.
            tracked: False for copies without gradients; else those of tracked leaves
                have them.

        Returns:
            The same pytree of refs to new leaves, which hold the newest versions.

        Raises:
            JdagError, WorkerLost: something is no leaf, or its worker is gone.
        """
        self._check("cluster.copy")
        return self._assignments.copy(refs, tracked)

    def keep(self, refs: Any) -> Any:
        """Carry values of an open context over to later ones, without fetching them.

        Each stays where it is, as an untracked leaf, until its last ref is gone, or
        `drop`; what a program of `run` returns, until `drop`.

        Args:
            refs: a pytree of refs, such as the hidden state of a recurrent network.

        Returns:
            The same pytree of untracked refs, which any context may use.

        Raises:
            ContextError: the context of a ref is not open, or of another program.
            JdagError, WorkerLost: a leaf of the pytree is no ref, or its worker gone.
        """
        self._check("cluster.keep")
        return self._assignments.keep(refs)
