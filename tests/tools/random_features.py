"""What is in a plan, to see how random programs spread."""

from collections import Counter
from collections.abc import Iterator, Sequence

from tests.tools.random_functions import Hook
from tests.tools.random_programs import (
    Branch,
    Call,
    Constant,
    Invoke,
    Move,
    Pass,
    Plan,
    Step,
    Use,
)


def all_steps(steps: Sequence[Step], depth: int = 0) -> Iterator[tuple[int, Step]]:
    for step in steps:
        yield depth, step
        if isinstance(step, Branch):
            yield from all_steps((*step.above, *step.below), depth)
        elif isinstance(step, Invoke):
            yield from all_steps(step.body.steps, depth + 1)


def features(plan: Plan) -> Counter[str]:
    steps = list(all_steps(plan.steps))
    calls = [step for _, step in steps if isinstance(step, Call | Move)]
    backward = [step for _, step in steps if isinstance(step, Pass)]
    bodies = [step.body.name for _, step in steps if isinstance(step, Invoke)]
    found = [
        f"workers {len(plan.workers)}",
        f"depth {max(depth for depth, _ in steps)}",
        f"passes {len(backward)}",
        f"calls {_range(len(calls))}",
        f"fan-in {_range(max(len(step.arguments) for step in calls))}",
        f"outputs {_range(max(len(step.outputs) for step in calls))}",
        f"fan-out {_range(_fan_out(steps))}",
        *[f"roots {count}" for count in {len(step.roots): 0 for step in backward}],
        *[f"has {type(step).__name__}" for _, step in steps],
        *[f"calls of {step.function}" for step in calls if isinstance(step, Call)],
        *[
            f"hooks that {step.how}, {'in programs' if depth else 'by the top'}"
            for depth, step in steps
            if isinstance(step, Hook)
        ],
        *["hooks before the first pass"] * _early(plan.steps),
        *["hooks on leaves"]
        * any(
            step.variable == leaf.variable
            for _, step in steps
            if isinstance(step, Hook)
            for leaf in plan.leaves
        ),
        *[f"retain {step.retain}" for step in backward],
        *[
            "roots on several workers"
            for step in backward
            if _spread(plan, step, steps)
        ],
        *["one program called twice"] * (len(set(bodies)) < len(bodies)),
        *[a for step in calls for a in map(_argument, step.arguments) if a],
    ]
    return Counter(dict.fromkeys(found, 1))


def _early(steps: Sequence[Step]) -> bool:
    kinds = [type(step) for step in steps if isinstance(step, Hook | Pass)]
    return kinds[0] is Hook


def _range(count: int) -> str:
    for least, most in ((0, 1), (2, 3), (4, 7), (8, 12), (13, 24), (25, 48)):
        if count <= most:
            return f"{least:02} to {most:02}"
    return "49 and more"


def _argument(argument: Use | Constant) -> str:
    if isinstance(argument, Constant):
        return "constants"
    return "stopped gradients" if argument.stopped else ""


def _fan_out(steps: Sequence[tuple[int, Step]]) -> int:
    used: Counter[int] = Counter()
    for _, step in steps:
        if isinstance(step, Call | Move | Invoke):
            used.update(a.variable for a in step.arguments if isinstance(a, Use))
    return max(used.values())


def _spread(plan: Plan, step: Pass, steps: Sequence[tuple[int, Step]]) -> bool:
    makers = {
        output: made.worker
        for _, made in steps
        if isinstance(made, Call | Move)
        for output in made.outputs
    }
    return len({makers.get(root): 0 for root in step.roots}) > 1


def table(spread: Counter[str]) -> str:
    return "\n".join(f"{name:32} {spread[name]:8}" for name in sorted(spread))
