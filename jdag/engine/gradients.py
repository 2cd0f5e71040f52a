"""Complete cotangents: summed, passed to hooks, and made the gradients of leaves.

Inputs:  the addends of one place, in order; leaves that a pass has reached; its end.
Outputs: a Sum for several addends, a Fill for a zero; then one Apply for each hook, in
         the order in which the program attached them, each on the result of the one
         before. A value that needs none of these has no effect.

Invariants
- A hook is applied once in each pass that reaches its value, to the complete sum of all
  addends, never to a part of it.
- The contribution of a pass to a gradient is summed first, then passed to its hooks,
  then added: its bits do not depend on earlier passes.
- Gradients are staged in a pass, and only `End(finished)` commits them. Observing hooks
  run then, each once per pass, one after another in program order.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from jdag.engine.addends import Spot, Tree
from jdag.engine.graph import LeafEnd, LocalVertex, Value
from jdag.engine.protocol import (
    Apply,
    Failure,
    Fill,
    GradientKey,
    Hook,
    Job,
    Key,
    LeafId,
    Path,
    ScratchKey,
    Sum,
)
from jdag.engine.state import State
from jdag.engine.worker_pass import Pass

Then = Callable[[Key], None]
Told = Callable[[Failure | None], None]


class Gradients(Struct, eq=False):
    """Sums of cotangents, and the gradients of leaves, on one worker."""

    _state: State
    _compute: Callable[..., None]  # Requests a job of a pass, with a continuation.

    def total(
        self,
        live: Pass,
        path: Path,
        addends: tuple[Key, ...],
        then: Then,
        hooks: Sequence[Hook] = (),
        *,
        base: Key | None = None,
        aval: Any = None,
    ) -> None:
        """Sum base (which is kept) and addends, apply hooks, and call `then`.

        Without base and addends the sum is a zero of `aval`.
        """
        if len(addends) == 1 and base is None:
            self._hook(live, hooks, then, addends[0])
            return
        context, phase = live.fragment.context, live.number
        number = self._state.number_job()
        output = ScratchKey(context, number, 0)
        job: Job = Sum(number, context, phase, path, addends, base, output)
        if not addends and base is None:
            job = Fill(number, context, phase, path, aval, 0, output)
        self._compute(live, job, partial(self._hook, live, hooks, then, output))

    def _hook(self, live: Pass, hooks: Sequence[Hook], then: Then, key: Key) -> None:
        if not hooks:
            then(key)
            return
        hook, *rest = hooks
        context, number = live.fragment.context, self._state.number_job()
        output = ScratchKey(context, number, 0)
        job = Apply(number, context, live.number, hook.path, hook.function, key, output)
        go_on = partial(self._hook, live, rest, then, output)
        self._compute(live, job, go_on, hook.call_site)

    def put(
        self, live: Pass, vertex: LocalVertex, tree: Tree, spot: Spot, key: Key | None
    ) -> None:
        """Put one of many addends in its place, and request the sum that it completes.

        The vertex waits for that sum as for an addend.
        """
        found = tree.put(spot, key)
        if found is not None:
            above, keys = found
            live.dues[vertex].remaining += 1
            then = partial(self._summed, live, vertex, tree, above)
            self.total(live, vertex.path, keys, then)

    def _summed(
        self, live: Pass, vertex: LocalVertex, tree: Tree, spot: Spot, key: Key
    ) -> None:
        self.put(live, vertex, tree, spot, key)
        live.less(vertex)

    def reached(self, live: Pass, end: LeafEnd) -> None:
        """All cotangents of a leaf have arrived: sum them to the pass's gradient."""
        due = live.dues[end]
        addends = due.taken(0)
        attached = live.fragment.hooks.get(end.leaf, ())
        hooks = [hook for hook in attached if hook.replaces]
        seen = len(hooks) < len(attached)
        then = partial(self._observe if seen else self._add, live, end)
        if not addends and not hooks and end.gradient is not None:
            live.staged[end.leaf] = None  # Only zeros: the earlier gradient stays.
            if not seen:
                return
            then = partial(live.observed.__setitem__, end.leaf)
        self.total(live, (), addends, then, hooks, aval=end.aval)

    def _observe(self, live: Pass, end: LeafEnd, key: Key) -> None:
        """Keep this pass's gradient separately, for observing hooks."""
        live.observed[end.leaf] = key
        self.total(live, (), (), partial(self._add, live, end), base=key)

    def _add(self, live: Pass, end: LeafEnd, key: Key) -> None:
        """Add this pass's gradient to that of earlier passes; stage the result."""
        if end.gradient is None:
            live.staged[end.leaf] = key
            return
        stage = partial(live.staged.__setitem__, end.leaf)
        self.total(live, (), (key,), stage, base=end.gradient.stored)

    def commit(self, live: Pass, leaf: LeafId, staged: Key | None) -> None:
        """Commit a leaf's gradient: the staged one, or (None) the existing one."""
        end = live.fragment.leaves[leaf]
        key = GradientKey(live.fragment.context, leaf, live.number)
        if staged is not None:
            before, value = end.gradient, Value(key)
            value.stored, value.settled = staged, True
            end.gradient = value
            if before is not None:
                self._state.release((before,))
        assert end.gradient is not None, leaf
        end.gradient.users += 1
        live.fragment.values[key] = end.gradient

    def show(self, live: Pass, then: Told) -> None:
        """Run the observing hooks of a finished pass; then call `then`."""
        left = [
            (hook, key)
            for leaf, key in live.observed.items()
            for hook in live.fragment.hooks[leaf]
            if not hook.replaces
        ]
        left.sort(key=lambda pair: pair[0].path, reverse=True)
        self._show(live, left, None, then)

    def _show(
        self,
        live: Pass,
        left: list[tuple[Hook, Key]],
        first: Failure | None,
        then: Told,
    ) -> None:
        """Run the next observing hook of `left`; `first` is the first failure."""
        fragment = live.fragment
        if not left or fragment.gone:
            self._state.drop(live.observed.values())
            then(first)
            return
        hook, key = left.pop()

        def seen(failure: Failure | None, _: Job) -> None:
            raised = first
            if failure is not None and first is None:
                route = (self._state.worker,)
                raised = replace(failure, call_site=hook.call_site, route=route)
            self._show(live, left, raised, then)

        number, context = self._state.number_job(), fragment.context
        job = Apply(number, context, live.number, hook.path, hook.function, key, None)
        self._state.compute(job, seen, fragment)
