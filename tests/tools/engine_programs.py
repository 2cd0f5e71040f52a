"""Random programs from our own seeds, run on engines and held against the oracle.

A plan is data: calls, programs on workers, reads and passes. `draw` makes one from a
`random.Random`; `Run` tells it to a net and to the oracle, step by step.
"""

import random
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jdag.engine.protocol import (
    Argument,
    Failure,
    LeafId,
    Mode,
    Outcome,
    PassResult,
)
from tests.tools.engine_net import Net, Scope, names, stopped
from tests.tools.engine_oracle import Expected, Oracle, Use
from tests.tools.engine_outages import known
from tests.tools.engine_values import Affine, Fuse, Linear

DEPTH_MAX = 2
FAN_MAX = 12


@dataclass(frozen=True)
class CallStep:
    """A call. With `branch`, that variable is fetched: is it odd, `other` is called."""

    worker: str
    function: Linear
    arguments: tuple[Use | int, ...]
    outputs: tuple[int, ...]
    branch: int | None = None
    other: Linear | None = None


@dataclass(frozen=True)
class ProgramStep:
    """A program on a worker."""

    worker: str
    body: tuple["Step", ...]


@dataclass(frozen=True)
class ReadStep:
    """Fetch variables."""

    variables: tuple[int, ...]


@dataclass(frozen=True)
class RaiseStep:
    """The program raises."""


@dataclass(frozen=True)
class PassStep:
    """A pass."""

    roots: tuple[int, ...]
    seeds: tuple[int | None, ...]
    retain: bool
    mode: Mode = Mode.FAST


@dataclass(frozen=True)
class HookStep:
    """Hook a variable: a hook that replaces, or of a leaf one that sees."""

    variable: int
    name: str
    scale: int
    shift: int
    replaces: bool
    fuse: Fuse | None = None


Step = CallStep | ProgramStep | ReadStep | RaiseStep | HookStep | PassStep


@dataclass(frozen=True)
class Plan:
    """A program: its workers, its leaves as (variable, worker, value), its steps."""

    workers: tuple[str, ...]
    leaves: tuple[tuple[int, str, int], ...]
    steps: tuple[Step, ...]


# ---------------------------------------------------------------------------- drawing


@dataclass
class Known:
    """A variable as the one who draws knows it."""

    tracked: bool
    call: int  # Which call made it; -1: a leaf.
    used: bool = False  # By something tracked.
    old: bool = False  # A pass may have spent what made it.


