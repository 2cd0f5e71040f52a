"""Random programs on engines: a view of `random_programs`, held against an oracle.

Arrays are integers here and functions linear, so that gradients are exact and each
number says how it was made. What calls what where with which arguments is the plan's.
"""

import random
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from jdag.engine.protocol import Argument, Failure, LeafId, Mode, Outcome, PassResult
from tests.tools.engine_net import Net, Scope, stopped
from tests.tools.engine_oracle import Expected, Oracle
from tests.tools.engine_outages import known
from tests.tools.engine_values import Affine, Fuse, Linear
from tests.tools.random_functions import INEXACT, Hook
from tests.tools.random_hooks import with_hooks
from tests.tools.random_programs import Argument as PlanArgument
from tests.tools.random_programs import (
    Body,
    Branch,
    Call,
    Fetch,
    Invoke,
    Move,
    Pass,
    Plan,
    Step,
    Use,
    draw,
)
from tests.tools.random_source import named

HOOKED = 0.35  # That a hook comes before a step.


def drawn(seed: float, workers: tuple[str, ...] = ()) -> Plan:
    plan = draw(random.Random(seed), workers)
    return with_hooks(plan, random.Random(f"hooks {seed}"), HOOKED)


def expanded(plan: Plan) -> Plan:
    """The same program, each of whose activations has variables of its own.

    Parameters and what is returned go by the names of what they are.
    """
    names = {
        leaf.variable: Use(leaf.variable, not leaf.inexact) for leaf in plan.leaves
    }
    return replace(plan, steps=Expansion().steps(plan.steps, names))


class Expansion:
    """Renames the variables of steps; `names` has what those of an activation are."""

    def __init__(self) -> None:
        self.fresh = count(10_000)

    def steps(self, steps: Sequence[Step], names: dict[int, Use]) -> tuple[Step, ...]:
        return tuple([self.step(step, names) for step in steps])

    def step(self, step: Step, names: dict[int, Use]) -> Step:
        match step:
            case Call() | Move():
                arguments: Any = [_renamed(one, names) for one in step.arguments]
                for output in step.outputs:  # Both ways of a branch have the same.
                    names.setdefault(output, Use(next(self.fresh)))
                outputs = tuple([names[output].variable for output in step.outputs])
                return replace(step, arguments=tuple(arguments), outputs=outputs)
            case Fetch(variables=variables):
                return Fetch(tuple([names[one].variable for one in variables]))
            case Pass(roots=roots):
                return replace(
                    step, roots=tuple([names[one].variable for one in roots])
                )
            case Branch():
                above, below = (
                    self.steps(way, names) for way in (step.above, step.below)
                )
                variable = names[step.variable].variable
                return replace(step, variable=variable, above=above, below=below)
            case Hook():
                return replace(step, variable=names[step.variable].variable)
            case Invoke(body=body):
                pairs = zip(body.parameters, step.arguments, strict=True)
                inner: Any = {one: _renamed(given, names) for one, given in pairs}
                steps = self.steps(body.steps, inner)
                for output, returned in zip(step.outputs, body.returns, strict=True):
                    names[output] = inner[returned]
                alone = Body(body.name, (), steps, ())
                return Invoke(step.id, step.worker, alone, (), ())


def _renamed(argument: PlanArgument, names: Mapping[int, Use]) -> PlanArgument:
    if not isinstance(argument, Use):
        return argument
    use = names[argument.variable]
    return replace(use, stopped=use.stopped or argument.stopped)


def _named(steps: Sequence[Step]) -> Iterator[int]:
    for step in steps:
        yield from _named(step.body.steps) if isinstance(step, Invoke) else named(step)


class Broken(Exception):
    """A program was told of a failure that it did not expect."""


