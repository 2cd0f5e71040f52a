"""Numbers that remember how they were made, and the functions and jobs on them.

A number is an exact integer and the expression that made it: a test sees both whether a
gradient is right and in which order it was added up. A long expression is cut to a
digest of itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from jdag.engine.protocol import Apply, Fill, Forward, Job, Key, Sum, Vjp

Number = tuple[int, str]


@dataclass
class Fuse:
    """Makes a function raise, in "forward", "vjp" or "hook", so and so many times."""

    when: str
    times: int = 1_000_000

    def burn(self, when: str, name: str) -> None:
        if when == self.when and self.times > 0:
            self.times -= 1
            raise ValueError(f"{name} raised in {when}")


@dataclass(frozen=True)
class Linear:
    """A function of integers: output j is the sum over i of credits[j][i] * input i.

    `inputs` and `outputs` are the places of those that are tracked; a call sets them.
    """

    name: str
    credits: tuple[tuple[int, ...], ...]
    fuse: Fuse | None = None
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()

    @property
    def avals(self) -> tuple[str, ...]:
        return ("aval",) * len(self.credits[0])

    @property
    def reaches(self) -> tuple[tuple[bool, ...], ...]:
        """For each tracked input, which tracked outputs it reaches."""
        return tuple(
            tuple(self.credits[j][i] != 0 for j in self.outputs) for i in self.inputs
        )

    def forward(self, inputs: Sequence[Number]) -> list[Number]:
        if self.fuse is not None:
            self.fuse.burn("forward", self.name)
        return [
            (
                sum(w * x for w, (x, _) in zip(row, inputs, strict=True)),
                f"{self.name}.{j}",
            )
            for j, row in enumerate(self.credits)
        ]

    def vjp(self, cotangents: Sequence[Number]) -> list[Number]:
        """A cotangent for each tracked input, from one for each tracked output."""
        if self.fuse is not None:
            self.fuse.burn("vjp", self.name)
        made = ",".join(expression for _, expression in cotangents)
        pairs = list(zip(self.outputs, cotangents, strict=True))
        return [
            (
                sum(self.credits[j][i] * cotangent for j, (cotangent, _) in pairs),
                short(f"{self.name}/{i}({made})"),
            )
            for i in self.inputs
        ]


@dataclass(frozen=True, eq=False)
class Affine:
    """A hook: times `scale` plus `shift`; it notes what it was given."""

    name: str
    scale: int = 1
    shift: int = 0
    fuse: Fuse | None = None
    given: list[Number] = field(default_factory=list)

    def __call__(self, number: Number) -> Number:
        if self.fuse is not None:
            self.fuse.burn("hook", self.name)
        self.given.append(number)
        return self.of(number)

    def of(self, number: Number) -> Number:
        value, expression = number
        return value * self.scale + self.shift, short(f"{self.name}({expression})")


IDENTITY = Linear("move", ((1,),))


def short(expression: str) -> str:
    """An expression, or what stands for one that is too long."""
    if len(expression) < 80:
        return expression
    return "#" + blake2b(expression.encode(), digest_size=8).hexdigest()


def left_fold(addends: Sequence[Number]) -> Number:
    total, expression = addends[0]
    for value, added in addends[1:]:
        total, expression = total + value, short(f"({expression}+{added})")
    return total, expression


def tree_fold(places: Sequence[Number | None]) -> Number | None:
    """Sum by a tree, eight neighbours at a time; None is an empty place, or no sum."""
    if len(places) > 8:
        groups = [places[start : start + 8] for start in range(0, len(places), 8)]
        return tree_fold([tree_fold(group) for group in groups])
    came = [place for place in places if place is not None]
    return left_fold(came) if came else None


def compute(store: dict[Key, Any], job: Job) -> None:
    match job:
        case Forward(function=function, inputs=inputs, outputs=outputs, residuals=kept):
            results = function.forward([store[key] for key in inputs])
            store.update(zip(outputs, results, strict=True))
            if kept is not None:
                store[kept] = "residuals"
        case Vjp(function=function, cotangents=cotangents, outputs=outputs):
            assert store[job.residuals] == "residuals"
            if job.last:
                del store[job.residuals]
            summed = [
                tree_fold([store.pop(key) for key in addends]) or (0, "0")
                for addends in cotangents
            ]
            store.update(zip(outputs, function.vjp(summed), strict=True))
        case Sum(addends=addends, base=base, output=output):
            values = [] if base is None else [store[base]]
            store[output] = tree_fold([*values, *(store.pop(key) for key in addends)])
        case Fill(value=value, output=output):
            store[output] = (value, str(value))
        case Apply(function=function, input=source, output=None):
            function(store[source])
        case Apply(function=function, input=source, output=output):
            assert output is not None, job
            store[output] = function(store.pop(source))


SAME = Linear("same", ((1,),))
DOUBLE = Linear("double", ((2,),))
TRIPLE = Linear("triple", ((3,),))
ADD = Linear("add", ((1, 1),))
SPLIT = Linear("split", ((1,), (3,)))  # Two outputs of one input.