@dataclass
class Draft:
    """A plan that is being drawn."""

    rng: random.Random
    workers: tuple[str, ...]
    tidy: bool  # Everything tracked comes together in the roots.
    known: dict[int, Known] = field(default_factory=dict)
    calls: int = 0

    def variable(self, tracked: bool, call: int) -> int:
        number = len(self.known)
        self.known[number] = Known(tracked, call)
        return number

    def use(self, variables: Sequence[int]) -> Use:
        """An argument: mostly a late variable; an old one mostly with a stop."""
        variable = variables[-1 - int(len(variables) * self.rng.random() ** 2)]
        known = self.known[variable]
        stop = self.rng.random() < (0.97 if known.old else 0.05)
        known.used = known.used or (known.tracked and not stop)
        return Use(variable, stop)

    def call(
        self, arguments: Sequence[Use | int], outputs: int, visible: list[int]
    ) -> CallStep:
        rng = self.rng
        self.calls += 1
        tracked = any(
            isinstance(a, Use) and self.known[a.variable].tracked and not a.stopped
            for a in arguments
        )
        inexact = [rng.random() < 0.93 for _ in range(outputs)]
        if self.tidy and not any(inexact):
            inexact[0] = True
        rows = tuple(
            tuple(rng.randint(-2, 3) for _ in arguments) for _ in range(outputs)
        )
        made = tuple(
            self.variable(tracked and inexact[j], self.calls) for j in range(outputs)
        )
        places = tuple(j for j in range(outputs) if inexact[j])
        name = f"f{self.calls}"
        function = Linear(name, rows, outputs=places)
        branch, other = None, None
        if visible and rng.random() < 0.08:
            branch = rng.choice(visible)
            turned = tuple(tuple(1 - w for w in row) for row in rows)
            other = Linear(name + "'", turned, outputs=places)
        visible.extend(made)
        worker = rng.choice(self.workers)
        return CallStep(worker, function, tuple(arguments), made, branch, other)

    def steps(self, count: int, depth: int, visible: list[int]) -> list[Step]:
        rng = self.rng
        steps: list[Step] = []
        for _ in range(count):
            kind = rng.random()
            if kind < 0.13 and depth < DEPTH_MAX:
                steps.append(self.program(depth, visible))
            elif kind < 0.18:
                steps.append(ReadStep((rng.choice(visible), rng.choice(visible))))
            elif kind < 0.25:
                hub = self.use(visible)
                few = rng.randint(2, FAN_MAX)
                steps += [self.call([hub], 1, visible) for _ in range(few)]
            elif kind < 0.32:
                steps.append(self.move(visible))
            else:
                wide = rng.random() < 0.15
                fan_in = rng.randint(4, FAN_MAX) if wide else rng.randint(1, 3)
                fan_out = rng.choice((1, 1, 1, 2, 3, rng.randint(1, FAN_MAX)))
                arguments: list[Use | int] = [
                    rng.randint(-3, 3) if rng.random() < 0.12 else self.use(visible)
                    for _ in range(fan_in)
                ]
                steps.append(self.call(arguments, fan_out, visible))
        return steps

    def move(self, visible: list[int]) -> CallStep:
        use = self.use(visible)
        made = self.variable(self.known[use.variable].tracked and not use.stopped, -2)
        visible.append(made)
        move = Linear("move", ((1,),), outputs=(0,))
        return CallStep(self.rng.choice(self.workers), move, (use,), (made,))

    def program(self, depth: int, visible: list[int]) -> ProgramStep:
        """A program that sees what is visible here and returns some of its own."""
        inner = list(visible)
        body = self.steps(self.rng.randint(1, 4), depth + 1, inner)
        for made in inner[len(visible) :]:
            known = self.known[made]
            loose = known.tracked and not known.used
            if (self.tidy and loose) or self.rng.random() < 0.5:
                visible.append(made)
        return ProgramStep(self.rng.choice(self.workers), tuple(body))

    def loose(self, visible: Sequence[int]) -> list[int]:
        """Tracked and used by nobody; some outputs of a used call may stay so."""
        used = [known.call for known in self.known.values() if known.used]
        return [
            v
            for v in visible
            if (known := self.known[v]).tracked
            and not (known.used or known.old or known.call == -1)
            and not (known.call in used and self.rng.random() < 0.5)
        ]

    def roots(self, visible: list[int]) -> tuple[list[Step], tuple[int, ...]]:
        """Calls that bring loose ends together, and the roots."""
        rng = self.rng
        steps: list[Step] = []
        tracked = [
            v for v in visible if self.known[v].tracked and self.known[v].call != -1
        ]
        fresh = [v for v in tracked if not self.known[v].old] or tracked
        if not self.tidy and fresh:
            count = rng.randint(1, 3)
            return steps, tuple(rng.choice(fresh) for _ in range(count))
        self.tidy = True
        loose = self.loose(visible) or fresh[:1]
        wanted = rng.randint(1, 3)
        while len(loose) > wanted or not loose:
            few, loose = loose[:FAN_MAX], loose[FAN_MAX:]
            leaves = [v for v in visible if self.known[v].call == -1]
            arguments = [Use(v) for v in few or leaves]
            for use in arguments:
                self.known[use.variable].used = True
            step = self.call(arguments, 1, visible)
            steps.append(step)
            loose.append(step.outputs[0])
        if rng.random() < 0.2:
            loose.append(rng.choice(loose))
        return steps, tuple(loose)


def draw(rng: random.Random, workers: tuple[str, ...] = ()) -> Plan:
    """A random program, its passes included, on these workers or on one to six."""
    workers = workers or names(rng.randint(1, 6))
    draft = Draft(rng, workers, tidy=rng.random() < 0.7)
    leaves = tuple(
        (draft.variable(True, -1), rng.choice(workers), rng.choice((-2, -1, 1, 2, 3)))
        for _ in range(rng.randint(1, 5))
    )
    visible = [variable for variable, _, _ in leaves]
    steps: list[Step] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        steps += draft.steps(rng.randint(1, 8), 0, visible)
        calls, roots = draft.roots(visible)
        steps += calls
        retain = rng.random() < 0.5
        seeds = tuple(rng.choice((None, None, rng.randint(-2, 3))) for _ in roots)
        steps.append(PassStep(roots, seeds, retain))
        if retain and rng.random() < 0.5:
            steps.append(PassStep(roots, seeds, rng.random() < 0.5))
        if not (isinstance(last := steps[-1], PassStep) and last.retain):
            for variable in visible:
                known = draft.known[variable]
                known.old = known.call != -1
        for variable in visible:
            draft.known[variable].used = False
    modes = (Mode.FAST, Mode.SMART)
    return in_modes(Plan(workers, leaves, tuple(steps)), lambda: rng.choice(modes))


