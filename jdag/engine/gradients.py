"""The gradients of leaves: staged in a pass, committed by its end, seen by hooks.

Inputs:  leaves whose cotangents of a pass are complete; the end of a pass.
Outputs: sums, and after a finished pass one Apply for each hook on a gradient.

Invariants
- What a pass adds to a gradient is summed first, then handed to its hooks, then added:
  its bits do not depend on earlier passes.
- Only `End(finished)` commits (`jdag.engine.passes`). Hooks see what has been
  committed, each once per pass, one after another in program order.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from jdag.engine.complete import Completion
from jdag.engine.graph import Fragment, LeafEnd
from jdag.engine.protocol import Apply, Failure, Hook, Job, Key
from jdag.engine.share import Pass, ordered
from jdag.engine.state import State

Told = Callable[[Failure | None], None]


class Gradients:
    """The gradients of leaves on one worker."""

    def __init__(self, state: State, complete: Completion) -> None:
        self._state = state
        self._complete = complete

    def reached(self, fragment: Fragment, live: Pass, end: LeafEnd) -> None:
        """All cotangents of a leaf are here: together they are this pass's gradient."""
        due = live.dues[end]
        versions = zip(end.outputs, due.addends, strict=True)
        read = [value.key.index for value, addends in versions if addends]
        if read:
            live.oldest[end.leaf] = min(read)
        addends = ordered([addend for version in due.addends for addend in version])
        due.addends = []
        attached = fragment.hooks.get(end.leaf, ())
        hooks = [hook for hook in attached if hook.replaces]
        seen = len(hooks) < len(attached)
        then = partial(self._observe if seen else self._add, fragment, live, end)
        if not addends and not hooks and end.gradient is not None:
            live.staged[end.leaf] = None  # By zeros alone: what was there stays.
            if not seen:
                return
            then = partial(live.observed.__setitem__, end.leaf)
        self._complete.total(
            fragment, live, (), addends, then, aval=end.aval, hooks=hooks
        )

    def _observe(self, fragment: Fragment, live: Pass, end: LeafEnd, key: Key) -> None:
        """Keep this pass's gradient by itself, for hooks to see in the end."""
        live.observed[end.leaf] = key
        then = partial(self._add, fragment, live, end)
        self._complete.sum(fragment, live, (), (), then, base=key)

    def _add(self, fragment: Fragment, live: Pass, end: LeafEnd, key: Key) -> None:
        """Add this pass's gradient to that of the passes before; stage it."""
        stage = partial(live.staged.__setitem__, end.leaf)
        if end.gradient is None:
            stage(key)
        else:
            self._complete.sum(fragment, live, (), (key,), stage, base=end.gradient)

    def show(self, fragment: Fragment, live: Pass, then: Told) -> None:
        """Let hooks see what a finished pass has added; then call `then`."""
        left = [
            (hook, key)
            for leaf, key in live.observed.items()
            for hook in fragment.hooks[leaf]
            if not hook.replaces
        ]
        left.sort(key=lambda pair: pair[0].path, reverse=True)
        self._next(fragment, live, left, None, then)

    def _next(
        self,
        fragment: Fragment,
        live: Pass,
        left: list[tuple[Hook, Key]],
        first: Failure | None,
        then: Told,
    ) -> None:
        """Let the next of the hooks that are left see; `first` is the first failure."""
        if not left or fragment.gone:
            self._state.drop(live.observed.values())
            then(first)
            return
        hook, key = left.pop()
        number, context = self._state.number_job(), fragment.context
        job = Apply(number, context, live.number, hook.path, hook.function, key, None)
        owner = (live, left, first, hook, then)
        self._state.compute(job, self._seen, fragment, owner)

    def _seen(
        self, failure: Failure | None, fragment: Fragment, owner: Any, job: Job
    ) -> None:
        del job
        live, left, first, hook, then = owner
        if failure is not None and first is None:
            route = (self._state.worker,)
            first = replace(failure, call_site=hook.call_site, route=route)
        self._next(fragment, live, left, first, then)
