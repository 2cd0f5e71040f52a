"""What a program's passes must give, worked out on the whole graph at once.

Two ways that know nothing of each other, and nothing of the engine: the gradient as the
adjoint of the program, as if it ran on one machine; and each mode's rule as a fixpoint
on the graph with its transfers, which says how a pass ends, what is owed and, sum by
sum in program order, with which expression each gradient is made.

FAST's rule: a worker is reached if it has a root or is sent a cotangent. On a reached
worker everything behind its roots and its unspent sends is counted; a vertex is done
when every counted consumer is; a recv that is done sends its cotangent; a send that is
counted and never gets one is owed.

SMART's rule: what is counted is what can be reached from the roots against the edges,
and through each slot of a transfer that is reached; so nothing that is counted can be
owed in the end.

Hooks are given the sum of all that comes to a counted vertex's output, zero if nothing
does, in order of path; the ones that only see, what a leaf has gained in the end.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import and_
from typing import Any

from jdag.engine.protocol import LeafId, Mode, Outcome, Owed
from tests.tools.engine_values import Affine, Linear, Number, left_fold, tree_fold
from tests.tools.random_programs import Use

Path = tuple[int, ...]


@dataclass(eq=False)
class Vertex:
    """A node, send, recv or leaf. `inputs`: (producer, its output) or None."""

    kind: str
    worker: str
    path: Path = ()
    function: Any = None
    outputs: int = 1
    inputs: "list[tuple[Vertex, int] | None]" = field(default_factory=list)
    peer: "Vertex | None" = None  # Of a recv its send.
    destination: str = ""
    leaf: LeafId | None = None
    spent: bool = False
    used: list[int] = field(default_factory=list)  # Of a send: its spent slots.

    def unused(self) -> list[int]:
        return [
            slot
            for slot, edge in enumerate(self.inputs)
            if edge is not None and slot not in self.used
        ]


@dataclass
class Variable:
    worker: str
    number: int
    made: tuple[Vertex, int] | None  # None: not tracked.


@dataclass
class Expected:
    """How a pass must end. `gradients` are those of the leaves it reached."""

    outcome: Outcome
    owed: tuple[Owed, ...] = ()
    gradients: dict[LeafId, Number] = field(default_factory=dict)
    # What each hook is given, once; by name.
    given: dict[str, Number] = field(default_factory=dict)


@dataclass
class Contributions:
    """What a counted vertex has been given: (path, position, number) by output."""

    awaited: int
    given: list[list[tuple[tuple[float, ...], int, Number | None]]]


class Oracle:
    def __init__(self) -> None:
        self.variables: dict[int, Variable] = {}
        self.vertices: list[Vertex] = []
        self.calls: list[tuple[Linear, list[int | None], list[int]]] = []
        self.gradients: dict[LeafId, Number] = {}
        self.totals: dict[LeafId, int] = {}
        self.moved: dict[tuple[Path, int, str, bool], tuple[Vertex, int]] = {}
        # In order of path: (path, the hook, whether it replaces).
        self.hooks: dict[tuple[Vertex, int], list[tuple[Path, Affine, bool]]] = {}

    def leaf(self, variable: int, leaf: LeafId, number: int) -> None:
        vertex = Vertex("leaf", leaf.worker, leaf=leaf)
        self.variables[variable] = Variable(leaf.worker, number, (vertex, 0))

    def call(
        self,
        path: Path,
        worker: str,
        function: Linear,
        arguments: Sequence[Use | int],
        outputs: Sequence[int],
    ) -> None:
        """A call; `function.outputs` are those of its outputs that can be tracked."""
        uses = [a for a in arguments if isinstance(a, Use)]
        arriving = self._transfers(path, worker, function.name, uses)
        inputs: list[tuple[Vertex, int]] = []
        places: list[int] = []
        for place, argument in enumerate(arguments):
            if isinstance(argument, Use) and self.tracked(argument):
                inputs.append(arriving[argument])
                places.append(place)
        made = list(function.outputs) if inputs else []
        numbers = [
            (a, "") if isinstance(a, int) else (self.variables[a.variable].number, "")
            for a in arguments
        ]
        used = Linear(
            function.name, function.credits, None, tuple(places), function.outputs
        )
        node = Vertex("node", worker, path, used, len(made), [*inputs])
        if made:
            self.vertices.append(node)
        results = [number for number, _ in used.forward(numbers)]
        for index, (output, number) in enumerate(zip(outputs, results, strict=True)):
            origin = (node, made.index(index)) if index in made else None
            self.variables[output] = Variable(worker, number, origin)
        tracked = [
            a.variable if isinstance(a, Use) and self.tracked(a) else None
            for a in arguments
        ]
        self.calls.append((used, tracked, list(outputs)))

    def attach(self, path: Path, variable: int, hook: Affine, replaces: bool) -> None:
        made = self.variables[variable].made
        assert made is not None, variable
        attached = [*self.hooks.get(made, []), (path, hook, replaces)]
        self.hooks[made] = sorted(attached, key=lambda one: one[0])

    def tracked(self, use: Use) -> bool:
        return not use.stopped and self.variables[use.variable].made is not None

    def _transfers(
        self, path: Path, worker: str, name: str, uses: Sequence[Use]
    ) -> dict[Use, tuple[Vertex, int]]:
        slots: dict[str, list[Use]] = {}
        found: dict[Use, tuple[Vertex, int]] = {}
        for use in uses:
            variable = self.variables[use.variable]
            key = (path[:-1], use.variable, worker, self.tracked(use))
            if variable.worker == worker:
                if variable.made is not None:
                    found[use] = variable.made
            elif key in self.moved:
                found[use] = self.moved[key]
            elif use not in slots.get(variable.worker, []):
                slots.setdefault(variable.worker, []).append(use)
        for owner, mine in slots.items():
            self._transfer(path, worker, owner, name, mine, found)
        return found

    def _transfer(
        self,
        path: Path,
        worker: str,
        owner: str,
        name: str,
        uses: list[Use],
        found: dict[Use, tuple[Vertex, int]],
    ) -> None:
        # Stopped or not makes no difference to a value that is not tracked.
        kinds = list(dict.fromkeys((use.variable, self.tracked(use)) for use in uses))
        send = Vertex("send", owner, path, name, destination=worker)
        recv = Vertex("recv", worker, path, outputs=len(kinds), peer=send)
        for slot, (variable, tracked) in enumerate(kinds):
            made = self.variables[variable].made if tracked else None
            send.inputs.append(made)
            self.moved[path[:-1], variable, worker, tracked] = (recv, slot)
        for use in uses:
            found[use] = (recv, kinds.index((use.variable, self.tracked(use))))
        if any(tracked for _, tracked in kinds):
            self.vertices += [send, recv]

    def differentiate(
        self,
        roots: Sequence[int],
        seeds: Sequence[int | None],
        retain: bool,
        mode: Mode = Mode.FAST,
    ) -> Expected:
        if not retain:  # Its transfers are spent; a leaf never is, and moves again.
            self.moved = {
                key: place
                for key, place in self.moved.items()
                if not (key[3] and self._is_leaf(key[1]))
            }
        rule = Fixpoint(self.vertices, self.gradients, mode, self.hooks)
        for number, root in enumerate(roots):
            made = self.variables[root].made
            assert made is not None, root
            rule.root(made, number, seeds[number])
        expected = rule.run()
        if expected.outcome is Outcome.FINISHED:
            self.gradients.update(expected.gradients)
            self._check_adjoint(roots, seeds, expected, rule.counted)
            counted, slots = list(rule.counted), rule.slots
        else:
            counted = self.vertices
            slots = {v: v.unused() for v in self.vertices if v.kind == "send"}
        if not retain:
            for vertex in counted:
                vertex.spent = vertex.kind == "node"
            for send, used in slots.items():
                send.used += used
        return expected

    def _is_leaf(self, variable: int) -> bool:
        made = self.variables[variable].made
        return made is not None and made[0].kind == "leaf"

    def _check_adjoint(
        self,
        roots: Sequence[int],
        seeds: Sequence[int | None],
        expected: Expected,
        reached: Container[Vertex],
    ) -> None:
        adjoint: dict[int, int] = {}
        for root, seed in zip(roots, seeds, strict=True):
            adjoint[root] = adjoint.get(root, 0) + (1 if seed is None else seed)
        for function, tracked, outputs in reversed(self.calls):
            for output in outputs:
                self._hook_adjoint(adjoint, output, reached)
            for place, used in enumerate(tracked):
                if used is not None:
                    adjoint[used] = adjoint.get(used, 0) + sum(
                        function.credits[j][place] * adjoint.get(outputs[j], 0)
                        for j in function.outputs
                    )
        for name, variable in self.variables.items():
            if variable.made is not None and variable.made[0].kind == "leaf":
                leaf = variable.made[0].leaf
                assert leaf is not None
                self._hook_adjoint(adjoint, name, reached)
                total = self.totals.get(leaf, 0) + adjoint.get(name, 0)
                self.totals[leaf] = total
                if leaf in expected.gradients:
                    assert expected.gradients[leaf][0] == total, (leaf, total)
                else:
                    assert adjoint.get(name, 0) == 0, leaf

    def _hook_adjoint(
        self, adjoint: dict[int, int], variable: int, reached: Container[Vertex]
    ) -> None:
        made = self.variables[variable].made
        if made is not None and made[0] in reached:
            for _, hook, replaces in self.hooks.get(made, []):
                if replaces:
                    adjoint[variable], _ = hook.of((adjoint.get(variable, 0), ""))


class Fixpoint:
    def __init__(
        self,
        vertices: Sequence[Vertex],
        gradients: dict[LeafId, Number],
        mode: Mode,
        hooks: dict[tuple[Vertex, int], list[tuple[Path, Affine, bool]]],
    ) -> None:
        self.mode = mode
        self.hooks = hooks
        self.given: dict[str, Number] = {}
        self.seen: dict[str, Number] = {}
        self.vertices = vertices
        self.gradients = gradients
        self.roots: list[tuple[Vertex, int, int, int | None]] = []
        self.counted: dict[Vertex, Contributions] = {}
        self.reached: dict[str, None] = {}
        self.broken: dict[str, None] = {}  # Reached, and something there is spent.
        self.slots: dict[Vertex, list[int]] = {}  # Of each send those counted.
        self.owed: dict[Vertex, None] = {}  # The counted sends that still wait.
        self.done: list[Vertex] = []
        self.found: dict[LeafId, Number] = {}

    def root(self, made: tuple[Vertex, int], number: int, seed: int | None) -> None:
        self.roots.append((*made, number, seed))

    def run(self) -> Expected:
        if self.mode is Mode.SMART:
            self._mark()
        for vertex, *_ in self.roots:
            self._reach(vertex.worker)
        for vertex, index, number, seed in self.roots:
            value = (1, "1") if seed is None else (seed, str(seed))
            if vertex.worker not in self.broken:
                self._give(vertex, index, (inf,), number, value)
        while self.done:
            self._finish(self.done.pop())
        if self.broken:
            return Expected(Outcome.FAILED, given=self.given)
        if self.owed:
            owed = [
                Owed(v.path, v.worker, v.destination, v.function, "here")
                for v in self.owed
            ]
            return Expected(Outcome.STUCK, tuple(sorted(owed)), given=self.given)
        given = {**self.given, **self.seen}
        return Expected(Outcome.FINISHED, (), self.found, given)

    def _reach(self, worker: str) -> None:
        if worker in self.reached or self.mode is Mode.SMART:
            return
        self.reached[worker] = None
        edges = [(v, i) for v, i, _, _ in self.roots if v.worker == worker]
        for vertex in self.vertices:
            if vertex.worker == worker and vertex.kind == "send":
                edges += self._owe(vertex, vertex.unused())
        self._count(edges)

    def _mark(self) -> None:
        edges = [(vertex, index) for vertex, index, _, _ in self.roots]
        while edges:
            edges = [
                edge
                for recv, slot in self._count(edges)
                if recv.peer is not None and slot not in self.slots.get(recv.peer, [])
                for edge in self._owe(recv.peer, [slot])
            ]

    def _owe(self, send: Vertex, slots: Sequence[int]) -> list[tuple[Vertex, int]]:
        if slots:
            self.owed[send] = None
            self.slots.setdefault(send, []).extend(slots)
        edges = [send.inputs[slot] for slot in slots]
        return [edge for edge in edges if edge is not None]

    def _count(self, edges: list[tuple[Vertex, int]]) -> list[tuple[Vertex, int]]:
        received: list[tuple[Vertex, int]] = []
        while edges:
            vertex, index = edges.pop()
            if vertex.kind == "recv":
                received.append((vertex, index))
            if vertex not in self.counted:
                self.counted[vertex] = Contributions(0, [])
                for _ in range(vertex.outputs):
                    self.counted[vertex].given.append([])
                if vertex.spent:
                    self.broken[vertex.worker] = None
                edges += [edge for edge in vertex.inputs if edge is not None]
            self.counted[vertex].awaited += 1
        return received

    def _give(
        self,
        vertex: Vertex,
        index: int,
        path: tuple[float, ...],
        position: int,
        number: Number | None,
    ) -> None:
        contributions = self.counted[vertex]
        contributions.given[index].append((path, position, number))
        contributions.awaited -= 1
        if contributions.awaited == 0:
            self.done.append(vertex)

    def _finish(self, vertex: Vertex) -> None:
        slots = [
            self._hooked(vertex, index, slot)
            for index, slot in enumerate(self.counted[vertex].given)
        ]
        if vertex.kind == "leaf":
            assert vertex.leaf is not None
            before, own = self.gradients.get(vertex.leaf), slots[0]
            for _, hook, replaces in self.hooks.get((vertex, 0), []):
                if not replaces:
                    self.seen[hook.name] = own or (0, "0")
            if before is not None:  # A pass is summed by itself, then added.
                own = before if own is None else left_fold([before, own])
            self.found[vertex.leaf] = own or (0, "0")
        elif vertex.kind == "recv":
            self._send(vertex, slots)
        elif any(slot is not None for slot in slots):
            made = vertex.function.vjp([slot or (0, "0") for slot in slots])
            came = [slot is not None for slot in slots]
            reaches = zip(made, vertex.function.reaches, strict=True)
            numbers = [n if any(map(and_, row, came)) else None for n, row in reaches]
            self._pass_on(vertex, numbers)
        else:
            self._pass_on(vertex, [None] * len(vertex.inputs))

    def _hooked(
        self,
        vertex: Vertex,
        index: int,
        slot: list[tuple[tuple[float, ...], int, Number | None]],
    ) -> Number | None:
        slot.sort(key=lambda addend: addend[:2])
        places = [number for _, _, number in slot]
        if vertex.kind == "node":  # A vjp is given what came.
            places = [number for number in places if number is not None]
        own = tree_fold(places)
        for _, hook, replaces in self.hooks.get((vertex, index), []):
            if replaces:
                self.given[hook.name] = own or (0, "0")
                own = hook.of(self.given[hook.name])
        return own

    def _send(self, recv: Vertex, slots: Sequence[Number | None]) -> None:
        send = recv.peer
        assert send is not None
        self._reach(send.worker)
        counted = self.slots.get(send, [])
        late = [s for s, n in enumerate(slots) if n is not None and s not in counted]
        if not counted or late:  # An earlier pass has used it.
            self.broken[send.worker] = None
        if send.worker not in self.broken:
            del self.owed[send]
            self._pass_on(send, slots, counted)

    def _pass_on(
        self,
        vertex: Vertex,
        numbers: Sequence[Number | None],
        slots: Sequence[int] | None = None,
    ) -> None:
        for position, edge in enumerate(vertex.inputs):
            if edge is not None and (slots is None or position in slots):
                self._give(*edge, vertex.path, position, numbers[position])