def in_modes(plan: Plan, mode: Callable[[], Mode]) -> Plan:
    """The same plan, each pass in the mode that is given next."""
    steps = tuple(
        replace(step, mode=mode()) if isinstance(step, PassStep) else step
        for step in plan.steps
    )
    return replace(plan, steps=steps)


# ---------------------------------------------------------------------------- running


class Broken(Exception):
    """A program was told of a failure that it did not expect."""


def _named(steps: Sequence[Step]) -> Iterator[int]:
    """The variables that steps name, each as often as they do."""
    for step in steps:
        match step:
            case CallStep(arguments=arguments, branch=branch):
                yield from [a.variable for a in arguments if not isinstance(a, int)]
                yield from [] if branch is None else [branch]
            case ProgramStep(body=body):
                yield from _named(body)
            case ReadStep(variables=variables) | PassStep(roots=variables):
                yield from variables
            case HookStep(variable=variable):
                yield variable
            case RaiseStep():
                pass


class Run:
    """One run of a plan on a net, held against the oracle at every pass and read.

    Programs drop what no later step names, sooner or later or never.
    """

    def __init__(self, plan: Plan, net: Net) -> None:
        self.plan = plan
        self.net = net
        self.oracle = Oracle()
        self.home = plan.workers[0]
        self.refs: dict[int, Argument] = {}
        self.leaf_ids: list[LeafId] = []
        self.passes: list[PassResult] = []
        self.hooks: list[Affine] = []
        self.timeout_ns: int | None = None  # The net rings when it likes.
        self.needs = Counter(_named(plan.steps))
        self.holders: dict[int, Scope] = {}
        self.discarded: list[Argument] = []
        # Of its own: what is dropped when does not change the order of events.
        self.rng = random.Random(str(net.rng.getstate()[1][:8]))
        self.drops = self.rng.choice((0.0, 0.5, 0.5, 1.0))
        for variable, worker, value in plan.leaves:
            ref = self.refs[variable] = net.put(worker, value, self.home)
            self.leaf_ids.append(ref.key.name)
            self.oracle.leaf(variable, ref.key.name, value)
        self.scope = net.open(self.home)

    def all(self) -> None:
        """Run every step from the top level."""
        for step in self.plan.steps:
            self.net.some()
            if isinstance(step, PassStep):
                self._drop(self.scope)
                self._pass(step)
                self.needs.subtract(_named([step]))
                continue
            body = self.stepped(self.scope, step)
            try:
                waiter = next(body)
                while True:
                    waiter = body.send(self.net.until(self.home, waiter))
            except StopIteration:
                pass

    def _body(
        self, scope: Scope, steps: Sequence[Step]
    ) -> Generator[int, Any, list[str]]:
        for step in steps:
            yield from self.stepped(scope, step)
        self._drop(scope)
        return ["returned"]

    def stepped(self, scope: Scope, step: Step) -> Generator[int, Any, None]:
        """A step, before which the program may drop what no later one names."""
        self._drop(scope)
        yield from self._step(scope, step)
        if not isinstance(step, ProgramStep):  # The steps of its body count by one.
            self.needs.subtract(_named([step]))

    def _drop(self, scope: Scope) -> None:
        for variable, holder in tuple(self.holders.items()):
            dead = holder is scope and not self.needs[variable]
            if dead and self.rng.random() < self.drops:
                del self.holders[variable]
                scope.discard(self.refs[variable])
                self.discarded.append(self.refs[variable])

    def kept(self) -> list[str]:
        """What is still stored although nothing is left to happen and name it."""
        found = []
        places, context = self.net.places, self.scope.context
        for ref in self.discarded:
            if ref.owner not in self.net.dead and ref.key in places[ref.owner].values:
                found.append(f"{ref.owner}: {ref.key}")
        engine: Any = places[self.home].engine
        top = engine._state.contexts[context].frames[()]
        copies = [key for of in top.moved.values() for key in of.values()]
        for name, place in places.items():
            received = [key for key in place.values if key.kind == "received"]
            found += [f"{name}: {key}" for key in received if key not in copies]
        return found

    def _step(self, scope: Scope, step: Step) -> Generator[int, Any, None]:
        match step:
            case CallStep(branch=None):
                self._call(scope, step, step.function)
            case CallStep(branch=branch, other=other):
                assert branch is not None and other is not None, step
                yield from self._read(scope, (branch,))
                odd = self.oracle.variables[branch].number % 2
                self._call(scope, step, other if odd else step.function)
            case ProgramStep(worker=worker, body=steps):

                def body(inner: Scope) -> Generator[int, Any, list[str]]:
                    return self._body(inner, steps)

                result, failure = yield scope.launch(worker, body)
                if failure is not None:
                    raise Broken(failure)
                assert result == ["returned"], result
                for variable, holder in self.holders.items():
                    if holder.path[: len(scope.path)] == scope.path:
                        self.holders[variable] = scope
            case ReadStep(variables=variables):
                yield from self._read(scope, variables)
            case HookStep(variable=variable, replaces=replaces):
                hook = Affine(step.name, step.scale, step.shift, step.fuse)
                self.hooks.append(hook)
                path = scope.attach(self.refs[variable], hook, replaces)
                self.oracle.attach(path, variable, hook, replaces)
            case RaiseStep():
                raise Broken(f"a program on {scope.worker} raised")
            case PassStep():
                raise AssertionError(step)

    def _call(self, scope: Scope, step: CallStep, function: Linear) -> None:
        arguments = [
            a
            if isinstance(a, int)
            else stopped(self.refs[a.variable])
            if a.stopped
            else self.refs[a.variable]
            for a in step.arguments
        ]
        inexact = [j in function.outputs for j in range(len(step.outputs))]
        worker = known(self.net, scope.worker, step.worker)
        made = scope.call(worker, function, *arguments, inexact=inexact)
        self.refs.update(zip(step.outputs, made, strict=True))
        self.holders.update(dict.fromkeys(step.outputs, scope))
        path = (*scope.path, scope.count)
        self.oracle.call(path, worker, function, step.arguments, step.outputs)
        for output, ref in zip(step.outputs, made, strict=True):
            assert ref.tracked == self.oracle.tracked(Use(output)), output

    def _read(
        self, scope: Scope, variables: Sequence[int]
    ) -> Generator[int, Any, None]:
        net = self.net
        waiter = net.asked(scope.worker, *(self.refs[v] for v in variables))
        answers = yield waiter
        for answer in answers:
            if isinstance(answer, Failure):
                raise Broken(answer)
        numbers = [number for number, _ in answers]
        assert numbers == [self.oracle.variables[v].number for v in variables]

    def _pass(self, step: PassStep) -> None:
        expected = self.oracle.differentiate(
            step.roots, step.seeds, step.retain, step.mode
        )
        roots = [self.refs[root] for root in step.roots]
        run = partial(
            self.scope.backward,
            *roots,
            retain=step.retain,
            seeds=step.seeds,
            mode=step.mode,
        )
        for hook in self.hooks:
            hook.given.clear()
        got = run(timeout_ns=self.timeout_ns)
        late = got.outcome is Outcome.EXPIRED
        if late and step.retain:  # What it left must not show in the next.
            got = run()
        self.passes.append(got)
        if got.failure is not None and got.failure.error != "GraphError":
            raise Broken(got.failure)
        if not late:
            self._check_hooks(expected)
        assert got.outcome is expected.outcome, (got, expected)
        assert got.owed == expected.owed
        if got.outcome is Outcome.FAILED:
            assert got.failure is not None, got
        assert got.leaves == tuple(sorted(expected.gradients))
        refs = [ref for ref in self.refs.values() if ref.key.name in got.leaves]
        numbers = self.net.fetch(self.home, *(self.scope.gradient(r) for r in refs))
        for ref, number in zip(refs, numbers, strict=True):
            if isinstance(number, Failure):
                raise Broken(number)
            assert number == expected.gradients[ref.key.name], (ref, number)

    def _check_hooks(self, expected: Expected) -> None:
        """Each hook of what the pass reached was given all of it, and once."""
        given = {hook.name: hook.given for hook in self.hooks if hook.given}
        wanted = {name: [number] for name, number in expected.given.items()}
        if expected.outcome is Outcome.FAILED:
            # How far it got is timing: the oracle stops where something is spent, and
            # a worker may have come further before it was told so.
            wanted = {name: wanted.get(name, them[:1]) for name, them in given.items()}
        assert given == wanted, (expected.outcome, given, wanted)
