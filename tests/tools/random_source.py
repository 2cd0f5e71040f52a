"""A plan as the source that a user would write, each step on a line of its own.

So errors name call sites that differ, and a plan that fails can be read. What the
source calls besides jdag: `decide` and `note` remember what was fetched, `backward`
does what whoever runs it wants of a pass, and `hook` attaches hooks that remember what
they are given. What no later line names is deleted, sooner
or later or never.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from random import Random
from types import CodeType
from typing import Any

import jax.numpy as jnp

from jdag import fetch, program, static, stop_gradient
from tests.tools import random_functions
from tests.tools.random_functions import HOOKS, Hook
from tests.tools.random_programs import (
    Argument,
    Body,
    Branch,
    Call,
    Constant,
    Fetch,
    Invoke,
    Move,
    Pass,
    Plan,
    Step,
    Use,
)

FILE = "plan.py"
DELETES = 0.5  # How likely what may go is deleted after a line.
STARTS = 0.5  # How likely a program that may run beside its caller does.
FUNCTIONS = ("mix", "product", "total", "split", "ranks", "gather", "scale", "both")


@dataclass
class Source:
    rng: Random  # Of what is deleted.
    lines: list[str] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @cached_property
    def code(self) -> CodeType:
        return compile(self.text, FILE, "exec")

    def say(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    def bodies(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, Branch):
                self.bodies((*step.above, *step.below))
            elif isinstance(step, Invoke) and not self.has(step.body):
                self.bodies(step.body.steps)
                self.function(step.body)

    def has(self, body: Body) -> bool:
        return any(line.startswith(f"def {body.name}(") for line in self.lines)

    def function(self, body: Body) -> None:
        self.say(0, "@program")
        self.say(0, f"def {body.name}(ctx, {names(body.parameters)}):")
        self.steps(body.steps, 1, body.parameters, body.returns)
        self.say(1, f"return [{names(body.returns)}]")
        self.say(0, "")

    def steps(
        self,
        steps: Sequence[Step],
        depth: int,
        known: Sequence[int] = (),
        kept: Sequence[int] = (),
    ) -> None:
        alive = list(known)
        started: list[Invoke] = []
        for place, step in enumerate(steps):
            for task in [one for one in started if {*one.outputs} & {*named(step)}]:
                self.say(depth, f"[{names(task.outputs)}] = t{task.id}.result()")
                started.remove(task)
            match step:
                case Invoke(body=body) if runs_beside(body):
                    started += [step] * (self.rng.random() < STARTS)
                case _:
                    pass
            self.step(step, depth, starts=step in started)
            alive += made(step)
            later = [v for after in steps[place + 1 :] for v in named(after)]
            kept = (*kept, *[v for task in started for v in task.outputs])
            for variable in [v for v in alive if v not in later and v not in kept]:
                if self.rng.random() < DELETES:
                    self.say(depth, f"del v{variable}")
                    alive.remove(variable)
        for task in started:
            self.say(depth, f"[{names(task.outputs)}] = t{task.id}.result()")
        if not steps:
            self.say(depth, "pass")

    def step(self, step: Step, depth: int, *, starts: bool = False) -> None:
        match step:
            case Call() | Move() | Invoke():
                self.say(depth, call(step, starts=starts))
            case Fetch(variables=variables):
                self.say(depth, f"note(fetch(({names(variables)})))")
            case Branch():
                value = f"float(fetch(v{step.variable})[{step.element}])"
                self.say(depth, f"if decide({value} > {step.bound}):")
                self.steps(step.above, depth + 1, kept=made(step))
                self.say(depth, "else:")
                self.steps(step.below, depth + 1, kept=made(step))
            case Hook():
                given = f"v{step.variable}, {step.id}, {step.how!r}"
                self.say(depth, f"hook(ctx, {given})")
            case Pass(roots=roots):
                self.say(depth, f"backward(ctx, {len(self.passes)}, [{names(roots)}])")
                self.passes.append(step)


def named(step: Step) -> list[int]:
    match step:
        case Call(arguments=arguments) | Move(arguments=arguments):
            return [given.variable for given in arguments if isinstance(given, Use)]
        case Invoke(arguments=arguments):
            return [given.variable for given in arguments]
        case Branch(variable=variable, above=above, below=below):
            return [variable, *[v for inner in (*above, *below) for v in named(inner)]]
        case Fetch(variables=variables) | Pass(roots=variables):
            return list(variables)
        case Hook(variable=variable):
            return [variable]


def made(step: Step) -> list[int]:
    """The variables that a step makes, whichever way it goes."""
    match step:
        case Branch(above=above, below=below):
            other = [variable for inner in below for variable in made(inner)]
            return [v for inner in above for v in made(inner) if v in other]
        case Call() | Move() | Invoke():
            return list(step.outputs)
        case _:
            return []


def names(variables: Sequence[int]) -> str:
    return "".join(f"v{variable}, " for variable in variables)


def runs_beside(body: Body) -> bool:
    return all(
        runs_beside(step.body)
        if isinstance(step, Invoke)
        else isinstance(step, Call | Move | Hook)
        for step in body.steps
    )


def call(step: Call | Move | Invoke, *, starts: bool) -> str:
    given = ", ".join(argument(a) for a in step.arguments)
    made = names(step.outputs)
    match step:
        case Move():
            return f"{made}= ctx.move({step.worker!r}, ({given},))"
        case Invoke():
            called = f"({step.worker!r}, {step.body.name}, {given})"
            if starts:
                return f"t{step.id} = ctx.start{called}"
            return f"[{made}] = ctx.call{called}"
        case Call():
            fn = step.function
            if fn == "split":
                given = f"static({len(step.outputs)}), {given}"
            else:
                made = made.removesuffix(", ")
            called = f"ctx.call({step.worker!r}, {fn}, {given})"
            if step.function == "both":
                called = f"values({called})"
            return f"{made} = {called}"


def argument(given: Argument) -> str:
    match given:
        case Constant(value=tuple() as value):
            return f"array({value})"
        case Constant(value=value):
            return repr(value)
        case Use(variable=variable, stopped=True):
            return f"stop_gradient(v{variable})"
        case Use(variable=variable):
            return f"v{variable}"


def source_of(plan: Plan) -> Source:
    """The source of a plan: its programs, then `main`, which takes ctx and leaves."""
    source = Source(Random(repr(plan)))
    source.bodies(plan.steps)
    leaves = [leaf.variable for leaf in plan.leaves]
    source.say(0, f"def main(ctx, {names(leaves)}):")
    source.steps(plan.steps, 1, leaves)
    return source


@dataclass
class Record:
    """What one run of a plan has fetched, which ways it went, what its hooks saw.

    That is by the hook; `late` once a pass has failed, whose calls may come yet.
    """

    decisions: list[bool] = field(default_factory=list)
    notes: list[Any] = field(default_factory=list)
    seen: dict[int, list[Any]] = field(default_factory=dict)
    late: bool = False

    def decide(self, above: bool) -> bool:
        self.decisions.append(above)
        return above

    def called(self, id: int, how: str, cotangent: Any) -> Any:
        self.seen.setdefault(id, []).append(cotangent)
        return HOOKS[how](cotangent)


def main_of(
    source: Source,
    record: Record,
    backward: Callable[[Any, int, list[Any]], None],
    hooking: Callable[[], bool] = lambda: True,
    others: Mapping[str, Any] | None = None,
) -> Callable[..., None]:
    """`main`, which calls `backward(ctx, number from 0, roots)` for each pass.

    What it hooks is hooked as long as `hooking` says so; `others` replaces names.
    """

    def hook(ctx: Any, ref: Any, id: int, how: str) -> None:
        if hooking():
            attach = ctx.on_gradient if how == "gradient" else ctx.on_cotangent
            attach(ref, partial(record.called, id, how))

    held: dict[str, Any] = {name: getattr(random_functions, name) for name in FUNCTIONS}
    held |= {
        "__name__": "plan",
        "array": jnp.array,
        "values": lambda tree: (tree["ranks"], tree["value"]),
        "fetch": fetch,
        "static": static,
        "stop_gradient": stop_gradient,
        "program": program,
        "note": record.notes.append,
        "decide": record.decide,
        "backward": backward,
        "hook": hook,
        **(others or {}),
    }
    exec(source.code, held)
    main: Callable[..., None] = held["main"]
    return main
