"""Programs as graphs of a plan, and plans that run in memory, in any order.

A program is a sequence of calls and moves of `tests.tools.random_programs`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdag.compute.avals import aval_of
from jdag.compute.cutting import CutPlan, cut_graph
from jdag.compute.dataflow import DataflowGraph
from jdag.compute.pairs import pair
from jdag.compute.pytrees import split, static, unflatten
from jdag.compute.sums import add, filled
from jdag.engine.functions import transferred
from jdag.engine.names import ContextId, LeafId
from jdag.engine.segments import NodeKind
from tests.tools import random_functions
from tests.tools.random_programs import (
    Call,
    Constant,
    Draft,
    Move,
    Pass,
    Plan,
    Step,
    Use,
)

PLAN = ContextId(0, 7, 0)
Values = dict[int, Any]


def bits(array: Any) -> bytes:
    return np.asarray(array).tobytes()


def draw(rng: Random, few: int = 8) -> Plan:
    """A random program of calls and moves; the roots of its one pass are scalars."""
    workers = tuple("abcd"[: rng.randint(1, 4)])
    draft = Draft(rng, workers, tidy=rng.random() < 0.5)
    leaves = draft.leaves(rng.randint(1, 4))
    scope = [leaf.variable for leaf in leaves]
    steps: list[Step] = []
    while len(steps) < few:
        more = rng.random() < 0.15
        steps += [draft.move(scope)] if more else draft.any_call(scope)
    made = [v for v in scope if draft.known[v].tracked]
    roots = []
    for _ in range(rng.randint(1, 3)):
        uses = [Use(rng.choice(made[-6:])) for _ in range(rng.randint(1, 3))]
        steps.append(draft.call(scope, "total", list(uses)))
        roots.append(scope[-1])
    if rng.random() < 0.2:
        roots.append(roots[0])
    steps.append(Pass(tuple(roots), (None,) * len(roots), retain=False))
    return Plan(workers, workers[0], tuple(leaves), tuple(steps))


@dataclass(frozen=True)
class Var:
    number: int
    tracked: bool


def one_by_one(graph: DataflowGraph, given: Values) -> Values:
    values = dict(given)
    residuals: dict[int, Any] = {}
    for place, node in enumerate(graph.nodes):
        read = node.inputs[node.kind is NodeKind.VJP :]
        few = [[values[number] for number in slots] for slots in read]
        made: Sequence[Any]
        match node.kind:
            case NodeKind.FORWARD:
                made, residuals[place] = node.pair.forward(few[0])
            case NodeKind.VJP:
                made = node.pair.vjp(residuals[~node.inputs[0][0]], few)
            case NodeKind.SUM:
                made = [add(few[0])]
            case NodeKind.FILL:
                made = [filled(aval_of(few[0][0]), int(node.keeps))]
        values.update(zip(node.outputs, made, strict=True))
    return values


class Recorded:
    """A program in a graph, differentiated.

    `given` has the values of sources by number, `gradients` their numbers by leaf.
    """

    def __init__(self, home: str) -> None:
        self.graph, self.home = DataflowGraph(), home
        self.given: Values = {}
        self.leaves: list[LeafId] = []
        self.gradients: dict[LeafId, int] = {}

    def leaf(self, worker: str, array: Any, *, tracked: bool | None = None) -> Var:
        id, aval = LeafId(worker, len(self.leaves)), aval_of(array)
        self.leaves.append(id)
        on = aval.inexact if tracked is None else tracked
        number = self.graph.source("leaf", worker, aval, leaf=id, tracked=on)
        self.given[number] = array
        return Var(number, on)

    def sent(self, array: Any) -> Var:
        kind = ("input", "constant")[len(self.given) % 2]
        number = self.graph.source(kind, self.home, aval_of(array))
        self.given[number] = array
        return Var(number, False)

    def call(
        self, worker: str, fn: Callable[..., Any], *args: Any, update: bool = False
    ) -> Any:
        parts = split(args, {}, lambda leaf: isinstance(leaf, Var))
        by_place = dict(parts.refs)
        by_place.update({place: self.sent(value) for place, value in parts.constants})
        values = [by_place[place] for place in range(parts.size)]
        avals = tuple([self.graph.aval(value.number) for value in values])
        tracked = tuple([value.tracked for value in values])
        found = pair(fn, parts.template, avals, tracked)
        inputs = [value.number for value in values]
        site = f"line {len(self.graph.nodes) + 1}"
        name = found.name.rpartition(":")[2]
        made = self.graph.call(
            worker, found, inputs, tracked, name, site, update=update
        )
        variables = [Var(number, self.graph.tracked(number)) for number in made]
        return unflatten(found.out_tree, variables)

    def move(self, worker: str, tree: Sequence[Var]) -> list[Var]:
        there: dict[int, Var] = {}
        for kind in (True, False):
            places = [at for at, one in enumerate(tree) if one.tracked is kind]
            if places:
                made = self.call(worker, transferred, *[tree[at] for at in places])
                there.update(zip(places, made, strict=True))
        return [there[at] for at in range(len(tree))]

    def differentiate(self, *roots: Var) -> None:
        self.gradients = self.graph.differentiate([root.number for root in roots])

    def one_by_one(self) -> Values:
        return one_by_one(self.graph, self.given)

    def cut(self, results: Sequence[int], **options: Any) -> CutPlan:
        exact: dict[str, Any] = {"exact": True, "stages": ()}
        exact.update(options)
        return cut_graph(
            self.graph, plan=PLAN, caller=self.home, results=results, **exact
        )


def recorded(program: Plan) -> Recorded:
    """A random program in a graph, differentiated."""
    made = Recorded(program.home)
    values: Values = {
        leaf.variable: made.leaf(leaf.worker, leaf.array) for leaf in program.leaves
    }
    for step in program.steps:
        if isinstance(step, Pass):
            made.differentiate(*[values[root] for root in step.roots])
            continue
        assert isinstance(step, Call | Move), step
        given: list[Any] = []
        for one in step.arguments:
            if isinstance(one, Constant):
                is_array = isinstance(one.value, tuple)
                given.append(jnp.array(one.value) if is_array else one.value)
            else:
                value = values[one.variable]
                given.append(Var(value.number, False) if one.stopped else value)
        found: Any
        if isinstance(step, Move):
            found = made.move(step.worker, given)
        else:
            if step.function == "split":
                given.insert(0, static(len(step.outputs)))
            fn = getattr(random_functions, step.function)
            found = made.call(step.worker, fn, *given)
        values.update(zip(step.outputs, jax.tree.leaves(found), strict=True))
    return made


@dataclass
class Worker:
    values: Values = field(default_factory=dict)
    left: list[Any] = field(default_factory=list)  # Segments that have not run.


def step(made: CutPlan, given: Values, rng: Random) -> dict[str, Values]:
    """Run a step, ready segments in any order; return what each worker has then.

    Each slot reaches a worker once; workers that no part names get nothing.
    """
    workers: dict[str, Worker] = {}
    for name, part in made.parts:
        values = {slot: given[slot] for slot in part.constants}
        values.update({read.slot: given[read.slot] for read in part.reads})
        workers[name] = Worker(values, list(part.segments))
    for name, slots in made.inputs:
        workers[name].values.update({slot: given[slot] for slot in slots})
    while True:
        ready = [
            (worker, segment)
            for worker in workers.values()
            for segment in worker.left
            if all(slot in worker.values for slot in segment.needs)
        ]
        if not ready:
            break
        worker, segment = rng.choice(ready)
        worker.left.remove(segment)
        found = segment.function.run([worker.values[slot] for slot in segment.needs])
        assert not set(segment.makes) & set(worker.values)
        worker.values.update(zip(segment.makes, found, strict=True))
        for hop in segment.hops:
            there = workers.setdefault(hop.to, Worker())
            assert not set(hop.slots) & set(there.values), hop
            there.values.update({slot: worker.values[slot] for slot in hop.slots})
    assert not any(worker.left for worker in workers.values())
    return {name: worker.values for name, worker in workers.items()}
