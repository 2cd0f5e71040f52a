"""Random programs over workers, as data, and drawing one.

All arrays have one shape and there are few functions, so that compiled pairs are found
again; what varies is who calls what where, with which arguments.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random
from typing import Any

import jax.numpy as jnp

from tests.tools.random_functions import INEXACT, SIZE, Hook

FAN_MAX = 12
DEPTH_MAX = 2
WORKERS_MAX = 6


@dataclass(frozen=True)
class Use:
    """A variable as an argument; tracked, if it is, unless its gradient is stopped."""

    variable: int
    stopped: bool = False


@dataclass(frozen=True)
class Constant:
    """A number, or the elements of an array of floats or of ints."""

    value: float | tuple[float, ...] | tuple[int, ...]


Argument = Use | Constant


@dataclass(frozen=True)
class Call:
    id: int
    worker: str
    function: str
    arguments: tuple[Argument, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Move:
    """Several refs move as one pytree."""

    id: int
    worker: str
    arguments: tuple[Use, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Fetch:
    variables: tuple[int, ...]


@dataclass(frozen=True)
class Branch:
    """An element is fetched: where it is above a bound, `above` runs, else `below`.

    Both make the same variables.
    """

    variable: int
    element: int
    bound: float
    above: tuple["Step", ...]
    below: tuple["Step", ...]


@dataclass(frozen=True)
class Body:
    """A program that runs on a worker; it may be called from several places."""

    name: str
    parameters: tuple[int, ...]
    steps: tuple["Step", ...]
    returns: tuple[int, ...]


@dataclass(frozen=True)
class Invoke:
    id: int
    worker: str
    body: Body
    arguments: tuple[Use, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Pass:
    """A backward pass; a root of shape (3,) has its cotangent given."""

    roots: tuple[int, ...]
    cotangents: tuple[float | tuple[float, ...] | None, ...]
    retain: bool


Step = Call | Move | Fetch | Branch | Invoke | Pass | Hook


@dataclass(frozen=True)
class Leaf:
    """What is put on a worker at first: floats, which are tracked, or ints."""

    variable: int
    worker: str
    values: tuple[float, ...] | tuple[int, ...]

    @property
    def inexact(self) -> bool:
        return isinstance(self.values[0], float)

    @cached_property  # Each program is run many times.
    def array(self) -> Any:
        return jnp.array(self.values)


@dataclass(frozen=True)
class Plan:
    workers: tuple[str, ...]
    home: str
    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...]


@dataclass
class Known:
    kind: str  # "float", "int" or "scalar"
    tracked: bool
    call: int  # Which step made it; -1: a leaf.
    used: bool = False  # By something tracked.
    old: bool = False  # A pass may have spent what made it.


# Of each parameter of a program: what it is, and whether it is tracked.
Signature = tuple[tuple[str, bool], ...]


def of_kind(scope: list[int], known: dict[int, Known], kind: str) -> list[int]:
    return [variable for variable in scope if known[variable].kind == kind]


@dataclass
class Draft:
    rng: Random
    workers: tuple[str, ...]
    tidy: bool  # Everything tracked comes together in the roots.
    known: dict[int, Known] = field(default_factory=dict)
    bodies: list[tuple[Body, Signature]] = field(default_factory=list)
    ids: int = 0

    def new_id(self) -> int:
        self.ids += 1
        return self.ids

    def variable(self, kind: str, tracked: bool, call: int) -> int:
        number = len(self.known)
        self.known[number] = Known(kind, tracked, call)
        return number

    def worker(self) -> str:
        return self.rng.choice(self.workers)

    def leaves(self, count: int) -> list[Leaf]:
        rng, leaves = self.rng, []
        for place in range(count):
            inexact = place == 0 or rng.random() < 0.85
            variable = self.variable("float" if inexact else "int", inexact, -1)
            values: Any = tuple(rng.uniform(-1, 1) for _ in range(SIZE))
            if not inexact:
                values = tuple(rng.randrange(SIZE) for _ in range(SIZE))
            leaves.append(Leaf(variable, self.worker(), values))
        return leaves

    def use(self, variables: list[int], stop: float = 0.05) -> Use:
        rng = self.rng
        variable = variables[-1 - int(len(variables) * rng.random() ** 2)]
        known = self.known[variable]
        stopped = rng.random() < (0.97 if known.old else stop)
        known.used = known.used or (known.tracked and not stopped)
        return Use(variable, stopped)

    def tracked(self, argument: Argument) -> bool:
        if isinstance(argument, Constant):
            return False
        return self.known[argument.variable].tracked and not argument.stopped

    def floats(self, scope: list[int], count: int) -> list[Argument]:
        """Arguments of shape (3,), few of them constants.

        Of many, tracked ones come first: each order is one more to compile.
        """
        rng = self.rng
        arguments: list[Argument] = []
        for _ in range(count):
            if rng.random() > 0.1:
                arguments.append(self.use(of_kind(scope, self.known, "float")))
            elif count > 3 or rng.random() < 0.5:
                values = tuple(rng.uniform(-1, 1) for _ in range(SIZE))
                arguments.append(Constant(values))
            else:
                arguments.append(Constant(rng.uniform(-1, 1)))
        if all(
            isinstance(a, Constant) and isinstance(a.value, float) for a in arguments
        ):
            arguments[0] = self.use(of_kind(scope, self.known, "float"))
        if count > 3:
            arguments.sort(key=lambda a: not self.tracked(a))
        return arguments

    def index(self, scope: list[int]) -> Argument:
        ints = of_kind(scope, self.known, "int")
        if ints and self.rng.random() < 0.85:
            return Use(self.rng.choice(ints))
        return Constant(tuple(self.rng.randrange(SIZE) for _ in range(SIZE)))

    def call(
        self, scope: list[int], function: str, arguments: list[Argument], count: int = 1
    ) -> Call:
        """A call on any worker; its outputs are in scope from now on."""
        step = self.new_id()
        recorded = any(map(self.tracked, arguments))
        kind = "scalar" if function == "total" else "float"
        outputs = [
            self.variable(kind if inexact else "int", recorded and inexact, step)
            for inexact in INEXACT.get(function, (True,) * count)
        ]
        scope.extend(outputs)
        return Call(step, self.worker(), function, tuple(arguments), tuple(outputs))

    def any_call(self, scope: list[int]) -> list[Step]:
        rng = self.rng
        floats = of_kind(scope, self.known, "float")
        kind = rng.random()
        if kind < 0.1:
            hub = self.use(floats)
            few = rng.randint(2, FAN_MAX)
            return [self.call(scope, "mix", [hub]) for _ in range(few)]
        if kind < 0.2:
            count = rng.choice((2, 2, 3, rng.randint(2, FAN_MAX)))
            arguments = self.floats(scope, rng.randint(1, 2))
            return [self.call(scope, "split", arguments, count)]
        if kind < 0.26:  # No float comes back: FAST waits for ever if it is tracked.
            return [self.call(scope, "ranks", [self.use(floats, stop=0.95)])]
        if kind < 0.32:
            arguments = self.floats(scope, 1) + self.floats(scope, 1)
            return [self.call(scope, "both", arguments)]
        if kind < 0.46:
            function = rng.choice(("gather", "scale"))
            arguments = [self.index(scope), self.use(floats)]
            return [self.call(scope, function, arguments)]
        if kind < 0.52:
            return [self.call(scope, "product", self.floats(scope, 2))]
        if kind < 0.57:
            return self.dropped(scope)
        bounds = (4, FAN_MAX) if rng.random() < 0.15 else (1, 3)
        return [self.call(scope, "mix", self.floats(scope, rng.randint(*bounds)))]

    def dropped(self, scope: list[int]) -> list[Step]:
        """A call that comes to nothing; one of what was sent for it is used again.

        So the other, and what it was computed from, may have symbolic zeros alone.
        """
        floats = of_kind(scope, self.known, "float")
        inner = list(scope)
        one = self.call(inner, "mix", [self.use(floats)])
        other = self.call(inner, "mix", [self.use(floats)])
        other = replace(other, worker=one.worker)
        uses: list[Argument] = [Use(step.outputs[0]) for step in (one, other)]
        first = self.call(inner, "mix", uses)
        again = replace(self.call(scope, "mix", uses[1:]), worker=first.worker)
        return [one, other, first, again]

    def move(self, scope: list[int]) -> Move:
        rng = self.rng
        step = self.new_id()
        vectors = [v for v in scope if self.known[v].kind != "scalar"]
        uses = [self.use(vectors) for _ in range(rng.choice((1, 1, 2, 3)))]
        made = tuple(
            self.variable(self.known[use.variable].kind, self.tracked(use), step)
            for use in uses
        )
        scope.extend(made)
        return Move(step, self.worker(), tuple(uses), made)

    def branch(self, scope: list[int]) -> Branch:
        rng = self.rng
        vectors = [v for v in scope if self.known[v].kind != "scalar"]
        looked = rng.choice(vectors)
        arguments = self.floats(scope, 2)
        above = self.call(scope, rng.choice(("mix", "product")), arguments)
        inner = list(scope)
        between = self.call(inner, "product", arguments)
        self.known[inner[-1]].used = True
        tracked = self.known[inner[-1]].tracked
        last = Call(
            self.new_id(), self.worker(), "mix", (Use(inner[-1]),), above.outputs
        )
        assert tracked == self.known[above.outputs[0]].tracked, above
        bound = 0.5 if self.known[looked].kind == "int" else rng.uniform(-0.4, 0.6)
        ways: list[tuple[Step, ...]] = [(above,), (between, last)]
        rng.shuffle(ways)
        return Branch(looked, rng.randrange(SIZE), bound, ways[0], ways[1])

    def signature(self, uses: list[Use]) -> Signature:
        return tuple((self.known[u.variable].kind, self.tracked(u)) for u in uses)

    def fitting(self, scope: list[int], signature: Signature) -> list[Use]:
        uses = []
        for kind, tracked in signature:
            variables = of_kind(scope, self.known, kind)
            if tracked:
                variables = [v for v in variables if self.known[v].tracked]
            variable = self.rng.choice(variables)
            known = self.known[variable]
            known.used = known.used or tracked
            uses.append(Use(variable, known.tracked and not tracked))
        return uses

    def invoke(self, depth: int, scope: list[int]) -> Invoke:
        rng = self.rng
        if depth == 0 and self.bodies and rng.random() < 0.4:
            body, signature = rng.choice(self.bodies)
            uses = self.fitting(scope, signature)
        else:
            vectors = [v for v in scope if self.known[v].kind != "scalar"]
            uses = [self.use(vectors) for _ in range(rng.randint(1, 3))]
            if not any(self.known[u.variable].kind == "float" for u in uses):
                uses.append(self.use(of_kind(scope, self.known, "float")))
            body = self.body(depth, uses)
            if depth == 0:
                self.bodies.append((body, self.signature(uses)))
        step = self.new_id()
        made = []
        for variable in body.returns:
            known = self.known[variable]
            made.append(self.variable(known.kind, known.tracked, step))
            if known.call == -1:  # What came in goes out: perhaps a leaf.
                self.known[made[-1]].call = -1
        scope.extend(made)
        return Invoke(step, self.worker(), body, tuple(uses), tuple(made))

    def body(self, depth: int, uses: list[Use]) -> Body:
        rng = self.rng
        name = f"program_{self.new_id()}"
        parameters = [
            self.variable(kind, tracked, -1) for kind, tracked in self.signature(uses)
        ]
        inner = list(parameters)
        steps = self.steps(rng.randint(1, 4), depth + 1, inner)
        returns = [
            variable
            for variable in inner
            if (self.tidy and self.is_loose(variable))
            or rng.random() < (0.5 if variable not in parameters else 0.1)
        ]
        for variable in returns:
            self.known[variable].used = True
        return Body(name, tuple(parameters), tuple(steps), tuple(returns))

    def is_loose(self, variable: int) -> bool:
        known = self.known[variable]
        return known.tracked and not known.used and not known.old

    def steps(self, count: int, depth: int, scope: list[int]) -> list[Step]:
        rng = self.rng
        steps: list[Step] = []
        for _ in range(count):
            kind = rng.random()
            if kind < 0.12 and depth < DEPTH_MAX:
                steps.append(self.invoke(depth, scope))
            elif kind < 0.16:
                steps.append(Fetch((rng.choice(scope), rng.choice(scope))))
            elif kind < 0.23:
                steps.append(self.branch(scope))
            elif kind < 0.3:
                steps.append(self.move(scope))
            else:
                steps += self.any_call(scope)
        return steps

    def loose(self, scope: list[int]) -> list[int]:
        used = [known.call for known in self.known.values() if known.used]
        return [
            variable
            for variable in scope
            if self.is_loose(variable)
            and self.known[variable].call != -1
            and not (self.known[variable].call in used and self.rng.random() < 0.5)
        ]

    def last_pass(self, scope: list[int]) -> list[Step]:
        rng = self.rng
        steps: list[Step] = []
        made = [v for v in scope if self.known[v].tracked and self.known[v].call != -1]
        fresh = [v for v in made if not self.known[v].old] or made
        wanted = rng.randint(1, 3)
        if self.tidy or not fresh:
            roots = self.loose(scope) or fresh[:1]
            leaves = [v for v in scope if self.known[v].call == -1]
            leaves = [v for v in leaves if self.known[v].tracked]
            while len(roots) > wanted or not roots:
                few, roots = roots[:FAN_MAX], roots[FAN_MAX:]
                uses: list[Argument] = [Use(variable) for variable in few or leaves]
                for variable in few:
                    self.known[variable].used = True
                steps.append(self.call(scope, "mix", uses))
                roots.append(scope[-1])
        else:
            roots = [rng.choice(fresh) for _ in range(wanted)]
        for place, root in enumerate(roots):
            if rng.random() < 0.5 and self.known[root].kind == "float":
                self.known[root].used = True
                steps.append(self.call(scope, "total", [Use(root)]))
                roots[place] = scope[-1]
        if len(roots) < 3 and rng.random() < 0.1:
            roots.append(rng.choice(roots))
        retain = rng.random() < 0.5
        cotangents = tuple(self.cotangent(root) for root in roots)
        steps.append(Pass(tuple(roots), cotangents, retain))
        return steps

    def cotangent(self, root: int) -> float | tuple[float, ...] | None:
        rng = self.rng
        if self.known[root].kind == "scalar":
            return rng.choice((None, None, rng.uniform(-2, 2)))
        return tuple(rng.uniform(-2, 2) for _ in range(SIZE))

    def between(self, scope: list[int], last: Pass) -> None:
        for variable in scope:
            known = self.known[variable]
            known.old = not last.retain and known.call != -1
            known.used = False


def draw(rng: Random, workers: tuple[str, ...] = ()) -> Plan:
    """A random program, its passes included, on these workers or on one to six."""
    workers = workers or tuple("abcdef"[: rng.randint(1, WORKERS_MAX)])
    draft = Draft(rng, workers, tidy=rng.random() < 0.7)
    leaves = draft.leaves(rng.randint(1, 5))
    scope = [leaf.variable for leaf in leaves]
    steps: list[Step] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        steps += draft.steps(rng.randint(1, 8), 0, scope)
        steps += draft.last_pass(scope)
        passed = steps[-1]
        assert isinstance(passed, Pass), passed
        again = sum(isinstance(step, Pass) for step in steps) < 3
        if passed.retain and again and rng.random() < 0.4:
            cotangents = tuple(draft.cotangent(root) for root in passed.roots)
            passed = Pass(passed.roots, cotangents, rng.random() < 0.5)
            steps.append(passed)
        draft.between(scope, passed)
        if sum(isinstance(step, Pass) for step in steps) == 3:
            break
    return Plan(workers, rng.choice(workers), tuple(leaves), tuple(steps))
