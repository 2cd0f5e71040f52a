"""Actions: what a worker of a pipeline does in one step, and how it is written.

An action is a forward `0F3` (stage 0, micro-batch 3), a whole backward `0B3`, or one of
its halves: `0I3` computes the cotangents of inputs, `0W3` the gradients of parameters.
`(0F7;7B3)OVERLAP_F_B` is a forward and a whole backward that run as one.

Inputs:  texts, or kinds with numbers of stages and micro-batches.
Outputs: `Action` and `Overlap`, whose `str` is the text that `parsed_action` reads.

Invariants: `needs` names only what an action of another stage, or an earlier action of
its own stage, `gives`; to other stages a whole backward is the same as its input half.
"""

import re
from dataclasses import dataclass

from jdag.errors import ScheduleError, repr_of, unusable

_KINDS = ("F", "B", "I", "W")
OVERLAP = "OVERLAP_F_B"

# What has been done, with stage and micro-batch. B gives what I gives: the cotangents
# of inputs. Nothing in a schedule needs the gradients of parameters.
Result = tuple[str, int, int]
_GIVES = {"F": "F", "B": "I", "I": "I", "W": "W"}

_SINGLE = re.compile(r"([0-9]{1,9})([A-Z]+)([0-9]{1,9})")
_PAIR = re.compile(rf"\(([^;]*);([^;]*)\){OVERLAP}")


@dataclass(frozen=True, slots=True)
class Action:
    """One action: `kind` is F, B, I or W; `stage` and `micro_batch` count from 0.

    Raises:
        ScheduleError: an unknown kind, or a number that is not an int >= 0.
    """

    kind: str
    stage: int
    micro_batch: int

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            allowed = f"one of {', '.join(_KINDS)}"
            raise ScheduleError(unusable("kind", self.kind, allowed))
        for key in ("stage", "micro_batch"):
            value = getattr(self, key)
            if type(value) is not int or value < 0:
                raise ScheduleError(unusable(key, value, "an integer >= 0"))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def parts(self) -> tuple["Action", ...]:
        """The action itself; an `Overlap` has two."""
        return (self,)

    @property
    def gives(self) -> tuple[Result, ...]:
        """What is done when the action ends."""
        return ((_GIVES[self.kind], self.stage, self.micro_batch),)

    def needs(self, stages: int) -> tuple[Result, ...]:
        """What must be done before the action can start, in a pipeline of `stages`."""
        stage, micro_batch = self.stage, self.micro_batch
        if self.kind == "W":
            return (("I", stage, micro_batch),)
        if self.kind == "F":
            return (("F", stage - 1, micro_batch),) if stage else ()
        own = ("F", stage, micro_batch)
        return (own, ("I", stage + 1, micro_batch)) if stage + 1 < stages else (own,)


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and a whole backward that run as one action, of DualPipe.

    Both must be ready before it starts; both have ended when it ends.

    Raises:
        ScheduleError: `forward` is not an F, or `backward` is not a B.
    """

    forward: Action
    backward: Action

    def __post_init__(self) -> None:
        for key, kind in (("forward", "F"), ("backward", "B")):
            value = getattr(self, key)
            if not isinstance(value, Action) or value.kind != kind:
                allowed = f"an action of kind {kind}"
                raise ScheduleError(
                    unusable(f"{key} of {OVERLAP}", str(value), allowed)
                )

    def __str__(self) -> str:
        return f"({self.forward};{self.backward}){OVERLAP}"

    @property
    def kind(self) -> str:
        """The kind, as actions have one."""
        return OVERLAP

    @property
    def parts(self) -> tuple[Action, ...]:
        """The forward and the backward."""
        return (self.forward, self.backward)

    @property
    def gives(self) -> tuple[Result, ...]:
        """What is done when both have ended."""
        return self.forward.gives + self.backward.gives

    def needs(self, stages: int) -> tuple[Result, ...]:
        """What must be done before both can start."""
        return self.forward.needs(stages) + self.backward.needs(stages)


ScheduleStep = Action | Overlap


def parsed_action(text: str, kinds: dict[str, str]) -> ScheduleStep:
    """Read an action from its text; `kinds` maps kinds of the text to ours.

    Raises:
        ScheduleError: the text is not an action.
    """
    pair = _PAIR.fullmatch(text.strip())
    if pair:
        return Overlap(_single(pair[1], kinds), _single(pair[2], kinds))
    return _single(text, kinds)


def _single(text: str, kinds: dict[str, str]) -> Action:
    found = _SINGLE.fullmatch(text.strip())
    if not found or found[2] not in kinds:
        raise ScheduleError(
            f"{repr_of(text)} is not an action; allowed are a stage, one of "
            f"{', '.join(kinds)}, and a micro-batch, such as 0F3, or a pair such as "
            f"(0F7;7B3){OVERLAP}"
        )
    return Action(kinds[found[2]], int(found[1]), int(found[3]))
