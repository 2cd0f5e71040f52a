"""Complete cotangents: sum their addends, apply hooks, accumulate leaf gradients.

Inputs:  the addends of one cotangent, in order; leaves that a pass has reached; the end
         of a pass.
Outputs: a Sum job for several addends, a Fill job for a zero; then an Apply job for
         each hook, in the order in which the program attached them, on the result of
         the previous hook. One addend without hooks needs no job.

Invariants
- A hook is applied once in each pass that reaches its value, to the sum of all addends,
  never to a partial sum.
- The contribution of a pass to a gradient is summed first, then passed to its hooks,
  then added: its bits do not depend on earlier passes.
- A pass stages gradients, and only `End(finished)` commits them. After the commit,
  observing hooks run, each once per pass, one after another in program order.
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

KeyCallback = Callable[[Key], None]
FailureCallback = Callable[[Failure | None], None]


class Gradients(Struct, eq=False):
    _state: State
    _compute: Callable[..., None]  # Requests a job of a pass, with a callback.

    def total(
        self,
        live: Pass,
        path: Path,
        addends: tuple[Key, ...],
        callback: KeyCallback,
        hooks: Sequence[Hook] = (),
        *,
        base: Key | None = None,
        aval: Any = None,
    ) -> None:
        """Sum `base` and the addends (none: a zero of `aval`), then apply hooks."""
        after = partial(self._hook, live, hooks, callback) if hooks else callback
        if len(addends) == 1 and base is None:
            after(addends[0])
            return
        context, phase = live.fragment.context, live.number
        number = self._state.number_job()
        output = ScratchKey(context, number, 0)
        job: Job = Sum(number, context, phase, path, addends, base, output)
        if not addends and base is None:
            job = Fill(number, context, phase, path, aval, 0, output)
        self._compute(live, job, partial(after, output))

    def _hook(
        self, live: Pass, hooks: Sequence[Hook], callback: KeyCallback, key: Key
    ) -> None:
        if not hooks:
            callback(key)
            return
        hook, *rest = hooks
        context, number = live.fragment.context, self._state.number_job()
        output = ScratchKey(context, number, 0)
        job = Apply(number, context, live.number, hook.path, hook.function, key, output)
        go_on = partial(self._hook, live, rest, callback, output)
        self._compute(live, job, go_on, hook.call_site)

    def put(
        self, live: Pass, vertex: LocalVertex, tree: Tree, spot: Spot, key: Key | None
    ) -> None:
        """Put an addend in a tree. If this completes a group, compute its sum."""
        completed = tree.put(spot, key)
        if completed is not None:
            above, keys = completed
            live.dues[vertex].remaining += 1
            callback = partial(self._summed, live, vertex, tree, above)
            self.total(live, vertex.path, keys, callback)

    def _summed(
        self, live: Pass, vertex: LocalVertex, tree: Tree, spot: Spot, key: Key
    ) -> None:
        self.put(live, vertex, tree, spot, key)
        live.count_down(vertex)

    def reached(self, live: Pass, end: LeafEnd) -> None:
        due = live.dues[end]
        addends = due.take(0)
        attached = live.fragment.hooks.get(end.leaf, ())
        hooks = [hook for hook in attached if hook.replaces]
        is_observed = len(hooks) < len(attached)
        callback = partial(self._observe if is_observed else self._add, live, end)
        if not addends and not hooks and end.gradient is not None:
            live.staged[end.leaf] = None  # Only zeros: the earlier gradient stays.
            if not is_observed:
                return
            callback = partial(live.observed.__setitem__, end.leaf)
        self.total(live, (), addends, callback, hooks, aval=end.aval)

    def _observe(self, live: Pass, end: LeafEnd, key: Key) -> None:
        live.observed[end.leaf] = key
        self.total(live, (), (), partial(self._add, live, end), base=key)

    def _add(self, live: Pass, end: LeafEnd, key: Key) -> None:
        if end.gradient is None:
            live.staged[end.leaf] = key
            return
        stage = partial(live.staged.__setitem__, end.leaf)
        self.total(live, (), (key,), stage, base=end.gradient.stored)

    def commit(self, live: Pass, leaf: LeafId, staged: Key | None) -> None:
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

    def show(self, live: Pass, callback: FailureCallback) -> None:
        remaining = [
            (hook, key)
            for leaf, key in live.observed.items()
            for hook in live.fragment.hooks[leaf]
            if not hook.replaces
        ]
        remaining.sort(key=lambda pair: pair[0].path, reverse=True)
        self._show(live, remaining, None, callback)

    def _show(
        self,
        live: Pass,
        remaining: list[tuple[Hook, Key]],
        first: Failure | None,
        callback: FailureCallback,
    ) -> None:
        fragment = live.fragment
        if not remaining or fragment.released:
            self._state.drop(live.observed.values())
            callback(first)
            return
        hook, key = remaining.pop()

        def seen(failure: Failure | None, _: Job) -> None:
            raised = first
            if failure is not None and first is None:
                route = (self._state.worker,)
                raised = replace(failure, call_site=hook.call_site, route=route)
            self._show(live, remaining, raised, callback)

        number, context = self._state.number_job(), fragment.context
        job = Apply(number, context, live.number, hook.path, hook.function, key, None)
        self._state.compute(job, seen, fragment)
