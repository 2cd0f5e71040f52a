"""Actions: the work of one pipeline stage on one micro-batch, and its text form.

An action is a forward `0F3` (stage 0, micro-batch 3), a full backward `0B3`, or one of
its halves: `0I3` computes the cotangents of inputs, `0W3` the gradients of parameters.
`(0F7;7B3)OVERLAP_F_B` is a forward and a full backward that run as one action. These
strings are the `str` of actions; `parsed_action` reads them.
"""

import re
from dataclasses import dataclass

from jdag.errors import ScheduleError, repr_of, unusable

_KINDS = ("F", "B", "I", "W")
OVERLAP = "OVERLAP_F_B"

# A result of an action: kind, stage and micro-batch. B gives the result of I, the
# cotangents of inputs; no action needs the gradients of parameters.
Result = tuple[str, int, int]
_GIVES = {"F": "F", "B": "I", "I": "I", "W": "W"}

_SINGLE = re.compile(r"([0-9]{1,9})([A-Z]+)([0-9]{1,9})")
_PAIR = re.compile(rf"\(([^;]*);([^;]*)\){OVERLAP}")


@dataclass(frozen=True, slots=True)
class Action:
    """One action. `kind` is F, B, I or W. `stage` and `micro_batch` count from 0.

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
        """A tuple of this action. An `Overlap` has two parts."""
        return (self,)

    @property
    def gives(self) -> tuple[Result, ...]:
        """The results that the action provides when it ends."""
        return ((_GIVES[self.kind], self.stage, self.micro_batch),)

    def needs(self, stages: int) -> tuple[Result, ...]:
        """The results that the action needs, in a pipeline of `stages` stages."""
        stage, micro_batch = self.stage, self.micro_batch
        if self.kind == "W":
            return (("I", stage, micro_batch),)
        if self.kind == "F":
            return (("F", stage - 1, micro_batch),) if stage else ()
        forward = ("F", stage, micro_batch)
        if stage + 1 == stages:
            return (forward,)
        return (forward, ("I", stage + 1, micro_batch))


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and a full backward that run as one action, as in DualPipe.

    The pair starts when both actions are ready, and ends when both have ended.

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
        """The kind of a pair, always "OVERLAP_F_B"."""
        return OVERLAP

    @property
    def parts(self) -> tuple[Action, ...]:
        """The two actions of the pair: (forward, backward)."""
        return (self.forward, self.backward)

    @property
    def gives(self) -> tuple[Result, ...]:
        """The results that the two actions provide when they end."""
        return self.forward.gives + self.backward.gives

    def needs(self, stages: int) -> tuple[Result, ...]:
        """The results that either action needs, in a pipeline of `stages` stages."""
        return self.forward.needs(stages) + self.backward.needs(stages)


ScheduleStep = Action | Overlap


def parsed_action(text: str, kinds: dict[str, str]) -> ScheduleStep:
    """Parse an action. `kinds` maps kinds in texts to kinds of `Action`.

    Raises:
        ScheduleError: the text is not an action.
    """
    pair = _PAIR.fullmatch(text.strip())
    if pair:
        return Overlap(_single(pair[1], kinds), _single(pair[2], kinds))
    return _single(text, kinds)


def _single(text: str, kinds: dict[str, str]) -> Action:
    match = _SINGLE.fullmatch(text.strip())
    if not match or match[2] not in kinds:
        raise ScheduleError(
            f"{repr_of(text)} is not an action; expected a stage, a kind ("
            f"{', '.join(kinds)}) and a micro-batch, such as 0F3, or a pair such as "
            f"(0F7;7B3){OVERLAP}"
        )
    return Action(kinds[match[2]], int(match[1]), int(match[3]))
