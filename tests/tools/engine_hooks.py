"""Hooks for the programs of engine_programs, which stay as they are otherwise."""

import random
from collections.abc import Sequence
from dataclasses import replace

from tests.tools.engine_oracle import Use
from tests.tools.engine_programs import CallStep, HookStep, Plan, ProgramStep, Step

OFTEN = 0.35  # That a hook follows a step.


def with_hooks(plan: Plan, rng: random.Random) -> Plan:
    """The same program with hooks, by the top and by the programs that it calls."""
    leaves = [variable for variable, _, _ in plan.leaves]
    hooking = Hooking(rng, leaves)
    return replace(plan, steps=hooking.steps(plan.steps, list(leaves)))


class Hooking:
    """Puts hooks between steps: on what can be seen there and is tracked."""

    def __init__(self, rng: random.Random, leaves: Sequence[int]) -> None:
        self.rng = rng
        self.leaves = leaves
        self.tracked = dict.fromkeys(leaves)
        self.count = 0

    def steps(self, steps: Sequence[Step], visible: list[int]) -> tuple[Step, ...]:
        """These steps with hooks between them."""
        hooked: list[Step] = []
        for step in steps:
            while self.rng.random() < OFTEN:
                hooked.append(self.hook(visible))
            if isinstance(step, CallStep):
                visible += self.made(step)
            if isinstance(step, ProgramStep):
                body = self.steps(step.body, list(visible))
                hooked.append(replace(step, body=body))
            else:
                hooked.append(step)
        return tuple(hooked)

    def hook(self, visible: Sequence[int]) -> HookStep:
        """A hook; several on one variable are likely."""
        rng = self.rng
        self.count += 1
        sees = rng.random() < 0.3
        near = self.leaves if sees else visible
        variable = near[-1 - int(len(near) * rng.random() ** 3)]
        scale, shift = rng.choice((-1, 1, 2, 0)), rng.choice((0, 0, 1))
        return HookStep(variable, f"h{self.count}", scale, shift, not sees)

    def made(self, step: CallStep) -> list[int]:
        """The outputs of a call that are tracked."""
        uses = [use for use in step.arguments if isinstance(use, Use)]
        if not any(u.variable in self.tracked and not u.stopped for u in uses):
            return []
        made = [step.outputs[place] for place in step.function.outputs]
        self.tracked.update(dict.fromkeys(made))
        return made
