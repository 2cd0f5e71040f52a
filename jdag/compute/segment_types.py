"""What the nodes of a segment make, by their pairs: types, and bytes of residuals."""

from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

from jdag.compute.halves import halves
from jdag.compute.pairs import input_types, output_types
from jdag.engine.segments import NodeKind, SegmentNode


class Carried(NamedTuple):
    """What a bundle holds: residuals, and arguments and outputs of calls as well.

    Inputs of the segment among these are not in `nbytes_most`.
    """

    nbytes: int
    nbytes_most: int
    inputs: tuple[int, ...]


def types_of(
    node: SegmentNode, pairs: Sequence[Any], known: Sequence[Any]
) -> list[Any]:
    """The types of what a node makes, None for residuals; ValueError if it cannot."""
    first, *others = [[known[number] for number in slots] for slots in node.inputs]
    pair: Any = pairs[node.pair] if pairs else None
    made: Sequence[Any]
    match node.kind:
        case NodeKind.FORWARD:
            made = output_types(pair)
            both = zip(first, pair.avals, strict=True)
            fits = not others and all([a in (aval, aval.strong) for a, aval in both])
        case NodeKind.VJP | NodeKind.INPUTS:
            made = input_types(pair)
            if node.kind is NodeKind.INPUTS:
                made = halves(pair, node.weights).input_avals
            outputs = compress(pair.out_avals, pair.out_tracked)
            sides = zip(others, outputs, strict=True)
            fits = first == [None] and all([{*a} <= {aval} for a, aval in sides])
        case NodeKind.WEIGHTS:
            made = halves(pair, node.weights).weight_avals
            fits = first == [None] and not others
        case NodeKind.SUM | NodeKind.FILL:
            made = first[-1:]
            fits = {*first} == {first[0]} and not others
    if not fits:
        raise ValueError(f"what a node takes does not fit: {node}")
    found = [aval.strong for aval in made]
    keeps = node.kind is NodeKind.FORWARD and node.keeps
    return [*found, None] if keeps or node.kind is NodeKind.INPUTS else found


def held(node: SegmentNode, pairs: Sequence[Any], arrays: int, exact: bool) -> Carried:
    """What the residuals, or the stash, of a node hold.

    Args:
        node: a FORWARD that keeps, or INPUTS.
        pairs: those of the segment.
        arrays: of how many arrays the segment's values begin with.
        exact: whether cotangents come as several addends.
    """
    pair = pairs[node.pair]
    if node.kind is NodeKind.INPUTS:
        of = halves(pair, node.weights)
        many = [len(few) if exact else min(len(few), 1) for few in node.inputs]
        cut = of.cut(tuple(many[1:]))
        avals = [of.input_avals[place] for place in cut.results_kept]
        avals += [pair.avals[place] for place in cut.args_kept]
        avals += [pair.out_avals[place] for place in cut.outputs_kept]
        nbytes, read = cut.stash_bytes, []
    else:
        read = [node.inputs[0][place] for place in pair.args_kept]
        both = zip(read, pair.args_kept, strict=True)
        avals = [pair.avals[place] for name, place in both if name >= arrays]
        avals += [pair.out_avals[place] for place in pair.outputs_kept]
        nbytes = pair.residual_bytes
    most = nbytes + sum([aval.nbytes for aval in avals])
    return Carried(nbytes, most, tuple([name for name in read if name < arrays]))
