"""Complete cotangents: the addends of one place become one value, given to its hooks.

Inputs:  the addends of one place, in order.
Outputs: a Sum where there are several, a Fill where a zero is needed; then one Apply
         for each hook, in the order in which the program attached them, each on what
         the one before returned. A value that needs none of these has no effect.

Invariants: a hook is applied once in each pass that reaches its value, when every
addend has come, and never to a part of the sum. A worker is not passive while such a
job runs.
"""

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from jdag.engine.graph import Fragment
from jdag.engine.protocol import (
    Apply,
    Failure,
    Fill,
    Hook,
    Job,
    Key,
    Path,
    ScratchKey,
    Sum,
)
from jdag.engine.share import Pass
from jdag.engine.state import State

Then = Callable[[Key], None]


class Completion:
    """Makes one value of many.

    Args:
        state: of the engine.
        current: says of a job's pass, failure and outputs whether its result counts.
        settle: goes on with a pass after a job.
    """

    def __init__(
        self,
        state: State,
        current: Callable[[Fragment, Pass, Failure | None, tuple[Key, ...]], bool],
        settle: Callable[[Fragment, Pass], None],
    ) -> None:
        self._state = state
        self._current = current
        self._settle = settle

    def total(
        self,
        fragment: Fragment,
        live: Pass,
        path: Path,
        addends: tuple[Key, ...],
        then: Then,
        *,
        aval: Any = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        """Call `then` with the sum of the addends, after its hooks.

        Without addends it is a zero of `aval`.
        """
        if len(addends) > 1:
            self.sum(fragment, live, path, addends, then, hooks=hooks)
        elif addends:
            self._hook(fragment, live, addends[0], hooks, then)
        else:
            number, output = self._output(fragment)
            phase = live.number
            fill = Fill(number, fragment.context, phase, path, aval, 0, output)
            self._compute(fragment, live, fill, hooks, then)

    def sum(
        self,
        fragment: Fragment,
        live: Pass,
        path: Path,
        addends: tuple[Key, ...],
        then: Then,
        *,
        base: Key | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        """Call `then` with the sum: `base` first, which stays, then the addends."""
        number, output = self._output(fragment)
        phase = live.number
        job = Sum(number, fragment.context, phase, path, addends, base, output)
        self._compute(fragment, live, job, hooks, then)

    def _output(self, fragment: Fragment) -> tuple[int, Key]:
        number = self._state.number_job()
        return number, ScratchKey(fragment.context, number, 0)

    def _hook(
        self,
        fragment: Fragment,
        live: Pass,
        key: Key,
        hooks: Sequence[Hook],
        then: Then,
    ) -> None:
        if not hooks:
            then(key)
            return
        hook, *rest = hooks
        number, output = self._output(fragment)
        context, phase = fragment.context, live.number
        job = Apply(number, context, phase, hook.path, hook.function, key, output)
        self._compute(fragment, live, job, rest, then, hook.call_site)

    def _compute(
        self,
        fragment: Fragment,
        live: Pass,
        job: Job,
        hooks: Sequence[Hook],
        then: Then,
        call_site: str = "",
    ) -> None:
        live.computing += 1
        self._state.compute(job, self._done, fragment, (live, hooks, then, call_site))

    def _done(
        self,
        failure: Failure | None,
        fragment: Fragment,
        owner: tuple[Pass, Sequence[Hook], Then, str],
        job: Job,
    ) -> None:
        live, hooks, then, call_site = owner
        assert isinstance(job, Sum | Fill | Apply), job
        assert job.output is not None, job
        if failure is not None and call_site:
            failure = replace(failure, call_site=call_site)
        if self._current(fragment, live, failure, (job.output,)):
            self._hook(fragment, live, job.output, hooks, then)
            self._settle(fragment, live)