class Run:
    """One run of a plan on a net, held against the oracle at every pass and read.

    Programs drop what no later step names, sooner or later or never.

    Args:
        mode: of all passes; None: each has its own.
        fuses: of calls and hooks by their ids.
        raises: of calls of programs by their ids: after how many steps they raise.
    """

    def __init__(
        self,
        plan: Plan,
        net: Net,
        mode: Mode | None = None,
        fuses: Mapping[int, Fuse] | None = None,
        raises: Mapping[int, int] | None = None,
    ) -> None:
        self.steps = expanded(plan).steps
        self.net, self.mode = net, mode
        self.fuses, self.raises = fuses or {}, raises or {}
        self.oracle = Oracle()
        self.home = plan.home
        self.refs: dict[int, Argument] = {}
        self.leaf_ids: list[LeafId] = []
        self.passes: list[PassResult] = []
        self.hooks: list[Affine] = []
        self.timeout_ns: int | None = None  # The net rings when it likes.
        self.needs = Counter(_named(self.steps))
        self.holders: dict[int, Scope] = {}
        self.discarded: list[Argument] = []
        # Of its own: what is dropped when does not change the order of events.
        self.rng = random.Random(str(net.rng.getstate()[1][:8]))
        self.drops = self.rng.choice((0.0, 0.5, 0.5, 1.0))
        for leaf in plan.leaves:
            value = random.Random(repr(leaf)).choice((-2, -1, 1, 2, 3))
            ref = self.refs[leaf.variable] = net.put(leaf.worker, value, self.home)
            self.leaf_ids.append(ref.key.name)
            self.oracle.leaf(leaf.variable, ref.key.name, value)
        self.scope = net.open(self.home)

    def all(self) -> None:
        for step in self.steps:
            self.net.some()
            if isinstance(step, Pass):
                self._drop(self.scope)
                self._pass(step)
                self.needs.subtract(step.roots)
                continue
            body = self._stepped(self.scope, step)
            try:
                waiter = next(body)
                while True:
                    waiter = body.send(self.net.until(self.home, waiter))
            except StopIteration:
                pass

    def _body(self, scope: Scope, step: Invoke) -> Generator[int, Any, list[str]]:
        stop = self.raises.get(step.id)
        for inner in step.body.steps[:stop]:
            yield from self._stepped(scope, inner)
        if stop is not None:
            raise Broken(f"a program on {scope.worker} raised")
        self._drop(scope)
        return ["returned"]

    def _stepped(self, scope: Scope, step: Step) -> Generator[int, Any, None]:
        self._drop(scope)
        yield from self._step(scope, step)
        if not isinstance(step, Invoke):  # The steps of its body count by one.
            self.needs.subtract(named(step))

    def _drop(self, scope: Scope) -> None:
        for variable, holder in tuple(self.holders.items()):
            dead = holder is scope and not self.needs[variable]
            if dead and self.rng.random() < self.drops:
                del self.holders[variable]
                scope.discard(self.refs[variable])
                self.discarded.append(self.refs[variable])

    def kept(self) -> list[str]:
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
            case Call() | Move():
                self._call(scope, step)
            case Branch(variable=variable):
                yield from self._read(scope, (variable,))
                odd = self.oracle.variables[variable].number % 2
                for inner in step.above if odd else step.below:
                    yield from self._step(scope, inner)
            case Invoke(worker=worker):
                result, failure = yield scope.launch(worker, self._body, step)
                if failure is not None:
                    raise Broken(failure)
                assert result == ["returned"], result
                for variable, holder in self.holders.items():
                    if holder.path[: len(scope.path)] == scope.path:
                        self.holders[variable] = scope
            case Fetch(variables=variables):
                yield from self._read(scope, variables)
            case Hook(variable=variable):
                rng, replaces = random.Random(step.id), step.how != "gradient"
                scale, shift = rng.choice((-1, 1, 2, 0)), rng.choice((0, 0, 1))
                hook = Affine(f"h{step.id}", scale, shift, self.fuses.get(step.id))
                self.hooks.append(hook)
                path = scope.attach(self.refs[variable], hook, replaces)
                self.oracle.attach(path, variable, hook, replaces)
            case Pass():
                raise AssertionError(step)

    def _function(self, step: Call | Move) -> Linear:
        rng, fuse = random.Random(step.id), self.fuses.get(step.id)
        inputs, outputs = range(len(step.arguments)), range(len(step.outputs))
        if isinstance(step, Move):
            rows = tuple([tuple([int(i == j) for i in inputs]) for j in outputs])
            moved = [
                j for j, use in enumerate(step.arguments) if self.oracle.tracked(use)
            ]
            return Linear("move", rows, fuse, outputs=tuple(moved))
        rows = tuple([tuple([rng.randint(-2, 3) for _ in inputs]) for _ in outputs])
        inexact = INEXACT.get(step.function, (True,) * len(outputs))
        tracked = tuple([j for j in outputs if inexact[j]])
        return Linear(f"f{step.id}", rows, fuse, outputs=tracked)

    def _call(self, scope: Scope, step: Call | Move) -> None:
        function, rng = self._function(step), random.Random(step.id)
        uses = [
            one if isinstance(one, Use) else rng.randint(-3, 3)
            for one in step.arguments
        ]
        arguments = [
            one
            if isinstance(one, int)
            else stopped(self.refs[one.variable])
            if one.stopped
            else self.refs[one.variable]
            for one in uses
        ]
        inexact = [j in function.outputs for j in range(len(step.outputs))]
        worker = known(self.net, scope.worker, step.worker)
        made = scope.call(worker, function, *arguments, inexact=inexact)
        self.refs.update(zip(step.outputs, made, strict=True))
        self.holders.update(dict.fromkeys(step.outputs, scope))
        path = (*scope.path, scope.count)
        self.oracle.call(path, worker, function, uses, step.outputs)
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

    def _pass(self, step: Pass) -> None:
        rng = random.Random(repr(step))
        mode = self.mode or rng.choice((Mode.FAST, Mode.SMART))
        seeds = [
            None if one is None else rng.choice((None, rng.randint(-2, 3)))
            for one in step.cotangents
        ]
        expected = self.oracle.differentiate(step.roots, seeds, step.retain, mode)
        roots = [self.refs[root] for root in step.roots]
        run = partial(
            self.scope.backward, *roots, retain=step.retain, seeds=seeds, mode=mode
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
        given = {hook.name: hook.given for hook in self.hooks if hook.given}
        wanted = {name: [number] for name, number in expected.given.items()}
        if expected.outcome is Outcome.FAILED:
            # How far it got is timing: the oracle stops where something is spent, and
            # a worker may have come further before it was told so.
            wanted = {name: wanted.get(name, them[:1]) for name, them in given.items()}
        assert given == wanted, (expected.outcome, given, wanted)
