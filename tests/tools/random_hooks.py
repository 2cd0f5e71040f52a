"""Hooks for random programs, which stay as they are otherwise."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from tests.tools.random_functions import INEXACT, Hook
from tests.tools.random_programs import (
    Argument,
    Branch,
    Call,
    Constant,
    Invoke,
    Move,
    Plan,
    Step,
    draw,
)
from tests.tools.random_source import made

OFTEN = 0.2  # That a hook comes before a step.
FIRST = 1_000_000  # Ids of hooks begin here: they are apart from those of calls.
HOWS = ("look", "weigh", "weigh", "clip", "bend", "gradient", "gradient")


def numbered(number: int, workers: tuple[str, ...] = ()) -> Plan:
    plan = draw(Random(number), workers)
    return with_hooks(plan, Random(f"hooks {number}")) if number % 3 else plan


def with_hooks(plan: Plan, rng: Random, often: float = OFTEN) -> Plan:
    """The same program with hooks, by the top and by the programs that it calls.

    Some are there before the first pass, and some from a later one on.
    """
    leaves = [leaf.variable for leaf in plan.leaves if leaf.inexact]
    hooking = Hooking(rng, leaves, often)
    return replace(plan, steps=hooking.steps(plan.steps, list(leaves)))


def renumbered(steps: Sequence[Step], by: int) -> tuple[Step, ...]:
    return tuple(_renumbered(step, by) for step in steps)


def _renumbered(step: Step, by: int) -> Step:
    match step:
        case Call() | Move() | Invoke():
            return replace(step, id=step.id + by)
        case Branch(above=above, below=below):
            ways = renumbered(above, by), renumbered(below, by)
            return replace(step, above=ways[0], below=ways[1])
        case _:
            return step


class Hooking:
    """Puts hooks between steps, on what is visible there and tracked."""

    def __init__(self, rng: Random, leaves: Sequence[int], often: float) -> None:
        self.rng, self.often = rng, often
        self.leaves = dict.fromkeys(leaves)  # Or what names one in a program.
        self.tracked = dict.fromkeys(leaves)
        self.count = 0

    def steps(self, steps: Sequence[Step], visible: list[int]) -> tuple[Step, ...]:
        hooked: list[Step] = []
        for step in steps:
            while visible and self.rng.random() < self.often:
                hooked.append(self.hook(visible))
            hooked.append(self.step(step, visible))
        return tuple(hooked)

    def step(self, step: Step, visible: list[int]) -> Step:
        match step:
            case Call(arguments=arguments):
                inexact = INEXACT.get(step.function, (True,) * len(step.outputs))
                recorded = any(map(self.flows, arguments))
                pairs = zip(step.outputs, inexact, strict=True)
                self.see([v for v, each in pairs if recorded and each], visible)
            case Move(arguments=arguments):
                moved = zip(step.outputs, arguments, strict=True)
                self.see([v for v, given in moved if self.flows(given)], visible)
            case Branch():
                above = self.steps(step.above, inner := list(visible))
                below = self.steps(step.below, list(visible))
                self.see([v for v in made(step) if v in inner], visible)
                return replace(step, above=above, below=below)
            case Invoke():
                return self.invoke(step, visible)
        return step

    def flows(self, argument: Argument) -> bool:
        """Whether a cotangent comes back from there."""
        if isinstance(argument, Constant):
            return False
        return argument.variable in self.tracked and not argument.stopped

    def see(self, variables: Sequence[int], visible: list[int]) -> None:
        self.tracked.update(dict.fromkeys(variables))
        visible.extend(variables)

    def invoke(self, step: Invoke, visible: list[int]) -> Invoke:
        body = step.body
        inner: list[int] = []
        for parameter, given in zip(body.parameters, step.arguments, strict=True):
            self.leaves.pop(parameter, None)
            if self.flows(given):
                self.see([parameter], inner)
                if given.variable in self.leaves:
                    self.leaves[parameter] = None
        before = self.count
        steps = self.steps(body.steps, inner)
        for output, returned in zip(step.outputs, body.returns, strict=True):
            self.leaves.pop(output, None)
            if returned in inner:
                self.see([output], visible)
                if returned in self.leaves:
                    self.leaves[output] = None
        if self.count == before:
            return step
        # No two calls attach the same hooks, and all have lines of their own.
        name = f"{body.name}_{self.count}"
        steps = renumbered(steps, FIRST * self.count)
        return replace(step, body=replace(body, name=name, steps=steps))

    def hook(self, visible: Sequence[int]) -> Hook:
        rng = self.rng
        how = rng.choice(HOWS)
        leaves = [variable for variable in visible if variable in self.leaves]
        near = leaves if how == "gradient" else visible
        if not near:
            near, how = visible, "look"
        self.count += 1
        variable = near[-1 - int(len(near) * rng.random() ** 2)]
        return Hook(FIRST + self.count, variable, how)
