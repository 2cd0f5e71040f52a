"""What a segment of a plan computes, as data: nodes, and how they are wired.

The values of a segment are numbered: first its arrays, then the residuals that earlier
segments made for it, then what its nodes make, in order. A node makes:

    FORWARD  the outputs of a pair for `inputs[0]`; if `keeps`, then its residuals
    VJP      a cotangent for each tracked input of a pair; `inputs[0]` is the residuals,
             the others are the addends for each tracked output, in order
    INPUTS   the same for inputs that are no `weights`, then the stash for WEIGHTS
    WEIGHTS  a cotangent for each of `weights`; `inputs[0]` is the stash
    SUM      the sum of `inputs[0]`, in the order of `addends`
    FILL     zeros, or ones if `keeps`, like the value `inputs[0]`
"""

from enum import Enum
from typing import Annotated

from msgspec import Meta

from jdag.engine.names import SLOTS_MAX, U32, Mask, Record

Slots = Annotated[tuple[U32, ...], Meta(max_length=SLOTS_MAX)]
_Several = Annotated[tuple[Slots, ...], Meta(max_length=SLOTS_MAX)]


class NodeKind(Enum):
    """What a node of a segment does."""

    FORWARD = "forward"
    VJP = "vjp"
    SUM = "sum"
    FILL = "fill"
    INPUTS = "input_grad"
    WEIGHTS = "weight_grad"


class SegmentNode(Record):
    """One node; `pair` is the index of its pair among those of the segment."""

    kind: NodeKind
    pair: U32
    inputs: _Several
    keeps: bool = False
    weights: Mask = ()  # Of the tracked inputs.
