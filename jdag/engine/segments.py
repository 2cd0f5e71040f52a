"""Segments of a plan as data: nodes, and the numbers of their input values.

The values of a segment are numbered: first its input arrays, then the residuals from
earlier segments, then the outputs of its nodes, in order. The outputs of a node:

    FORWARD  the outputs of a pair for `inputs[0]`; if `keeps`, also its residuals
    VJP      a cotangent for each tracked input of a pair; `inputs[0]` is the residuals,
             the others are the addends for each tracked output, in order
    INPUTS   the same for inputs that are not `weights`, and a stash for WEIGHTS
    WEIGHTS  a cotangent for each of `weights`; `inputs[0]` is the stash
    SUM      the sum of `inputs[0]`, in the order of `addends`
    FILL     zeros, or ones if `keeps`, with the shape and dtype of `inputs[0]`
"""

from enum import Enum
from typing import Annotated

from msgspec import Meta

from jdag.engine.names import SLOTS_MAX, U32, Mask, Record

Slots = Annotated[tuple[U32, ...], Meta(max_length=SLOTS_MAX)]
_Several = Annotated[tuple[Slots, ...], Meta(max_length=SLOTS_MAX)]


class NodeKind(Enum):
    FORWARD = "forward"
    VJP = "vjp"
    SUM = "sum"
    FILL = "fill"
    INPUTS = "input_grad"
    WEIGHTS = "weight_grad"


class SegmentNode(Record):
    """A node. `pair` is the index of the node's pair among the segment's pairs."""

    kind: NodeKind
    pair: U32
    inputs: _Several
    keeps: bool = False
    weights: Mask = ()  # Which tracked inputs are weights.
